"""Serves the scheduler model to the cluster's kube-scheduler, as extender and as webhook.

`python -m tests.peers.lab.extender KUBECONFIG PORT CERT KEY` follows nodes, pods and quotas of the
cluster and writes there what HAMi's scheduler writes. Filter, bind and admission are the model's.
"""

import asyncio
import base64
import contextlib
import json
import random
import ssl
import sys
from pathlib import Path
from typing import Final

import aiohttp
from aiohttp import web
from typing_extensions import override

from agent.kit.timing import SystemClock
from agent.sandbox import store
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.verbs import REGISTER_INTERVAL, BindError, HamiVerbs, StoreCluster
from agent.sandbox.scheduler.webhook import DeniedError, review_pod
from agent.sandbox.store import Json, StatusError
from tests.peers.lab.api import Api, Watched, watching

LONGEST_REVIEW: Final = 7 * 1024 * 1024
"""The most bytes of an AdmissionReview, as in controller-runtime."""
KINDS: Final = ("nodes", "pods", "resourcequotas")
REFUSALS: Final = {
    kind.code: kind
    for kind in (
        store.NotFoundError,
        store.ConflictError,
        store.InvalidError,
        store.TooManyRequestsError,
    )
}


class KubeCluster(StoreCluster):
    """The same over a real API server: each call is one request."""

    def __init__(self, api: Api) -> None:
        self._api = api

    @override
    async def request(self, verb: str, *where: str, body: Json | None = None) -> Json:
        resource, namespace, name = where
        scope = f"/namespaces/{namespace}" if namespace else ""
        method, path = "GET", f"/api/v1{scope}/{resource}/{name}"
        if verb == "create":
            method, path = "POST", f"/api/v1{scope}/{resource}"
        elif verb == "bind":
            method, path = "POST", f"{path}/binding"
        elif verb == "patch":
            method = "PATCH"
        try:
            answer = await self._api.ask(method, path, body)
        except (aiohttp.ClientError, OSError) as error:
            raise StatusError(str(error)) from error
        if answer.code >= 400:
            raise REFUSALS.get(answer.code, StatusError)(answer.told[2])
        return dict(answer.body)


class Followed(Watched):
    """What a watch shows, one after the other."""

    def __init__(self, news: "asyncio.Queue[tuple[str, str, Json]]", resource: str) -> None:
        super().__init__()
        self._news = news
        self._resource = resource

    @override
    def take(self, what: str, item: Json) -> None:
        super().take(what, item)
        self._news.put_nowait((self._resource, what, item))


class Extender:
    """The model's verbs over HTTP, and its view of the cluster, which `run` keeps up to date."""

    def __init__(self, api: Api) -> None:
        self._api = api
        cluster, chance = KubeCluster(api), random.SystemRandom()
        self._hami = HamiVerbs(cluster, SystemClock(), chance, SchedulerSettings(eager=True))
        self._news = asyncio.Queue[tuple[str, str, Json]]()
        self._seen = {resource: Followed(self._news, resource) for resource in KINDS}

    async def run(self) -> None:
        async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            group.create_task(self._hami.run())
            for resource, seen in self._seen.items():
                path = f"/api/v1/{resource}"
                await self._api.get(path)  # it is there
                await stack.enter_async_context(watching(self._api, path, seen))
            group.create_task(self._see_all())
            while True:
                await asyncio.sleep(REGISTER_INTERVAL)
                await self._hami.read_nodes()

    async def _see_all(self) -> None:
        while True:
            resource, what, item = await self._news.get()
            match resource:
                case "nodes":
                    await self._hami.see_node(what, item)
                case "pods":
                    self._hami.see_pod(what, item)
                case _:
                    self._hami.quotas.see(what, item)

    async def filter(self, request: web.Request) -> web.Response:
        args = await request.json()
        try:
            filtered = await self._hami.filter(args["Pod"], args["NodeNames"] or [])
        except StatusError as failure:
            return web.json_response({"Error": str(failure)})
        passed = list(filtered.nodes)
        failed = None if passed else dict(filtered.failed)
        answer = {"NodeNames": passed or None, "FailedNodes": failed, "Error": ""}
        return web.json_response(answer)

    async def bind(self, request: web.Request) -> web.Response:
        args = await request.json()
        try:
            await self._hami.bind(
                args["PodNamespace"], args["PodName"], args["PodUID"], args["Node"]
            )
        except BindError as failure:
            return web.json_response({"Error": str(failure)})
        return web.json_response({"Error": ""})

    async def review(self, request: web.Request) -> web.Response:
        review = await request.json()
        pod = review["request"]["object"]
        answer: Json = {"uid": review["request"]["uid"], "allowed": True}
        try:
            admitted = review_pod(pod, self._hami.settings)
        except DeniedError as denied:
            status = {"code": denied.code, "message": str(denied)}
            answer |= {"allowed": False, "status": status}
        else:
            spec = {"op": "replace", "path": "/spec", "value": admitted["spec"]}
            patch = base64.b64encode(json.dumps([spec]).encode()).decode()
            answer |= {"patchType": "JSONPatch", "patch": patch}
        kind = {"apiVersion": review["apiVersion"], "kind": "AdmissionReview"}
        return web.json_response(kind | {"response": answer})


async def serve(kubeconfig: Path, port: int, cert: str, key: str) -> None:
    document = json.loads(kubeconfig.read_text())  # noqa: ASYNC240 -- a small file, at the start
    where, who = document["clusters"][0]["cluster"], document["users"][0]["user"]
    context = ssl.create_default_context(cafile=where["certificate-authority"])
    api = Api(where["server"], who["token"], context)
    extender = Extender(api)
    app = web.Application(client_max_size=LONGEST_REVIEW)
    app.router.add_post("/filter", extender.filter)
    app.router.add_post("/bind", extender.bind)
    app.router.add_post("/webhook", extender.review)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    runner = web.AppRunner(app, access_log=None)
    try:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()
        await extender.run()
    finally:
        await runner.cleanup()
        await api.close()


if __name__ == "__main__":
    where, port, cert, key = sys.argv[1:]
    asyncio.run(serve(Path(where), int(port), cert, key))

"""Serves the scheduler model to the cluster's kube-scheduler, as extender and as webhook.

`python -m tests.peers.lab.extender KUBECONFIG PORT CERT KEY` follows nodes, pods and quotas of the
cluster and writes there what HAMi's scheduler writes. Filter, bind and admission are the model's.
"""

import asyncio
import base64
import json
import random
import ssl
import sys
from pathlib import Path
from typing import Final, NoReturn

import structlog
from aiohttp import web

from agent.errors import ApiError
from agent.kit.timing import SystemClock
from agent.kube.client import ApiRequest, Connection, KubeSession, Raw, path_of, read_object
from agent.sandbox import store
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.verbs import REGISTER_INTERVAL, BindError, HamiVerbs
from agent.sandbox.store import Json, StatusError

log = structlog.get_logger(__name__)
LONGEST_REVIEW: Final = 7 * 1024 * 1024
"""The most bytes of an AdmissionReview, as in controller-runtime."""
PAUSE: Final = 1.0
"""Seconds between a lost watch and the next list."""
REFUSALS: Final = {
    kind.code: kind
    for kind in (
        store.NotFoundError,
        store.ConflictError,
        store.InvalidError,
        store.TooManyRequestsError,
    )
}


class KubeCluster:
    """Implements `SchedulerCluster` over a real API server: each call is one request."""

    def __init__(self, session: KubeSession) -> None:
        self._session = session

    async def request(
        self,
        verb: str,
        resource: str,
        namespace: str,
        name: str,
        body: Json | None = None,
        *,
        version: str | None = None,
    ) -> Json:
        kind, where = "application/json", path(resource, namespace, name)
        if verb == "create":
            where = path(resource, namespace)
        elif verb == "patch":
            kind = "application/merge-patch+json"
            metadata = (body or {}).get("metadata", {})
            held = {} if version is None else {"resourceVersion": version}
            body = (body or {}) | {"metadata": metadata | held}
        elif verb == "bind":
            verb, resource, where = "create", "pods/binding", f"{where}/binding"
        asked = ApiRequest(verb, resource, where, body=body, content_type=kind)
        try:
            return dict(await self._session.fetch(asked, read_object))
        except ApiError as error:
            raise REFUSALS.get(error.status, StatusError)(str(error)) from error


class Extender:
    """The model's verbs over HTTP, and its view of the cluster, which `run` keeps up to date."""

    def __init__(self, session: KubeSession) -> None:
        self._session = session
        self._hami = HamiVerbs(
            KubeCluster(session),
            SystemClock(),
            random.SystemRandom(),
            SchedulerSettings(),
            eager=True,
        )
        self._seen: dict[str, dict[str, Json]] = {"nodes": {}, "pods": {}, "resourcequotas": {}}
        """What the cluster showed last, by resource and UID."""
        self._listed = {resource: asyncio.Event() for resource in self._seen}

    async def run(self) -> NoReturn:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._hami.run())
            for resource in self._seen:
                group.create_task(self._follow(resource))
            while True:
                await asyncio.sleep(REGISTER_INTERVAL)
                await self._hami.ingest(tuple(self._seen["nodes"].values()))

    async def filter(self, request: web.Request) -> web.Response:
        args = await request.json()
        for listed in self._listed.values():
            await listed.wait()
        try:
            filtered = await self._hami.filter(args["Pod"], args["NodeNames"] or [])
        except StatusError as failure:
            return web.json_response({"Error": str(failure)})
        passed = list(filtered.nodes)
        failed = None if passed else dict(filtered.failed)
        answer = {"NodeNames": passed or None, "FailedNodes": failed, "Error": filtered.error}
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
        admission = self._hami.review(pod)
        answer: Json = {"uid": review["request"]["uid"], "allowed": admission.is_allowed}
        if admission.message:
            answer["status"] = {"code": admission.code, "message": admission.message}
        if admission.is_allowed:
            spec = {"op": "replace", "path": "/spec", "value": admission.pod["spec"]}
            patch = base64.b64encode(json.dumps([spec]).encode()).decode()
            answer |= {"patchType": "JSONPatch", "patch": patch}
        kind = {"apiVersion": review["apiVersion"], "kind": "AdmissionReview"}
        return web.json_response(kind | {"response": answer})

    async def _follow(self, resource: str) -> NoReturn:
        """List and watch for ever. A watch that breaks begins again with a list."""
        version = ""
        while True:
            try:
                if not version:
                    version = await self._list(resource)
                version = await self._watch(resource, version)
            except ApiError as error:
                log.warning("extender.watch_lost", resource=resource, err=str(error))
                version = ""
                await asyncio.sleep(PAUSE)

    async def _list(self, resource: str) -> str:
        """List all objects; return the version from which to watch."""
        await self._hami.queue.turn()
        request = ApiRequest("list", resource, path_of(resource))
        answer = await self._session.fetch(request, read_object)
        items: list[Json] = answer.get("items") or []
        present = {item["metadata"]["uid"] for item in items}
        for uid, gone in tuple(self._seen[resource].items()):
            if uid not in present:
                await self._see(resource, "DELETED", gone)
        for item in items:
            await self._see(resource, "ADDED", item)
        self._listed[resource].set()
        version: str = answer["metadata"]["resourceVersion"]
        return version

    async def _watch(self, resource: str, version: str) -> str:
        """Follow one watch until the server ends it; return the version that it has reached."""
        query = (("watch", "1"), ("resourceVersion", version), ("allowWatchBookmarks", "true"))
        request = ApiRequest("watch", resource, path_of(resource), query=query)
        await self._hami.queue.turn()
        async for kind, obj in self._session.watch(request, as_object):
            if obj is None:  # it is open
                continue
            if kind != "BOOKMARK":
                await self._see(resource, kind, obj)
            version = obj["metadata"]["resourceVersion"]
        return version

    async def _see(self, resource: str, kind: str, obj: Json) -> None:
        uid = obj["metadata"]["uid"]
        if kind == "DELETED":
            self._seen[resource].pop(uid, None)
        else:
            self._seen[resource][uid] = obj
        match resource:
            case "nodes":
                await self._hami.see_node(kind, obj)
            case "pods":
                self._hami.see_pod(kind, obj)
            case _:
                self._hami.quotas.see(kind, obj)


def as_object(_: str, obj: Raw) -> Json:
    return dict(read_object(obj))


def path(resource: str, namespace: str, *name: str) -> str:
    scope = ("namespaces", namespace) if namespace else ()
    return path_of(*scope, resource, *name)


async def serve(
    kubeconfig: Path, port: int, cert: str, key: str, served: asyncio.Event
) -> NoReturn:
    """Serve for ever; `served` is set when the port is open."""
    session = KubeSession(Connection(kubeconfig), random.SystemRandom(), "scheduler")
    extender = Extender(session)
    app = web.Application(client_max_size=LONGEST_REVIEW)
    app.router.add_post("/filter", extender.filter)
    app.router.add_post("/bind", extender.bind)
    app.router.add_post("/webhook", extender.review)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    runner = web.AppRunner(app, access_log=None)
    try:
        await session.open()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()
        served.set()
        await extender.run()
    finally:
        await runner.cleanup()
        await session.close()


if __name__ == "__main__":
    where, port, cert, key = sys.argv[1:]
    asyncio.run(serve(Path(where), int(port), cert, key, asyncio.Event()))

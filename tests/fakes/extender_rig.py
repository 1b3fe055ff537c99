"""The extender over real HTTP: on one side a cluster, on the other who calls as kube-scheduler."""

import asyncio
import base64
import contextlib
import dataclasses
import io
import json
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from agent.host.kube.connection import Connection
from agent.host.kube.session import KubeSession
from agent.sandbox.api_errors import Json
from agent.sandbox.apiserver import ApiServerModel
from agent.sandbox.extender.service import Extender, ExtenderOptions, Listen, serving
from agent.sandbox.lab.cluster import kubeconfig
from agent.sandbox.patching import merge_patch
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.webhook import admit_pod
from agent.sandbox.store import ObjectStore
from tests.fakes.chance import NoChance, Seeded
from tests.fakes.clock import ManualClock
from tests.fakes.scheduler_cluster import LOCK, REGISTER, register_of

QUICK = SchedulerSettings().quick()
HANDSHAKE = "hami.io/node-handshake"
TLS = Path(__file__).parents[1] / "vectors" / "tls"


def server_side(name: str = "one") -> ssl.SSLContext:
    """The TLS context of a server with one of the certificates of the tests."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / f"{name}.crt", TLS / f"{name}.key")
    return context


class ExtenderRig:
    """One cluster, one extender, one caller."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self.store = ObjectStore(self.clock, Seeded())
        self.api = ApiServerModel(self.store, {"t": "admin"})
        self.kubeconfig = folder / "kubeconfig"
        self.address = ""
        self._http: aiohttp.ClientSession | None = None

    @contextlib.asynccontextmanager
    async def extending(
        self, options: ExtenderOptions | None = None, tls: ssl.SSLContext | None = None
    ) -> AsyncIterator[None]:
        """An extender for as long as the block runs; the next one remembers nothing of it.

        Without `options` its client is quick: these tests wait for it in real time.
        """
        self.kubeconfig.write_text(kubeconfig(self.api.url, "t"))
        session = KubeSession(Connection(self.kubeconfig), NoChance())
        extender = Extender(session, self.clock, Seeded(), options or ExtenderOptions(QUICK))
        async with (
            contextlib.aclosing(_Closing(session)),
            serving(extender, Listen(tls=tls)) as self.address,
            self.calling(self.address),
        ):
            yield

    @contextlib.asynccontextmanager
    async def calling(self, address: str) -> AsyncIterator[None]:
        """All calls of the block go to this address."""
        trust = ssl.create_default_context(cafile=TLS / "one.crt")
        connector = aiohttp.TCPConnector(ssl=trust)
        async with aiohttp.ClientSession(address, connector=connector) as self._http:
            yield

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and body of an answer, decoded where it is JSON."""
        assert self._http is not None
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self._http.post(path, data=io.BytesIO(data)) as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, await (answer.json() if is_json else answer.text())

    async def get(self, path: str) -> tuple[int, str]:
        assert self._http is not None
        async with self._http.get(path) as answer:
            return answer.status, await answer.text()

    async def filter(self, name: str, *nodes: str) -> Json:
        """Ask as kube-scheduler does for a pod of this name."""
        args = {"Pod": self.pod(name), "Nodes": None, "NodeNames": list(nodes or ("n1",))}
        status, answer = await self.post("/filter", args)
        assert 200 == status
        return answer

    async def bind(self, name: str, node: str = "n1") -> str:
        """The error of a binding, empty for none; a pod not yet seen is tried again."""
        args = {
            "PodName": name,
            "PodNamespace": "default",
            "PodUID": self.pod(name)["metadata"]["uid"],
            "Node": node,
        }
        async with asyncio.timeout(5):
            while True:
                status, answer = await self.post("/bind", args)
                assert 200 == status
                assert ["Error"] == list(answer)
                if answer["Error"] != f'pod "{name}" not found':
                    return answer["Error"]
                await asyncio.sleep(0.02)

    async def review(self, pod: Any, version: str = "admission.k8s.io/v1") -> Json:
        """Ask as kube-apiserver does about a new pod."""
        request = {"uid": "705ab4f5", "operation": "CREATE", "object": pod}
        body = {"apiVersion": version, "kind": "AdmissionReview", "request": request}
        status, answer = await self.post("/webhook", body)
        assert 200 == status
        assert (version, "AdmissionReview") == (answer["apiVersion"], answer["kind"])
        response: Json = answer["response"]
        return response

    def create_node(self, name: str = "n1", uuids: Sequence[str] = ("GPU-a",)) -> None:
        metadata = {"name": name, "annotations": {REGISTER: register_of(*uuids)}}
        status = {"allocatable": {"nvidia.com/gpu": str(10 * len(uuids))}}
        self.store.create("nodes", {"metadata": metadata, "status": status})

    def create_pod(self, name: str, memory_mib: int = 1000) -> Json:
        limits = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": memory_mib}
        pod: Json = {
            "metadata": {"name": name},
            "spec": {"containers": [{"name": "c0", "resources": {"limits": limits}}]},
        }
        return self.store.create("pods", admit_pod(pod, SchedulerSettings()))

    def pod(self, name: str) -> Json:
        return self.store.get("pods", "default", name)

    def marks(self, name: str) -> Json:
        marks: Json = self.pod(name)["metadata"].get("annotations") or {}
        return marks

    def node(self, name: str = "n1") -> Json:
        marks: Json = self.store.get("nodes", "", name)["metadata"]["annotations"]
        return marks

    def annotate_node(self, name: str = "n1", **marks: str | None) -> None:
        """Change annotations: `lock`, `register`, `handshake`."""
        keys = {"lock": LOCK, "register": REGISTER, "handshake": HANDSHAKE}
        patch = {"metadata": {"annotations": {keys[key]: text for key, text in marks.items()}}}
        self.store.update("nodes", "", name, lambda node: merge_patch(node, patch))

    def events(self, name: str) -> list[str]:
        return [
            event["reason"]
            for event in self.store.select("events")
            if event["involvedObject"]["name"] == name
        ]

    async def until_told(self, name: str, *reasons: str, within: float = 30.0) -> None:
        """Events are sent after the answer: wait until the pod has these."""
        async with asyncio.timeout(within):
            follower = self.store.subscribe("events", None)
            while set(reasons) != set(self.events(name)):
                await anext(follower)

    async def until_node(self, holds: Callable[[], bool], within: float = 30.0) -> None:
        """Look again after every write to a Node."""
        async with asyncio.timeout(within):
            follower = self.store.subscribe("nodes", None)
            while not holds():
                await anext(follower)

    async def until_fits(self, name: str, *, fits: bool = True, within: float = 30.0) -> Json:
        """Ask until the answer is this one: what was just written is on its way to the extender."""
        async with asyncio.timeout(within):
            while True:
                answer = await self.filter(name)
                if fits == (answer["NodeNames"] is not None):
                    return answer
                await asyncio.sleep(0.02)


@dataclasses.dataclass
class _Closing:
    session: KubeSession

    async def aclose(self) -> None:
        await self.session.close()


@contextlib.asynccontextmanager
async def a_cluster(folder: Path) -> AsyncIterator[ExtenderRig]:
    """A cluster with node `n1` and its one GPU, and no extender yet."""
    rig = ExtenderRig(folder)
    await rig.api.start()
    try:
        rig.create_node()
        yield rig
    finally:
        await rig.api.stop()


@contextlib.asynccontextmanager
async def extended(
    folder: Path, options: ExtenderOptions | None = None
) -> AsyncIterator[ExtenderRig]:
    """A cluster with an extender."""
    async with a_cluster(folder) as rig, rig.extending(options):
        yield rig


def decode_patch(response: Json) -> list[Json]:
    """The operations in an admission response."""
    assert "JSONPatch" == response["patchType"]
    changes: list[Json] = json.loads(base64.b64decode(response["patch"]))
    return changes

"""A cluster to explain: the API server model over HTTP, and the scheduler model beside it."""

import asyncio
import contextlib
import dataclasses
import datetime as dt
import json
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from agent.cli.main import dispatch
from agent.hami.annotations import RegisteredGpu, encode_json, encode_stamp
from agent.kit.timing import SystemClock
from agent.model import GpuUuid
from agent.sandbox.apiserver import ApiServerModel
from agent.sandbox.apiserver_requests import merge_patch
from agent.sandbox.scheduler.loop import SchedulerModel
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.verbs import encode_node_lock
from agent.sandbox.scheduler.webhook import admit_pod
from agent.sandbox.store import Json, ObjectStore
from tests.fakes.chance import Seeded
from tests.fakes.kubeworld import KUBECONFIG

REGISTER = "hami.io/node-nvidia-register"
CORDON = "hami.io/device-cordon"
LOCK = "hami.io/mutex.lock"
TOKEN = "a-token"  # noqa: S105 -- of a model
EXPLAIN_RIGHTS = frozenset(
    {
        ("get", "pods"),
        ("list", "pods"),
        ("list", "nodes"),
        ("list", "events"),
        ("list", "resourcequotas"),
    }
)
NO_RIGHTS: frozenset[tuple[str, str]] = frozenset()
SCHEDULER = SchedulerSettings().quick()


def a_gpu(uuid: str, index: int = 0, memory_mib: int = 16_000, **more: Any) -> RegisteredGpu:
    fields: dict[str, Any] = {
        "uuid": GpuUuid(uuid),
        "index": index,
        "split_count": 10,
        "registered_mib": memory_mib,
        "core_percent": 100,
        "type_name": "NVIDIA-Tesla T4",
        "mode": "hami-core",
        "healthy": True,
    }
    return RegisteredGpu(**(fields | more))


def report_of(*gpus: RegisteredGpu) -> str:
    return encode_json(gpus)


@dataclasses.dataclass(frozen=True)
class ExplainAnswer:
    """What the verb printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Mapping[str, Any]:
        """The data of a JSON document."""
        data: Mapping[str, Any] = json.loads(self.out)["data"]
        return data

    def gate(self, name: str) -> Mapping[str, Any]:
        (gate,) = [gate for gate in self.data["gates"] if gate["name"] == name]
        return gate

    @property
    def blocked(self) -> tuple[str, str]:
        """Name and reason of the gate that blocks the pod."""
        ((name, reason),) = [
            (gate["name"], gate["reason"])
            for gate in self.data["gates"]
            if gate["verdict"] == "blocked"
        ]
        return name, reason

    @property
    def changes(self) -> list[str]:
        return [change["said"] for change in self.data["changes"]]


class ExplainRig:
    """The store with its server; `scheduling` runs the scheduler model over it."""

    def __init__(
        self,
        folder: Path,
        capsys: pytest.CaptureFixture[str],
        rights: frozenset[tuple[str, str]] | None,
    ) -> None:
        user = "admin" if rights is None else "operator"
        self.store = ObjectStore(SystemClock(), Seeded(7), history=20_000)
        self.model = ApiServerModel(
            self.store, {TOKEN: user}, rights={"operator": rights or NO_RIGHTS}
        )
        self.kubeconfig = folder / "kubeconfig"
        self._capsys = capsys

    def node(self, name: str, *gpus: RegisteredGpu, **parts: Any) -> Json:
        """A Node that reports these GPUs. `parts`: of its object, and slices."""
        noted = {REGISTER: report_of(*gpus)} if gpus else {}
        metadata: Json = {"name": name, "annotations": noted | parts.get("annotations", {})}
        return self.store.create(
            "nodes",
            {
                "metadata": metadata | parts.get("metadata", {}),
                "spec": parts.get("spec", {}),
                "status": {
                    "allocatable": {"nvidia.com/gpu": str(parts.get("slices", 10 * len(gpus)))},
                    "conditions": [
                        {"type": "Ready", "status": "True"},
                        *parts.get("conditions", ()),
                    ],
                },
            },
        )

    def now(self, ahead: float = 0.0) -> dt.datetime:
        return SystemClock().now() + dt.timedelta(seconds=ahead)

    def edit_pod(self, name: str, patch: Mapping[str, Any]) -> None:
        self.store.update("pods", "default", name, lambda pod: merge_patch(pod, dict(patch)))

    def annotate_node(self, name: str, marks: Mapping[str, str | None]) -> Json:
        patch = {"metadata": {"annotations": dict(marks)}}
        return self.store.update("nodes", "", name, lambda node: merge_patch(node, patch))

    def lock_node(self, name: str, owner: str, age: float = 5.0) -> None:
        self.annotate_node(name, {LOCK: encode_node_lock(self.now(-age), "default", owner)})

    def submit(self, name: str, limits: Mapping[str, object], **parts: Any) -> Json:
        """Create a pod, through the webhook unless `admitted` is False."""
        pod: Json = {
            "metadata": {"name": name, "annotations": parts.get("annotations", {})},
            "spec": {
                "containers": [{"name": "main", "resources": {"limits": dict(limits)}}],
                **parts.get("spec", {}),
            },
        }
        pod["metadata"] |= parts.get("metadata", {})
        is_admitted = parts.get("admitted", True)
        return self.store.create("pods", admit_pod(pod, SCHEDULER) if is_admitted else pod)

    def holder(self, name: str, node: str, uuid: str, mib: int = 1000, cores: int = 0) -> Json:
        """A running pod that holds a share."""
        text = f"{uuid},NVIDIA,{mib},{cores}:;"
        marks = {"hami.io/vgpu-node": node, "hami.io/vgpu-devices-allocated": text}
        marks["hami.io/bind-phase"] = "success"
        metadata = {"annotations": marks, "labels": {"hami.io/vgpu-node": node}}
        limits = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": mib}
        pod = self.submit(name, limits, metadata=metadata, spec={"nodeName": node}, admitted=False)
        running = {"name": "main", "state": {"running": {}}}
        status = {"phase": "Running", "containerStatuses": [running]}
        self.edit_pod(name, {"spec": {"schedulerName": "hami-scheduler"}, "status": status})
        return pod

    def event(self, pod: str, reason: str, message: str, age: float = 20.0) -> Json:
        """An Event of a scheduler that is not modelled, or of a kubelet."""
        held = self.store.get("pods", "default", pod)
        about = {"kind": "Pod", "name": pod, "namespace": "default", "uid": held["metadata"]["uid"]}
        return self.store.create(
            "events",
            {
                "metadata": {"name": f"{pod}.{self.store.version}", "namespace": "default"},
                "involvedObject": about,
                "type": "Warning",
                "reason": reason,
                "message": message,
                "lastTimestamp": encode_stamp(self.now(-age)),
            },
        )

    def agent_pod(self, node: str, name: str = "agent-x", **parts: Any) -> Json:
        """A pod of an agent. `parts`: metadata, spec, status."""
        labels = {"app.kubernetes.io/name": "hami-agent"}
        metadata = {"name": name, "namespace": "kube-system", "labels": labels}
        plugins = {"name": "p", "hostPath": {"path": "/var/lib/kubelet/device-plugins"}}
        pod = {
            "metadata": metadata | parts.get("metadata", {}),
            "spec": {"nodeName": node, "volumes": [plugins], **parts.get("spec", {})},
        }
        return self.store.create("pods", pod | {"status": parts.get("status", {})})

    @contextlib.asynccontextmanager
    async def answering(self, answer: bytes | str | int) -> AsyncIterator[list[URL]]:
        """Every command in a pod answers so (`answer_exec`); the addresses that are asked for."""
        asked: list[URL] = []

        async def serve(request: web.BaseRequest) -> web.StreamResponse:
            asked.append(request.url)
            if request.path.endswith("/exec"):
                return await answer_exec(request, answer)
            headers = {**request.headers}
            async with client.get(f"{self.model.url}{request.path_qs}", headers=headers) as passed:
                return web.json_response(body=await passed.read(), status=passed.status)

        runner = web.ServerRunner(web.Server(serve))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self.kubeconfig.write_text(KUBECONFIG.format(server=url, token=TOKEN), encoding="utf-8")
        async with aiohttp.ClientSession() as client:
            try:
                yield asked
            finally:
                await runner.cleanup()

    @contextlib.asynccontextmanager
    async def scheduling(self) -> AsyncIterator[None]:
        """Run the scheduler model over the store."""
        model = SchedulerModel(self.store, SystemClock(), Seeded(), settings=SCHEDULER)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(model.run())
            try:
                yield
            finally:
                running.cancel()

    async def until_told(self, name: str, reason: str) -> None:
        """Wait until the scheduler has written such an Event about the pod."""
        await self.until(
            lambda: any(
                (event["involvedObject"]["name"], event["reason"]) == (name, reason)
                for event in self.store.select("events")
            ),
            "events",
        )

    async def until(self, claim: Callable[[], bool], resource: str = "pods") -> None:
        async with asyncio.timeout(5):
            follower = self.store.subscribe(resource, None)
            while not claim():
                await anext(follower)

    async def explain(self, *words: str, environ: Mapping[str, str] | None = None) -> ExplainAnswer:
        """Run the verb as a person does; its answer as JSON unless the words say otherwise."""
        form = () if {"-o", "--context"} & set(words) else ("-o", "json")
        return await self.run("explain", *words, *form, environ=environ)

    async def run(self, *words: str, environ: Mapping[str, str] | None = None) -> ExplainAnswer:
        """Run a verb as a person does."""
        known = {"KUBECONFIG": str(self.kubeconfig)} if environ is None else environ
        self._capsys.readouterr()
        code = await asyncio.to_thread(dispatch, words, known)
        out, err = self._capsys.readouterr()
        return ExplainAnswer(code, out, err)


@contextlib.asynccontextmanager
async def explain_rig(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    rights: frozenset[tuple[str, str]] | None = None,
) -> AsyncIterator[ExplainRig]:
    """A listening API server model without objects; the operator has `rights` (None: all)."""
    rig = ExplainRig(folder, capsys, rights)
    await rig.model.start()
    text = KUBECONFIG.format(server=rig.model.url, token=TOKEN)
    rig.kubeconfig.write_text(text, encoding="utf-8")
    try:
        yield rig
    finally:
        await rig.model.stop()


async def answer_exec(request: web.BaseRequest, answer: bytes | str | int) -> web.StreamResponse:
    """What the API server answers to an exec.

    `answer`: what the command writes; a text: why it fails; a number: the server's own refusal.
    """
    if isinstance(answer, int):
        return web.json_response({"kind": "Status", "message": "forbidden"}, status=answer)
    socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
    await socket.prepare(request)
    if isinstance(answer, str):
        await socket.send_bytes(b"\x02" + answer.encode())
        status = {"status": "Failure", "reason": "NonZeroExitCode"}
    else:
        for start in range(0, len(answer), 500):
            await socket.send_bytes(b"\x01" + answer[start : start + 500])
        status = {"status": "Success"}
    await socket.send_bytes(b"\x03" + json.dumps(status).encode())
    await socket.close()
    return socket

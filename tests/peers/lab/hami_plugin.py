"""A stand-in for HAMi's NVIDIA device plugin, v2.10: a program of its own that serves a node.

Written after the behaviour of HAMi's, not after the agent: of the agent it has the messages of the
kubelet's API and the simulated GPUs, and nothing that decides. What HAMi does and the agent does
not is kept: ids that say nothing about the GPU, a pod by the node's lock alone, annotations written
before the answer, a fresh name for each cache file, no second Register until the kubelet's socket
is made anew, and a register annotation whose order is chance.
Source: HAMi v2.10 pkg/device-plugin/nvidiadevice (nvinternal/plugin/server.go, register.go).
"""

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import signal
import ssl
import sys
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import aiohttp
from grpclib.client import Channel
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError
from typing_extensions import override

from agent.sandbox.hardware import described
from agent.sandbox.kubelet.services import SocketServer
from agent.wire.v1beta1 import (
    AllocateRequest,
    AllocateResponse,
    ContainerAllocateResponse,
    Device,
    DevicePluginBase,
    DevicePluginOptions,
    Empty,
    ListAndWatchResponse,
    Mount,
    PreferredAllocationRequest,
    PreferredAllocationResponse,
    PreStartContainerRequest,
    PreStartContainerResponse,
    RegisterRequest,
    RegistrationStub,
)
from tests.peers.lab.api import Api, Object, RefusedError
from tests.peers.lab.node_state import text_of

# What a stand-in for HAMi's plugin reads and writes at the API server; see lab/hami_plugin.py.
#
# Source: HAMi v2.10 pkg/util/util.go (GetPendingPod), pkg/device/devices.go, pkg/util/nodelock.

HANDSHAKE: Final = "hami.io/node-handshake"
REGISTER: Final = "hami.io/node-nvidia-register"
LOCK: Final = "hami.io/mutex.lock"
TO_ALLOCATE: Final = "hami.io/vgpu-devices-to-allocate"
BIND_TIME: Final = "hami.io/bind-time"
BIND_PHASE: Final = "hami.io/bind-phase"
VGPU_NODE: Final = "hami.io/vgpu-node"
_OPEN: Final = frozenset({"allocating", "success"})
"""Bind phases of a pod of which a container may still be asked for."""
_TRIES: Final = 5
_PAUSE: Final = 0.1
_CONFLICT: Final = 409

Group = list[list[str]]
"""A container's devices, each with its fields as text: UUID, type, MiB, percent of the cores."""


def decoded(text: str) -> list[Group]:
    """The groups of a pod's annotation, empty ones too."""
    return [
        [device.split(",") for device in group.split(":") if "," in device]
        for group in text.split(";")
    ]


def encoded(groups: Sequence[Group]) -> str:
    """The text for groups: one `;` longer than what they were read from."""
    return "".join("".join(f"{','.join(device)}:" for device in group) + ";" for group in groups)


class Kube:
    """What the plugin asks the API server and tells it."""

    def __init__(self, api: Api, node: str, manager: str) -> None:
        self._api = api
        self._manager = manager
        self._path = f"/api/v1/nodes/{node}"
        self._node = node

    async def pending(self) -> Object:
        """The pod that an Allocate is for: the lock's owner, else the first that is allocating.

        Raises LookupError: there is none; RefusedError: the lock's owner cannot be read.
        """
        _, _, owner = (await self._lock()).partition(",")
        if owner:
            namespace, _, name = owner.partition(",")
            return await self._api.get(f"/api/v1/namespaces/{namespace}/pods/{name}")
        listed = await self._api.get("/api/v1/pods", fieldSelector=f"spec.nodeName={self._node}")
        for pod in listed["items"]:
            notes = notes_of(pod)
            is_bound = BIND_TIME in notes and notes.get(VGPU_NODE) == self._node
            phase = notes.get(BIND_PHASE)
            if pod["status"].get("phase") == "Pending" and is_bound and phase in _OPEN:
                return pod
        raise LookupError(f"no binding pod found on node {self._node}")

    async def annotate(self, pod: Object, notes: Mapping[str, str]) -> Object:
        """Patch annotations of a pod; the pod as it is then."""
        path = f"{_path(pod)}?fieldManager={self._manager}"
        return await self._api.patch(path, {"metadata": {"annotations": notes}})

    async def release(self, pod: Object) -> None:
        """Take the node's lock away if it is this pod's. Raises RefusedError."""
        owner = f",{pod['metadata']['namespace']},{pod['metadata']['name']}"
        for tries in range(1, _TRIES + 1):
            node = await self._api.get(self._path)
            if not notes_of(node).get(LOCK, "").endswith(owner):
                return
            version = node["metadata"]["resourceVersion"]
            body = {"metadata": {"annotations": {LOCK: None}, "resourceVersion": version}}
            try:
                await self._api.patch(f"{self._path}?fieldManager={self._manager}", body)
            except RefusedError as error:
                if error.code != _CONFLICT or tries == _TRIES:
                    raise
            await asyncio.sleep(_PAUSE * 2**tries)

    async def settle(self, pod: Object) -> None:
        """When nothing of the pod is left to allocate: success, and the lock goes."""
        fresh = await self._api.get(_path(pod))
        if "NVIDIA" not in notes_of(fresh).get(TO_ALLOCATE, ""):
            await self.annotate(pod, {BIND_PHASE: "success"})
            await self.release(pod)

    async def fail(self, pod: Object) -> None:
        """The pod has failed, and the lock goes."""
        await self.annotate(pod, {BIND_PHASE: "failed"})
        await self.release(pod)

    async def register(self, text: str, *, signed: bool) -> None:
        """Patch the register annotation; `signed`: with a sign of life."""
        notes = {REGISTER: text}
        if signed:
            notes[HANDSHAKE] = f"Reported {time.strftime('%Y-%m-%d %H:%M:%S')}"
        body = {"metadata": {"annotations": notes}}
        await self._api.patch(f"{self._path}?fieldManager={self._manager}", body)

    async def _lock(self) -> str:
        return notes_of(await self._api.get(self._path)).get(LOCK, "")


def notes_of(item: Object) -> Mapping[str, str]:
    """The annotations of an object."""
    notes: Mapping[str, str] = item["metadata"].get("annotations") or {}
    return notes


def _path(pod: Object) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


RESOURCE: Final = "nvidia.com/gpu"
SOCKET: Final = "nvidia-gpu.sock"
SCAN: Final = 30.0
_PLUGINS: Final = Path("/var/lib/kubelet/device-plugins")
_HOOK: Final = "/usr/local"
_DIAL: Final = 5.0
_TICK: Final = 0.05


class Plugin(DevicePluginBase):
    """The kubelet's side. `lock`: the directory on the host for HAMi-core's lock."""

    def __init__(self, kube: Kube, ids: Sequence[str], lock: Path) -> None:
        self._kube = kube
        self._ids = ids
        self._lock = lock
        self._turn = asyncio.Lock()

    @override
    async def get_device_plugin_options(self, message: Empty) -> DevicePluginOptions:
        return DevicePluginOptions(get_preferred_allocation_available=True)

    @override
    async def list_and_watch(self, message: Empty) -> AsyncIterator[ListAndWatchResponse]:
        devices = [Device(one, "Healthy") for one in self._ids]
        random.shuffle(devices)
        yield ListAndWatchResponse(devices)
        await asyncio.Event().wait()

    @override
    async def get_preferred_allocation(
        self, message: PreferredAllocationRequest
    ) -> PreferredAllocationResponse:
        return PreferredAllocationResponse()  # nothing: the kubelet picks at will

    @override
    async def pre_start_container(
        self, message: PreStartContainerRequest
    ) -> PreStartContainerResponse:
        return PreStartContainerResponse()

    @override
    async def allocate(self, message: AllocateRequest) -> AllocateResponse:
        async with self._turn:
            try:
                pod = await self._kube.pending()
            except (LookupError, RefusedError) as error:
                raise GRPCError(Status.UNKNOWN, str(error)) from error
            try:
                asked = [len(one.devices_ids) for one in message.container_requests]
                answers = await self._served(pod, asked)
                await self._kube.settle(pod)
            except (LookupError, OSError, RefusedError) as error:
                await self._kube.fail(pod)
                raise GRPCError(Status.UNKNOWN, str(error)) from error
            say("allocated", pod=pod["metadata"]["name"])
            return AllocateResponse(answers)

    async def _served(self, pod: Object, asked: Sequence[int]) -> list[ContainerAllocateResponse]:
        """The answers; the annotation is shortened by what they use up."""
        groups = decoded(notes_of(pod)[TO_ALLOCATE])
        answers = []
        for size in asked:
            number = next((n for n, group in enumerate(groups) if group), None)
            if number is None:
                raise LookupError("device request not found")
            group, groups[number] = groups[number], []
            if len(group) != size:
                raise LookupError("device number not matched")
            answers.append(self._answer(pod, _container(pod, number), group))
        await self._kube.annotate(pod, {TO_ALLOCATE: encoded(groups)})
        return answers

    def _answer(self, pod: Object, container: Object, group: Group) -> ContainerAllocateResponse:
        hook = f"{_HOOK}/vgpu"
        own = f"{hook}/containers/{pod['metadata']['uid']}_{container['name']}"
        shutil.rmtree(own, ignore_errors=True)
        for directory in (Path(own), self._lock):
            directory.mkdir(parents=True, exist_ok=True)
            directory.chmod(0o777)
        mounts = [
            Mount(f"{hook}/libvgpu.so", f"{hook}/libvgpu.so", True),
            Mount(hook, own, False),
            Mount("/tmp/vgpulock", str(self._lock), False),  # noqa: S108 -- libvgpu.so's
        ]
        given = {one["name"]: one.get("value", "") for one in container.get("env", ())}
        if given.get("CUDA_DISABLE_CONTROL") not in {"1", "t", "T", "TRUE", "true", "True"}:
            mounts.append(Mount("/etc/ld.so.preload", f"{hook}/ld.so.preload", True))
        limits = {
            f"CUDA_DEVICE_MEMORY_LIMIT_{number}": f"{device[2]}m"
            for number, device in enumerate(group)
        }
        envs = limits | {
            "NVIDIA_VISIBLE_DEVICES": ",".join(dict.fromkeys(device[0] for device in group)),
            "CUDA_DEVICE_SM_LIMIT": group[0][3],
            "CUDA_DEVICE_MEMORY_SHARED_CACHE": f"{hook}/{uuid.uuid4()}.cache",
            "LIBCUDA_LOG_LEVEL": "1",
        }
        return ContainerAllocateResponse(envs=envs, mounts=mounts)


def _container(pod: Object, number: int) -> Object:
    """The container of a group: init containers come first. Raises LookupError."""
    spec = pod["spec"]
    containers: list[Object] = [*spec.get("initContainers", ()), *spec["containers"]]
    return containers[number]


def say(event: str, **more: object) -> None:
    """One line for who reads the log."""
    sys.stdout.write(json.dumps({"event": event, **more}) + "\n")
    sys.stdout.flush()


class Program:
    """The plugin's life: serve, register, report; all of it anew when the kubelet's socket is."""

    def __init__(
        self, kube: Kube, gpus: str, split: int, lock: Path, *, is_old: bool = False
    ) -> None:
        self._gpus = described(gpus).gpus
        self._split = split
        self._is_old = is_old
        self._kube = kube
        ids = [f"{gpu.uuid}-{number}" for gpu in self._gpus for number in range(split)]
        self._plugin = Plugin(kube, ids, lock)

    async def run(self) -> None:
        """One incarnation after the other, for ever."""
        while True:
            seen = _kubelet()
            async with _serving(self._plugin), asyncio.TaskGroup() as group:
                reporting = group.create_task(self._report())
                while seen == _kubelet():  # noqa: ASYNC110 -- nobody tells
                    await asyncio.sleep(_TICK)
                reporting.cancel()
            say("restarting")

    async def _report(self) -> None:
        """Register with the kubelet, then with the Node, where the last text is not sent again.

        Before 2.8 it is, with a sign of life.
        """
        await _register()
        say("registered")
        last = ""
        while True:
            text = self._text()
            if text != last or self._is_old:
                last = text
                with contextlib.suppress(RefusedError, aiohttp.ClientError, OSError):
                    await self._kube.register(text, signed=self._is_old)
            await asyncio.sleep(SCAN)

    def _text(self) -> str:
        """The register annotation, in an order of chance as that of a Go map; zero is absent."""
        entries: list[dict[str, object]] = []
        for gpu in random.sample(self._gpus, len(self._gpus)):
            name = gpu.name or ""
            entry = {
                "id": gpu.uuid,
                "index": gpu.index,
                "count": self._split,
                "devmem": gpu.memory_mib,
                "devcore": 100,
                "type": f"NVIDIA-{name}" if self._is_old or not name.startswith("NVIDIA") else name,
                "numa": gpu.numa,
                "mode": "hami-core",
                "health": True,
            }
            entries.append({key: value for key, value in entry.items() if value})
        if self._is_old:
            return text_of([{"numa": 0, "index": 0, **one} for one in entries], colon=True)
        return json.dumps(entries, separators=(",", ":"))


def _kubelet() -> tuple[int, int] | None:
    """Which socket of the kubelet is there."""
    try:
        found = (_PLUGINS / "kubelet.sock").stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_ctime_ns


@contextlib.asynccontextmanager
async def _serving(plugin: Plugin) -> AsyncIterator[None]:
    """Serve; a stale socket goes before it, and its own afterwards."""
    server = SocketServer([plugin])
    await server.serve(_PLUGINS / SOCKET)
    try:
        yield
    finally:
        await server.die()
        (_PLUGINS / SOCKET).unlink(missing_ok=True)


async def _register() -> None:
    """Tell the kubelet, once; tried for a moment while it does not listen yet."""
    request = RegisterRequest(version="v1beta1", endpoint=SOCKET, resource_name=RESOURCE)
    async with asyncio.timeout(_DIAL):
        while True:
            try:
                async with Channel(path=str(_PLUGINS / "kubelet.sock")) as channel:
                    await RegistrationStub(channel).register(request)
            except (OSError, StreamTerminatedError):
                await asyncio.sleep(_TICK)
            else:
                return


async def _run(args: argparse.Namespace) -> None:
    async with _api(args.kubeconfig) as api:
        kube = Kube(api, args.node, args.manager)
        program = Program(kube, args.gpus, args.split, args.lock, is_old=args.old)
        running = asyncio.current_task()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, running.cancel if running else lambda: None)
        with contextlib.suppress(asyncio.CancelledError):
            await program.run()


@contextlib.asynccontextmanager
async def _api(kubeconfig: Path) -> AsyncIterator[Api]:
    document = json.loads(kubeconfig.read_text())  # noqa: ASYNC240 -- a small file, at the start
    cluster, user = document["clusters"][0]["cluster"], document["users"][0]["user"]
    context = ssl.create_default_context(cafile=cluster["certificate-authority"])
    api = Api(cluster["server"], user["token"], context)
    try:
        yield api
    finally:
        await api.close()


def main(words: Sequence[str]) -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description="A stand-in for HAMi's NVIDIA device plugin.")
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--gpus", required=True, help="as hami-agent run --simulate takes them")
    parser.add_argument("--split", type=int, default=10, help="deviceSplitCount")
    parser.add_argument("--lock", type=Path, default=Path("/tmp/vgpulock"))  # noqa: S108 -- HAMi's
    parser.add_argument("--manager", required=True, help="who writes, for the API server's notes")
    parser.add_argument("--old", action="store_true", help="report as releases before 2.8 do")
    asyncio.run(_run(parser.parse_args(words)))


if __name__ == "__main__":
    main(sys.argv[1:])

"""From HAMi's device plugin to the agent under pods that run: none loses its share, or is oversold.

HAMi's plugin is a stand-in of ours; see lab/switch.py.
"""

import asyncio
import json
import random
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Final, Literal

import pytest
import pytest_asyncio
from typing_extensions import override

from agent import cluster as annotations
from agent.cluster import Role
from agent.sandbox.hardware import described
from agent.wire.v1beta1 import (
    AllocateRequest,
    AllocateResponse,
    ContainerAllocateResponse,
    DevicePluginOptions,
    Mount,
    PreferredAllocationRequest,
    PreferredAllocationResponse,
)
from tests.fakes.plugin import ScriptedPlugin, a_device
from tests.peers.lab.agents import RESOURCE, Agent
from tests.peers.lab.api import JSON_PATCH, Object
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.grants import Container, SeenGrant, grants
from tests.peers.lab.node_state import NODE_PATH, notes_of, text_of
from tests.peers.lab.nodes import dies
from tests.peers.lab.part import until, until_answer
from tests.peers.lab.placement import wall
from tests.peers.lab.pods import containers_of, key, lives

MANAGER: Final = "nvidia-device-plugin"
"""Who writes, as the API server notes it."""
BACK: Final = 2.0
"""Seconds that a node may be without slices."""
WITHIN: Final = 30.0
"""Seconds for what takes one or two on a quiet machine."""

Shares = dict[Container, list[SeenGrant]]
Manner = Literal["stopped", "killed", "beside"]
"""How HAMi's plugin ends; beside: when the agent serves already."""

_HOOK: Final = "/usr/local/vgpu"
_SPLIT: Final = 10
_SCAN: Final = 30.0
"""Seconds between two reports, which releases before 2.8 need."""


class HamiPlugin(ScriptedPlugin):
    """Serves the node with 80 slices. `pods` are those that it has served, in order."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(
            cluster.kubelet.plugins, resource=RESOURCE, name="nvidia-gpu.sock", count=0
        )
        self.pods: list[str] = []
        self._cluster = cluster
        self._gpus = described("h100:8").gpus
        self._turn = asyncio.Lock()
        self._reporting: asyncio.Task[None] | None = None
        self.script.options = DevicePluginOptions(get_preferred_allocation_available=True)
        ids = [f"{gpu.uuid}-{number}" for gpu in self._gpus for number in range(_SPLIT)]
        self.devices = [a_device(one) for one in random.sample(ids, len(ids))]

    async def start(self) -> None:
        """Serve, register with the kubelet once, and report. Raises OSError, GRPCError."""
        self.path.unlink(missing_ok=True)
        await self.serve()
        await self.register()
        self._reporting = asyncio.get_running_loop().create_task(self._report())

    async def stop(self) -> None:
        """End as after SIGTERM."""
        await self.kill()
        self.path.unlink(missing_ok=True)

    async def kill(self) -> None:
        """End as after SIGKILL."""
        if self._reporting is not None:
            self._reporting.cancel()
        await self.die()

    def tail(self) -> str:
        """What it has done, for whoever has to find out why."""
        return f"HAMi's plugin has {self.streams} streams and served {self.pods}"

    @override
    async def get_preferred_allocation(
        self, message: PreferredAllocationRequest
    ) -> PreferredAllocationResponse:
        return PreferredAllocationResponse()  # nothing: the kubelet picks at will

    @override
    async def allocate(self, message: AllocateRequest) -> AllocateResponse:
        """Use up the next group of the pod that the node's lock names."""
        async with self._turn:
            lock = notes_of(await self._cluster.api.get(NODE_PATH))[annotations.MUTEX_LOCK]
            _, namespace, name = lock.split(",")
            path = f"/api/v1/namespaces/{namespace}/pods/{name}"
            pod = await self._cluster.api.get(path)
            groups = notes_of(pod)[annotations.TO_ALLOCATE].split(";")
            number = next(place for place, group in enumerate(groups) if group)
            devices = [one.split(",") for one in groups[number].split(":") if one]
            groups[number] = ""
            notes = {annotations.TO_ALLOCATE: ";".join(groups) + ";"}
            is_last = not any(groups)
            if is_last:
                notes[annotations.BIND_PHASE] = annotations.PHASE_SUCCESS
            await self._annotate(path, notes)
            if is_last:
                pointer = "/metadata/annotations/hami.io~1mutex.lock"
                test = {"op": "test", "path": pointer, "value": lock}
                remove = {"op": "remove", "path": pointer}
                await self._cluster.api.patch(NODE_PATH, [test, remove], JSON_PATCH)
            self.pods.append(name)
            return AllocateResponse([self._answer(pod, containers_of(pod)[number], devices)])

    def _answer(
        self, pod: Object, container: Object, devices: list[list[str]]
    ) -> ContainerAllocateResponse:
        name = f"containers/{pod['metadata']['uid']}_{container['name']}"
        own, lock = self._cluster.hook / name, Path(lock_directory(self._cluster))
        shutil.rmtree(own, ignore_errors=True)
        for directory in (own, lock):
            directory.mkdir(parents=True, exist_ok=True)
            directory.chmod(0o777)
        mounts = [
            Mount(f"{_HOOK}/libvgpu.so", f"{_HOOK}/libvgpu.so", True),
            Mount(_HOOK, f"{_HOOK}/{name}", False),
            Mount("/tmp/vgpulock", str(lock), False),  # noqa: S108 -- libvgpu.so's
            Mount("/etc/ld.so.preload", f"{_HOOK}/ld.so.preload", True),
        ]
        limits = {
            f"CUDA_DEVICE_MEMORY_LIMIT_{number}": f"{device[2]}m"
            for number, device in enumerate(devices)
        }
        envs = limits | {
            "NVIDIA_VISIBLE_DEVICES": ",".join(dict.fromkeys(device[0] for device in devices)),
            "CUDA_DEVICE_SM_LIMIT": devices[0][3],
            "CUDA_DEVICE_MEMORY_SHARED_CACHE": f"{_HOOK}/{uuid.uuid4()}.cache",
            "LIBCUDA_LOG_LEVEL": "1",
        }
        return ContainerAllocateResponse(envs=envs, mounts=mounts)

    async def _report(self) -> None:
        """Before 2.8 again and again, with a sign of life."""
        is_old = self._cluster.release.is_old
        while True:
            notes = {annotations.REGISTER: self._text(is_old=is_old)}
            if is_old:
                notes[annotations.HANDSHAKE] = f"Reported {time.strftime('%Y-%m-%d %H:%M:%S')}"
            await self._annotate(NODE_PATH, notes)
            await asyncio.sleep(_SCAN if is_old else 1e6)

    def _text(self, *, is_old: bool) -> str:
        """The register annotation, in an order of chance as that of a Go map; zero is absent."""
        entries: list[dict[str, object]] = []
        for gpu in random.sample(self._gpus, len(self._gpus)):
            name = gpu.name or ""
            entry = {
                "id": gpu.uuid,
                "index": gpu.index,
                "count": _SPLIT,
                "devmem": gpu.memory_mib,
                "devcore": 100,
                "numa": gpu.numa,
                "mode": "hami-core",
                "health": True,
                "type": f"NVIDIA-{name}" if is_old or not name.startswith("NVIDIA") else name,
            }
            entries.append({key: value for key, value in entry.items() if value})
        if is_old:
            return text_of([{"numa": 0, "index": 0, **one} for one in entries], colon=True)
        return json.dumps(entries, separators=(",", ":"))

    async def _annotate(self, path: str, notes: dict[str, str]) -> None:
        body = {"metadata": {"annotations": notes}}
        await self._cluster.api.patch(f"{path}?fieldManager={MANAGER}", body)


@pytest_asyncio.fixture(loop_scope="session")
async def theirs(cluster: Cluster) -> AsyncIterator[HamiPlugin]:
    """HAMi's plugin, which serves the node; ended afterwards."""
    plugin = HamiPlugin(cluster)
    try:
        await plugin.start()
        await until_serving(cluster, plugin)
        yield plugin
    finally:
        await plugin.stop()


def lock_directory(cluster: Cluster) -> str:
    """What stands for the host's /tmp/vgpulock, which is outside of the node's space."""
    return str(cluster.root / "vgpulock")


async def until_serving(cluster: Cluster, plugin: HamiPlugin) -> None:
    """Return once the kubelet and the Node have what HAMi's plugin says. Raises TimeoutError."""
    await until_answer(lambda: offers(cluster, 80), WITHIN, plugin.tail)
    await cluster.nodes.until(cluster.is_sharing, WITHIN, "the Node has no slices")


async def offers(cluster: Cluster, slices: int) -> bool:
    """Whether the kubelet answers and counts so many healthy slices."""
    return await cluster.kubelet.offers(RESOURCE, slices)


def promised(cluster: Cluster, names: Iterable[str]) -> Shares:
    """What the scheduler wrote for each container with GPUs of those pods, but init containers."""
    return {
        (key(name), container): sorted(given, key=str)
        for name in names
        for container, given in grants(cluster.as_seen(name)).items()
        if given and container in lives(cluster.as_seen(name))
    }


def booked(cluster: Cluster) -> tuple[Shares, dict[Container, frozenset[str]]]:
    """The same, as the ledger on disk has it, confirmed; and the ids of each. Raises OSError."""
    found = {who: row for who, row in cluster.rows().items() if row.role is not Role.INIT}
    shares = {
        who: sorted(
            (SeenGrant(one.uuid, one.memory_mib, one.core_percent) for one in row.shares), key=str
        )
        for who, row in found.items()
        if row.confirmed
    }
    return shares, {who: frozenset(row.slice_ids) for who, row in found.items()}


async def until_adopted(
    cluster: Cluster, agent: Agent, names: Iterable[str], within: float = WITHIN
) -> None:
    """Return once the ledger has the rows of those pods and no others. Raises TimeoutError."""
    wanted = promised(cluster, names)

    def are_rows() -> bool:
        try:
            return booked(cluster)[0] == wanted
        except FileNotFoundError:
            return False

    await until(are_rows, within, agent.part.tail)


async def hand_over(
    cluster: Cluster, theirs: HamiPlugin, manner: Manner = "stopped"
) -> tuple[Agent, float]:
    """The agent in the place of HAMi's plugin; with the seconds for which slices were away."""
    if manner == "beside":
        agent = await cluster.start_agent("--takeover")
        await until(lambda: bool(agent.events("registration.serving")), WITHIN, agent.part.tail)
        assert await offers(cluster, 80)
        began = wall()
        await theirs.stop()
        # Up to kubelet 1.36 the end of the one stream is that of both.
        await until(lambda: len(agent.events("registration.serving")) > 1, WITHIN, agent.part.tail)
    else:
        began = wall()
        await (theirs.kill() if manner == "killed" else theirs.stop())
        agent = await cluster.start_agent()
    await until_answer(lambda: offers(cluster, 80), WITHIN, agent.part.tail)
    return agent, wall() - began


CACHE = "CUDA_DEVICE_MEMORY_SHARED_CACHE"


@pytest.mark.timeout(300)  # longer than what is waited for inside, which tells more
@pytest.mark.parametrize("manner", ["killed", "beside"])
async def test_pods_run_on_and_the_agent_has_their_shares(cluster, theirs, table, manner):
    names = await cluster.run_shapes()
    before, held = cluster.lives_of(names), await cluster.kubelet.held(RESOURCE)
    slices = await cluster.kubelet.allocatable(RESOURCE)

    agent, away = await hand_over(cluster, theirs, manner)
    table.hold(f"switch from HAMi's plugin, {manner} → allocatable back", away, BACK)
    await until_adopted(cluster, agent, names)

    assert slices == await cluster.kubelet.allocatable(RESOURCE)
    assert held == await cluster.kubelet.held(RESOURCE) == booked(cluster)[1]
    new = await cluster.run(cluster.a_telling_pod("new", gpus=2))
    assert cluster.expected_inside("new") == await cluster.seen_inside("new")
    await cluster.until_settled(*new)
    assert before == cluster.lives_of(names)
    assert {} == cluster.oversold()
    assert [] == agent.events("ledger.mismatch") + agent.events("ledger.kept_unread")


async def test_the_way_back_loses_nothing_either(cluster, theirs, table):
    before = await cluster.run(cluster.a_telling_pod("hami-1"))
    await cluster.until_settled(*before)
    agent, _ = await hand_over(cluster, theirs)
    await until_adopted(cluster, agent, before)
    ours = await cluster.run(cluster.a_telling_pod("ours-1"), cluster.a_telling_pod("ours-2"))
    await cluster.until_settled(*ours)
    await cluster.until_told(*ours)
    living, held = cluster.lives_of([*before, *ours]), await cluster.kubelet.held(RESOURCE)

    began = wall()
    await agent.part.stop()
    await theirs.start()
    await until_answer(lambda: offers(cluster, 80), WITHIN, theirs.tail)
    table.hold("switch back to HAMi's plugin → allocatable back", wall() - began, BACK)
    await cluster.run(cluster.a_telling_pod("hami-2"))
    await cluster.until_settled("hami-2")

    assert living == cluster.lives_of([*before, *ours])
    assert held.items() <= (await cluster.kubelet.held(RESOURCE)).items()
    assert ["hami-1", "hami-2"] == theirs.pods
    inside = cluster.environment_bytes("ours-1")
    await dies(cluster, "ours-1")
    assert inside == cluster.environment_bytes("ours-1")
    # To the agent again, which has rows of the time before.
    agent, _ = await hand_over(cluster, theirs)
    wanted = promised(cluster, ["hami-1", "hami-2", "ours-1", "ours-2"])
    await until(lambda: wanted == booked(cluster)[0], WITHIN, agent.part.tail)
    assert {} == cluster.oversold()

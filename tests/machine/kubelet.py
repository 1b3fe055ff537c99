"""The kubelet model without sockets and files: its rules as they are, its transport a call."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from grpclib.exceptions import GRPCError

from agent.model import SliceList
from agent.ports import Clock
from agent.sandbox.kubelet.allocation import HEALTHY, DeviceManager
from agent.sandbox.kubelet.checkpoint import Checkpoint
from agent.sandbox.kubelet.endpoint import DeviceError, PluginEndpoint, go_text
from agent.sandbox.kubelet.model import KubeletModel, Life, Timings
from agent.sandbox.kubelet.pods import ContainerSpec, KubeletEvent, PodSpec
from agent.wire.v1beta1 import ContainerAllocateResponse, Device

RESOURCE = "nvidia.com/gpu"
NOWHERE = Path("/nowhere")
REFUSED_ELSEWHERE = "another device plugin has nothing to give"
TIMINGS = Timings()


class Drive:
    """What outlives the kubelet's process.

    `checkpoint`: None: there is no file. `refused_elsewhere`: the container that another device
    plugin refuses before the agent is asked, counted from now; 0: none.
    """

    def __init__(self) -> None:
        self.checkpoint: Checkpoint | None = None
        self.refused_elsewhere = 0


class MemoryDevices(DeviceManager):
    """Its checkpoint is a value, and beside the agent there is another device plugin."""

    drive: Drive

    async def allocate(self, pod: PodSpec, container: ContainerSpec) -> None:
        self.drive.refused_elsewhere -= 1
        if self.drive.refused_elsewhere == 0:
            raise DeviceError(REFUSED_ELSEWHERE)
        await super().allocate(pod, container)

    def _read(self) -> Checkpoint:
        return self.drive.checkpoint or Checkpoint()

    def _write(self, content: Checkpoint) -> None:
        self.drive.checkpoint = content


class MemoryLife(Life):
    """A process that serves nobody by a socket; `Life` decides everything else."""

    async def _serve(self) -> None:
        pass


class MemoryKubelet(KubeletModel):
    """A node's kubelet. `lives` counts its processes: each makes its socket anew."""

    def __init__(self, clock: Clock, chance: random.Random, timings: Timings = TIMINGS) -> None:
        super().__init__(NOWHERE, NOWHERE, clock, chance, timings=timings)
        self.drive = Drive()
        self.lives = 0
        self.history.listen(self._count)

    async def until_allocatable(self, resource: str, count: int) -> None:
        """Wait until exactly so many ids are allocatable."""
        await self.history.until(lambda: self.allocatable(resource) == count)

    def crowd(self, calls: int) -> None:
        """Other clients of PodResources use up its rate limit."""
        with contextlib.suppress(GRPCError):
            for _ in range(calls if self.life is not None else 0):
                self.life.lister._admit()

    def _count(self, event: KubeletEvent) -> None:
        self.lives += event.kind == "started"

    def _lose_checkpoint(self) -> None:
        self.drive.checkpoint = None

    def _new_life(self) -> MemoryLife:
        devices = MemoryDevices(NOWHERE, self.random, self.history, self.node.running())
        devices.drive = self.drive
        return MemoryLife(self, devices)


class MachinePlugin(Protocol):
    """Whom an endpoint calls. Both raise GRPCError or DeviceError as the transport would."""

    async def allocate(self, ids: tuple[str, ...]) -> ContainerAllocateResponse: ...

    async def prefer(
        self, available: tuple[str, ...], must_include: tuple[str, ...], size: int
    ) -> tuple[str, ...]: ...


class StoryLine(PluginEndpoint):
    """A registration without a socket.

    `hear` is told the answer before the kubelet has it, and says whether the kubelet lives on.
    `begins` is told that a call begins, and what it returns that the next answer is this call's.
    """

    def __init__(
        self,
        plugin: MachinePlugin,
        begins: Callable[[], Callable[[], None]],
        hear: Callable[[ContainerAllocateResponse], bool],
    ) -> None:
        super().__init__(RESOURCE, prefers=True)
        self._plugin = plugin
        self._begins = begins
        self._hear = hear

    async def allocate(self, ids: Iterable[str]) -> ContainerAllocateResponse:
        self._require_plugin()
        is_answered = self._begins()
        try:
            answer = await self._plugin.allocate(tuple(ids))
        except (GRPCError, OSError) as error:
            raise DeviceError(go_text(error)) from error
        is_answered()
        if not self._hear(answer):
            await asyncio.Event().wait()
        return answer

    async def prefer(
        self, available: Iterable[str], must_include: Iterable[str], size: int
    ) -> tuple[str, ...]:
        self._require_plugin()
        try:
            return await self._plugin.prefer(tuple(available), tuple(must_include), size)
        except (GRPCError, OSError) as error:
            text = f"device plugin GetPreferredAllocation rpc failed with err: {go_text(error)}"
            raise DeviceError(text) from error

    def _require_plugin(self) -> None:
        if self.stopped_at is not None:
            raise DeviceError(f"endpoint {self.resource} has been stopped")


def devices_of(listed: SliceList) -> tuple[Device, ...]:
    """One list of the agent, as the kubelet reads it."""
    return tuple(
        Device(text, HEALTHY if group.healthy else "Unhealthy")
        for group in listed.groups
        for text in group.ids
    )

"""The handlers of the kubelet's five calls; they translate between messages and services."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

import structlog
from grpclib.const import Handler
from typing_extensions import override

from agent.core.containers.edits import ContainerEdits
from agent.core.errors import AgentError, Refusal, RefusalReason, SettingsError
from agent.core.inventory.slices import SliceId, SliceList
from agent.kit.cell import Cell
from agent.plugin.calls import ALLOCATE_FOLLOWED, PREFERENCE_FOLLOWED, AdmissionCalls
from agent.plugin.frames import ListFrame, ListFrames
from agent.plugin.guard import Guard
from agent.plugin.traffic import Traffic, counted
from agent.wire.v1beta1 import (
    AllocateRequest,
    AllocateResponse,
    CdiDevice,
    ContainerAllocateRequest,
    ContainerAllocateResponse,
    ContainerPreferredAllocationRequest,
    ContainerPreferredAllocationResponse,
    DevicePluginBase,
    DevicePluginOptions,
    DeviceSpec,
    Empty,
    ListAndWatchResponse,
    Mount,
    PreferredAllocationRequest,
    PreferredAllocationResponse,
    PreStartContainerRequest,
    PreStartContainerResponse,
)

log = structlog.get_logger(__name__)

PREFER_DEADLINE = 0.5
"""Seconds for one GetPreferredAllocation; after this the answer is the first ids that fit."""


Fence = Callable[[tuple[SliceId, ...]], None]
"""Raises a Refusal if the container that holds these slices must not start. Does not wait."""


class SliceAllocator(Protocol):
    """The service that decides allocations."""

    async def allocate(self, ids: tuple[SliceId, ...]) -> ContainerEdits:
        """Give these slices to the container being admitted. Raises AgentError."""
        ...

    async def prefer(
        self, available: tuple[SliceId, ...], must_include: tuple[SliceId, ...], size: int
    ) -> tuple[SliceId, ...]:
        """Choose the best `size` ids of `available`. Raises AgentError."""
        ...


class DevicePlugin(DevicePluginBase):
    """The handlers of one device plugin server. Closing the cell `lists` ends its list streams.

    `is_current`: whether the resource still has the name that this server registered. With a
    `fence` the kubelet calls PreStartContainer before each start of a container.
    """

    def __init__(
        self,
        lists: Cell[SliceList],
        allocator: SliceAllocator,
        traffic: Traffic,
        fence: Fence | None = None,
        is_current: Callable[[], bool] = lambda: True,
    ) -> None:
        self._lists = lists
        self._allocator = allocator
        self._traffic = traffic
        self._fence = fence
        self._is_current = is_current
        self._frames = ListFrames()
        self._draining = False
        self.calls = AdmissionCalls()
        self.streams: Cell[int] = Cell(0)

    def drain(self) -> None:
        """Refuse every new Allocate; open calls go on."""
        self._draining = True

    @override
    async def get_device_plugin_options(self, message: Empty) -> DevicePluginOptions:
        """Return the options, which never change: preferences, and starts if there is a fence."""
        return DevicePluginOptions(
            pre_start_required=self._fence is not None, get_preferred_allocation_available=True
        )

    @override
    async def list_and_watch(self, message: Empty) -> AsyncGenerator[ListAndWatchResponse, None]:
        """Yield the list at once and after every change; changes during a send are combined."""
        sent: ListFrame | None = None
        with counted(self._traffic.streams), counted(self.streams):
            log.info("plugin.stream_opened", streams=self._traffic.streams.value)
            async for listed in self._lists.follow():
                frame = self._frame(listed)
                if frame is not None and (sent is None or bytes(frame) != bytes(sent)):
                    sent = frame
                    yield frame

    def _frame(self, listed: SliceList) -> ListFrame | None:
        """The encoded list, or None when the kubelet would close the stream because of its size."""
        try:
            return self._frames.encode(listed)
        except SettingsError as error:
            log.error("plugin.list_too_long", err=str(error), generation=listed.generation)  # noqa: TRY400 -- no bug
            return None

    @override
    async def get_preferred_allocation(
        self, message: PreferredAllocationRequest
    ) -> PreferredAllocationResponse:
        """Return a choice for each container, in order. No error is raised: it would fail a pod."""
        answers = [await self._preferred(request) for request in message.container_requests]
        return PreferredAllocationResponse(container_responses=answers)

    async def _preferred(
        self, request: ContainerPreferredAllocationRequest
    ) -> ContainerPreferredAllocationResponse:
        available = _ids(request.available_deviceIDs)
        must_include = _ids(request.must_include_deviceIDs)
        size = request.allocation_size
        try:
            async with asyncio.timeout(PREFER_DEADLINE):
                chosen = await self._allocator.prefer(available, must_include, size)
        except (AgentError, TimeoutError) as error:
            log.info("plugin.preference_failed", err=str(error) or "out of time", size=size)
            chosen = first_fit(available, must_include, size)
        return ContainerPreferredAllocationResponse(device_i_ds=list(chosen))

    @override
    async def allocate(self, message: AllocateRequest) -> AllocateResponse:
        """Return one answer for each container request, in order.

        Raises:
            AgentError: the allocator's.
            Refusal: the request is empty, or the server is stopping. A server of a former name is
                stopping: a row would get the present name.
        """
        requests = message.container_requests
        if not requests or not all(request.devices_ids for request in requests):
            raise Refusal(RefusalReason.EMPTY_REQUEST, "The kubelet requested no slice.")
        if self._draining or not self._is_current():
            sentence = (
                "The GPU agent of this node is stopping, or its resource has another name now; "
                "create the pod again, with the node's present resource name."
            )
            raise Refusal(RefusalReason.STOPPING, sentence, transient=True)
        answers = [await self._allocated(request) for request in requests]
        return AllocateResponse(container_responses=answers)

    async def _allocated(self, request: ContainerAllocateRequest) -> ContainerAllocateResponse:
        return container_response(await self._allocator.allocate(_ids(request.devices_ids)))

    @override
    async def pre_start_container(
        self, message: PreStartContainerRequest
    ) -> PreStartContainerResponse:
        """Let the container start unless the fence refuses.

        Raises:
            Refusal: the fence's; the kubelet keeps the container waiting and calls again.
        """
        if self._fence is not None:
            try:
                self._fence(_ids(message.devices_ids))
            except Refusal as refusal:
                log.warning("plugin.start_refused", gate=refusal.gate.value, err=refusal.sentence)
                raise
        return PreStartContainerResponse()

    @override
    def __mapping__(self) -> dict[str, Handler]:
        """The handlers by path, each in a Guard."""
        guard, watched = Guard(self._traffic), self.calls.watched
        prefer = guard.unary("prefer", self.get_preferred_allocation)
        allocate = guard.unary("allocate", self.allocate)
        serve = {
            "GetDevicePluginOptions": guard.unary("options", self.get_device_plugin_options),
            "ListAndWatch": guard.stream("list", self.list_and_watch),
            "GetPreferredAllocation": watched(prefer, PREFERENCE_FOLLOWED),
            "Allocate": watched(allocate, ALLOCATE_FOLLOWED),
            "PreStartContainer": guard.unary("prestart", self.pre_start_container),
        }
        return {
            path: generated._replace(func=serve[path.rpartition("/")[2]])
            for path, generated in super().__mapping__().items()
        }


def _ids(texts: Sequence[str]) -> tuple[SliceId, ...]:
    return tuple(map(SliceId, texts))


def first_fit(
    available: tuple[SliceId, ...], must_include: tuple[SliceId, ...], size: int
) -> tuple[SliceId, ...]:
    """The ids to include and the first of the sorted rest: at most `size` available ids."""
    held = frozenset(must_include)
    must = tuple(sorted(held & frozenset(available)))
    return (*must, *sorted(frozenset(available) - held))[: max(size, 0)]


def container_response(edits: ContainerEdits) -> ContainerAllocateResponse:
    """Encode what a container receives."""
    return ContainerAllocateResponse(
        envs=dict(edits.envs),
        mounts=[Mount(m.container_path, m.host_path, m.read_only) for m in edits.mounts],
        devices=[DeviceSpec(n.container_path, n.host_path, n.permissions) for n in edits.nodes],
        annotations=dict(edits.annotations),
        cdi_devices=[CdiDevice(name) for name in edits.cdi_names],
    )

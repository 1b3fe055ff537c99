"""A device plugin of a test's own: it can look around from inside a call of the kubelet."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from agent.wire.v1beta1 import (
    AllocateRequest,
    AllocateResponse,
    DevicePluginOptions,
    PreferredAllocationRequest,
    PreferredAllocationResponse,
    PreStartContainerRequest,
    PreStartContainerResponse,
)
from tests.fakes.plugin import ScriptedPlugin

CallKind = Literal["prefer", "allocate", "prestart"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call. `ids` are those asked for, or preferred; `found` what `look` told inside it."""

    kind: CallKind
    ids: frozenset[str]
    at: float
    found: Any = None


class ProbePlugin(ScriptedPlugin):
    """Notes each call in `calls` when it comes; `look`, if set, is awaited before the answer."""

    def __init__(self, directory: Path, *, resource: str, name: str, count: int) -> None:
        super().__init__(directory, resource=resource, name=name, count=count)
        self.calls: list[Call] = []
        self.look: Callable[[], Awaitable[object]] | None = None

    def open_connections(self) -> int:
        """How many connections to it are open now."""
        return 0 if self._server is None else self._server.open_connections()

    def hold(self) -> None:
        """Keep every Allocate waiting from now on."""
        self.script.gate = asyncio.Event()

    def let_go(self) -> None:
        """Answer what waits, and all that comes."""
        gate, self.script.gate = self.script.gate, None
        if gate is not None:
            gate.set()

    def hold_starts(self) -> None:
        """Keep every PreStartContainer waiting from now on."""
        self.script.pre_start_gate = asyncio.Event()

    def let_start(self) -> None:
        """Answer them."""
        gate, self.script.pre_start_gate = self.script.pre_start_gate, None
        if gate is not None:
            gate.set()

    def choose(self, choice: Callable[[list[str], list[str], int], list[str]]) -> None:
        """Offer GetPreferredAllocation from the next registration on."""
        self.script.options = DevicePluginOptions(get_preferred_allocation_available=True)
        self.script.prefer = choice

    def of(self, kind: CallKind) -> list[frozenset[str]]:
        """What was asked in the calls of one kind."""
        return [call.ids for call in self.calls if call.kind == kind]

    @property
    def asked(self) -> list[frozenset[str]]:
        """The ids of each Allocate."""
        return self.of("allocate")

    @override
    async def get_preferred_allocation(
        self, message: PreferredAllocationRequest
    ) -> PreferredAllocationResponse:
        answer = await super().get_preferred_allocation(message)
        await self._note("prefer", answer.container_responses[0].device_i_ds)
        return answer

    @override
    async def allocate(self, message: AllocateRequest) -> AllocateResponse:
        await self._note("allocate", message.container_requests[0].devices_ids)
        return await super().allocate(message)

    @override
    async def pre_start_container(
        self, message: PreStartContainerRequest
    ) -> PreStartContainerResponse:
        await self._note("prestart", message.devices_ids)
        return await super().pre_start_container(message)

    async def _note(self, kind: CallKind, ids: list[str]) -> None:
        at = asyncio.get_running_loop().time()
        found = None if self.look is None else await self.look()
        self.calls.append(Call(kind, frozenset(ids), at, found))


def first(available: list[str], required: list[str], count: int) -> list[str]:
    """The lowest ids, with those that have to be among them."""
    others = sorted(set(available) - set(required))
    return [*required, *others][:count]

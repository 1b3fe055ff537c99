"""The agent of a replay: its real services, and a disk that takes its time."""

import asyncio
import datetime as dt

from agent.allocate.match import MatchSettings
from agent.allocate.room import RequestRules
from agent.kit.cell import Cell
from agent.ledger import KubeletEpoch, State
from agent.model import Inventory
from agent.state import StateService
from tests.builders import a_gpu, a_shared_gpu, an_inventory
from tests.fakes.chance import Seeded
from tests.fakes.clock import LoopClock
from tests.fakes.disk import MemoryDisk
from tests.fakes.kubelet_side import FakeHookDirs
from tests.machine.agent_life import AgentServices
from tests.traces.cluster import TracedApi
from tests.traces.kubelet import TracedKubelet
from tests.traces.trace import Trace

FSYNC = 0.002
"""Seconds for one write of the ledger."""


class _Disk(MemoryDisk):
    """A disk that takes its time."""

    async def replace(self, name: str, data: bytes, *, keep: str | None = None) -> None:
        await asyncio.sleep(FSYNC)
        await super().replace(name, data, keep=keep)


def traced_agent(trace: Trace, api: TracedApi, kubelet: TracedKubelet) -> AgentServices:
    """One agent on the trace's Node, with the GPUs that it had registered."""
    agent = AgentServices(
        StateService(disk=_Disk(), recovered=State(), boot_id="boot"),
        api,
        (kubelet, kubelet.read, kubelet),
        FakeHookDirs(),
        inventory=Cell(_inventory(trace)),
        epoch=Cell[KubeletEpoch | None](KubeletEpoch(7, int(trace.begin * 1e9))),
        match=MatchSettings(trace.node["metadata"]["name"], requests=RequestRules(known=True)),
        clock=LoopClock(dt.datetime.fromtimestamp(trace.begin, dt.UTC)),
        chance=Seeded(),
    )
    agent.streams.set(1)
    return agent


def _inventory(trace: Trace) -> Inventory:
    """The GPUs as the recorded agent had registered them."""
    return an_inventory(
        gpus=[
            a_shared_gpu(
                gpu=a_gpu(uuid=one["id"], index=one.get("index", 0), memory_mib=one["devmem"]),
                split_count=one["count"],
                core_percent=one["devcore"],
            )
            for one in trace.gpus
        ]
    )

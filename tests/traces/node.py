"""The agent of a replay: its real services, joined as `agent/app/back.py` joins them."""

import asyncio
import datetime as dt
from collections.abc import Callable, Coroutine, Mapping

from agent.allocate.match import MatchSettings
from agent.allocate.room import RequestRules
from agent.allocate.service import HamiAllocation
from agent.cluster import NodeEvent, NodeView, PodTable, PodUid
from agent.kit.cell import Cell
from agent.kit.timing import Lull
from agent.kube.watches import NodeWatch, PodWatch
from agent.ledger import EditSettings, KubeletEpoch, State
from agent.model import Inventory
from agent.reconcile import Reconcile
from agent.settle import Settlement
from agent.state import StateService
from tests.builders import a_gpu, a_shared_gpu, an_inventory
from tests.fakes.chance import Seeded
from tests.fakes.clock import LoopClock
from tests.fakes.disk import DiskFaults, MemoryDisk, MemoryFiles
from tests.fakes.kubelet_side import FakeHookDirs
from tests.traces.cluster import TracedApi
from tests.traces.kubelet import TracedKubelet
from tests.traces.trace import RESOURCE, Trace

FSYNC = 0.002
"""Seconds for one write of the ledger."""


class _Disk(MemoryDisk):
    """A disk that takes its time, and writes a file in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.files = MemoryFiles(chunk=1 << 20)
        self.faults = DiskFaults(self.files)

    async def replace(self, name: str, data: bytes, *, keep: str | None = None) -> None:
        await asyncio.sleep(FSYNC)
        await super().replace(name, data, keep=keep)


class TracedAgent:
    """One agent on the trace's Node, with the GPUs that it had registered."""

    def __init__(self, trace: Trace, api: TracedApi, kubelet: TracedKubelet) -> None:
        clock = LoopClock(dt.datetime.fromtimestamp(trace.begin, dt.UTC))
        chance, hooks = Seeded(), FakeHookDirs()
        epoch = KubeletEpoch(inode=7, ctime_ns=int(trace.begin * 1e9))
        node: Cell[NodeView | None] = Cell(None)
        pods: Cell[PodTable] = Cell(PodTable())
        resource = Cell(RESOURCE)
        self.said: list[NodeEvent] = []
        self.state = StateService(disk=_Disk(), recovered=State(), boot_id="boot")
        ledger = self.state.ledger
        self._node = NodeWatch(api, node, chance)
        self._pods = PodWatch(api, pods, clock, chance, resource)
        outlived: Cell[Mapping[str, PodUid]] = Cell({})
        self.allocation = HamiAllocation(
            commit=self.state.commit,
            say=self.said.append,
            pods=pods,
            node=node,
            inventory=Cell(_inventory(trace)),
            ledger=ledger,
            outlived=outlived,
            match=Cell(
                MatchSettings(trace.node["metadata"]["name"], requests=RequestRules(known=True))
            ),
            edits=Cell(EditSettings()),
            witness=kubelet,
            records=kubelet,
            containers=kubelet,
            hooks=hooks,
            refresh=self._pods.refresh,
            look_at_pod=self._pods.look,
            look_at_node=self._node.refresh,
            epoch=lambda: epoch,
            streams=Cell(1),
            clock=clock,
            look=self._node.look,
        )
        self._settlement = Settlement(
            pods=pods,
            node=node,
            ledger=ledger,
            outlived=outlived,
            node_api=api,
            pod_api=api,
            say=lambda _: None,
            clock=clock,
            random=chance,
        )
        self._reconcile = Reconcile(
            pods=pods,
            ledger=ledger,
            epoch=Cell[KubeletEpoch | None](epoch),
            taken=self.allocation.taken,
            rivals=Cell(0),
            calls=Lull(),
            witness=kubelet,
            records=kubelet,
            hooks=hooks,
            clock=clock,
            resource=lambda: RESOURCE,
            adopt=self.allocation.adopt,
            commit=self.state.commit,
        )

    @property
    def runs(self) -> tuple[Callable[[], Coroutine[object, object, None]], ...]:
        """Its standing activities."""
        return (
            self.state.run,
            self._node.run,
            self._pods.run,
            self._settlement.run,
            self._reconcile.run,
        )


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

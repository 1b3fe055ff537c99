"""An allocation on a node of fakes: real ledger, disk in memory, virtual time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec

from agent.allocate.match import MatchSettings, UnlockedPods
from agent.allocate.service import HamiAllocation
from agent.app.agent import NodeAgent
from agent.cluster import NOT_HERE, NodeEvent, NodeView, PodTable, PodUid, PodView, Tombstone
from agent.kit.cell import Cell
from agent.ledger import EditSettings, KubeletEpoch, Ledger, State
from agent.model import Inventory, Share, SliceId, slice_id
from agent.state import StateService
from tests.builders import (
    NODE,
    NOON,
    a_container,
    a_gpu,
    a_lock,
    a_pod,
    a_pod_uid,
    a_row,
    a_shared_gpu,
    an_inventory,
)
from tests.fakes.clock import LoopClock
from tests.fakes.disk import GatedDisk
from tests.fakes.kubelet_side import FakeContainers, FakeHookDirs, FakeRecords, FakeWitness
from tests.services.at_work import at_work
from tests.unit.core.allocation.matching_scene import annotated

G1 = a_gpu(index=0).uuid
G2 = a_gpu(index=1).uuid
EPOCH = KubeletEpoch(inode=7, ctime_ns=int(NOON.timestamp()) * 10**9)
NEXT_EPOCH = KubeletEpoch(inode=7, ctime_ns=EPOCH.ctime_ns + 1)


def placed(number: int, text: str = f"{G1},NVIDIA,3000,30:;", **changes: object) -> PodView:
    """The pod team-a/train-N, placed by the scheduler."""
    base = a_pod(uid=a_pod_uid(number), name=f"train-{number}", annotations=annotated(text))
    return msgspec.structs.replace(base, **changes)


def ids(*numbers: int, gpu: int = 0) -> tuple[SliceId, ...]:
    """Slices of one GPU, as the kubelet names them."""
    return tuple(slice_id(a_gpu(index=gpu).uuid, number) for number in numbers)


class Desk:
    """What a test of the allocation holds in its hands. `front`: the agent beside it.

    Without one it has a state and host directories of its own.
    """

    def __init__(
        self,
        state: State,
        disk: GatedDisk,
        unlocked: UnlockedPods,
        front: NodeAgent | None = None,
        hooks: FakeHookDirs | None = None,
    ) -> None:
        self.clock = LoopClock(NOON)
        self.disk = disk
        own = StateService(disk=disk, recovered=state, boot_id="boot")
        self.state = front.state if front else own
        self.pods: Cell[PodTable] = Cell(PodTable(synced=True))
        self.node: Cell[NodeView | None] = Cell(NodeView(NODE, "uid", "1"))
        two = Cell(an_inventory(count=2))
        self.inventory: Cell[Inventory] = front.facts.inventory if front else two
        self.witness = FakeWitness()
        self.records = FakeRecords()
        self.containers = FakeContainers()
        self.hooks = hooks or FakeHookDirs()
        self._epoch = EPOCH
        self._streams = Cell(1)
        self.refreshes = 0
        self.gets: list[tuple[str, str]] = []
        self.silent: asyncio.Event | None = None
        """The API server answers when this is set."""
        self.unseen_node: NodeView | None = None
        """What it says of the Node, where the watch shows something else."""
        self.said: list[NodeEvent] = []
        self.service = HamiAllocation(
            commit=self.state.commit,
            say=self.said.append,
            noted=front.refused if front else lambda _refusal, _row: None,
            pods=self.pods,
            node=self.node,
            inventory=self.inventory,
            ledger=self.state.ledger,
            match=Cell(MatchSettings(NODE, unlocked_pods=unlocked)),
            edits=Cell(EditSettings()),
            witness=self.witness,
            records=self.records.read,
            containers=self.containers,
            hooks=self.hooks,
            refresh=self._refresh,
            look_at_pod=self._look_at_pod,
            look_at_node=self._look_at_node,
            epoch=lambda: self.epoch,
            streams=self._streams,
            clock=self.clock,
        )

    @property
    def epoch(self) -> KubeletEpoch:
        """The kubelet that is there."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: KubeletEpoch) -> None:
        self._epoch = epoch
        self._streams.set(self._streams.value + 1)

    @property
    def ledger(self) -> Ledger:
        return self.state.ledger.value

    @property
    def results(self) -> dict[tuple[str, ...], int]:
        return dict(self.service.results.items())

    def see(self, *pods: PodView) -> None:
        """The pod watch shows these pods."""
        old = self.pods.value
        self.pods.set(
            msgspec.structs.replace(old, pods={**old.pods, **{pod.uid: pod for pod in pods}})
        )

    def bury(self, pod: PodView) -> None:
        """The pod was deleted."""
        old = self.pods.value
        self.pods.set(
            PodTable(
                {uid: one for uid, one in old.pods.items() if uid != pod.uid},
                (*old.tombstones, Tombstone(pod, self.clock.now())),
                synced=True,
            )
        )

    def lock(self, pod: PodView | None) -> None:
        """The scheduler holds the node lock for the pod, or for nobody."""
        lock = None if pod is None else a_lock(namespace=pod.namespace, name=pod.name)
        annotations = {} if lock is None else {"hami.io/mutex.lock": lock.value}
        self.node.set(NodeView(NODE, "uid", "2", annotations))

    def admit(self, pod: PodView) -> None:
        """The watch shows the pod, and the kubelet begins to admit it."""
        self.see(pod)
        self.witness.admit(pod)

    def bind(self, pod: PodView) -> PodView:
        """The scheduler placed the pod here and the kubelet begins to admit it."""
        self.lock(pod)
        self.admit(pod)
        return pod

    async def _answer(self) -> None:
        if self.silent is not None:
            await self.silent.wait()

    async def _look_at_pod(self, namespace: str, name: str) -> PodUid:
        self.gets.append((namespace, name))
        await self._answer()
        pod = self.pods.value.named(namespace, name)
        return pod.uid if pod else NOT_HERE

    async def _look_at_node(self) -> NodeView | None:
        await self._answer()
        if self.unseen_node is not None:
            self.node.set(self.unseen_node)
        return self.node.value

    async def _refresh(self, *, is_owners: bool = False) -> PodTable:
        del is_owners
        self.refreshes += 1
        await self._answer()
        self.pods.set(msgspec.structs.replace(self.pods.value, synced=True))
        return self.pods.value


@contextlib.asynccontextmanager
async def a_desk(
    state: State | None = None,
    disk: GatedDisk | None = None,
    unlocked: UnlockedPods = UnlockedPods.STRICT,
) -> AsyncIterator[Desk]:
    """A desk whose ledger is being written."""
    desk = Desk(state or State(), disk or GatedDisk(), unlocked)
    async with at_work(desk.state.run), at_work(desk.service.run):
        yield desk


async def fill(desk: Desk, pods: int, containers: int, gpus: int, slices: int) -> None:
    """Pods that run, each container with a slice; the first GPU has its even part of them."""
    shared = [a_shared_gpu(gpu=a_gpu(index=n), split_count=slices) for n in range(gpus)]
    desk.inventory.set(an_inventory(gpus=shared))
    rows, alive = [], set[str]()
    for number in range(1, pods + 1):
        boxes = [
            a_container(name=f"c{each}", running_id=f"cri-{number}-{each}")
            for each in range(containers)
        ]
        pod = placed(number, containers=tuple(boxes), reusable_name=False)
        desk.see(pod)
        alive.update(f"cri-{number}-{each}" for each in range(containers))
        for box in boxes:
            gpu, slot = len(rows) % gpus, len(rows) // gpus
            row = a_row(
                pod_uid=pod.uid,
                pod=pod.name,
                container=box.name,
                shares=[Share(a_gpu(index=gpu).uuid, 1, 0)],
                slice_ids=ids(slot, gpu=gpu),
                epoch=EPOCH,
                confirmed=True,
                lock=f"2026-09-01T11:00:00Z,{pod.namespace},{pod.name}",
            )
            rows.append(row)
    desk.containers.alive = alive
    await desk.state.commit(lambda _: Ledger(tuple(rows)))

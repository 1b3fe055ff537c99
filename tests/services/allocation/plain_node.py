"""Plain mode on a node of fakes: a kubelet's books and checkpoint file, ledger, virtual time."""

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Sequence

from agent.allocate.plain import PlainAllocation, PlainSettings
from agent.cluster import NodeEvent, PodTable
from agent.kit.cell import Cell
from agent.kit.timing import IdleWaiter
from agent.ledger import ContainerKey, EditSettings, Holder, KubeletEpoch, Ledger, Row, State
from agent.model import Inventory, SliceId
from agent.reconcile import Reconcile
from agent.state import StateService
from tests.builders import NOON, a_pod_uid, an_inventory
from tests.fakes.clock import LoopClock
from tests.fakes.disk import GatedDisk
from tests.fakes.kubelet_side import RESOURCE, FakeHookDirs, FakeWitness
from tests.services.at_work import at_work
from tests.unit.core.allocation.plain_scene import EPOCH, holds

BYSTANDER = Holder("kube-system", "proxy", "main")
"""Some pod without a GPU is on every node, once its kubelet knows its pods."""


class FakeHolds:
    """The ids in the kubelet's checkpoint file; None: it is absent or unreadable."""

    def __init__(self) -> None:
        self.ids: list[frozenset[SliceId]] | None = []
        self.hung = False

    async def read(self, resource: str) -> dict[ContainerKey, frozenset[SliceId]] | None:
        assert RESOURCE == resource
        if self.hung:
            await asyncio.Event().wait()
        keys = (ContainerKey(a_pod_uid(number), "main") for number in itertools.count())
        return None if self.ids is None else dict(zip(keys, self.ids, strict=False))


class PlainNode:
    """What a test of plain mode holds in its hands."""

    def __init__(self, ledger: Ledger, *, limits: bool) -> None:
        self.clock = LoopClock(NOON)
        self.disk = GatedDisk()
        self.state = StateService(disk=self.disk, recovered=State(ledger=ledger), boot_id="b")
        self.inventory: Cell[Inventory] = Cell(an_inventory(count=2))
        self.witness = FakeWitness()
        self.witness.pods[BYSTANDER.namespace, BYSTANDER.pod] = holds(BYSTANDER)
        self.holds = FakeHolds()
        self.hooks = FakeHookDirs()
        self.calls = IdleWaiter()
        self.epoch: Cell[KubeletEpoch | None] = Cell(EPOCH)
        self.edits = Cell(EditSettings())
        chance = random.Random(7)  # noqa: S311 -- a seed makes a test repeatable
        self.said: list[NodeEvent] = []
        self.service = PlainAllocation(
            commit=self.state.commit,
            say=self.said.append,
            inventory=self.inventory,
            ledger=self.state.ledger,
            edits=self.edits,
            epoch=lambda: self.epoch.value,
            hooks=self.hooks,
            clock=self.clock,
            chance=chance,
            settings=PlainSettings(memory_limits=limits),
        )
        self.reconcile = Reconcile(
            pods=Cell(PodTable(synced=True)),
            ledger=self.state.ledger,
            epoch=self.epoch,
            taken=self.service.taken,
            calls=self.calls,
            witness=self.witness,
            records=self.holds.read,
            hooks=self.hooks,
            clock=self.clock,
            resource=Cell(EditSettings().resource),
            adopt=None,
            commit=self.state.commit,
            say=self.said.append,
        )

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.state.ledger.value.rows

    @property
    def results(self) -> dict[tuple[str, ...], int]:
        return dict(self.service.results.items())

    def directories(self) -> set[str]:
        """The directories that the rows have."""
        return {row.directory for row in self.rows if row.directory}

    def book(self, holder: Holder, ids: Sequence[SliceId]) -> None:
        """The kubelet takes the answer into its books and its checkpoint."""
        key = (holder.namespace, holder.pod)
        self.witness.pods[key] = holds(holder, *ids)
        if self.holds.ids is not None:
            self.holds.ids.append(frozenset(ids))

    def end(self, holder: Holder) -> None:
        """The holder's pod ends; the kubelet's file is not written for that."""
        del self.witness.pods[(holder.namespace, holder.pod)]

    def lose_checkpoint(self, epoch: KubeletEpoch) -> None:
        """A new kubelet that knows its pods, and none of their ids."""
        self.holds.ids = None
        self.witness.pods = {
            key: holds(Holder(*key, next(iter(pod.containers))))
            for key, pod in self.witness.pods.items()
        }
        self.epoch.set(epoch)


@contextlib.asynccontextmanager
async def a_node(*rows: Row, limits: bool = True) -> AsyncIterator[PlainNode]:
    """A node whose ledger is being written and reconciled."""
    node = PlainNode(Ledger(rows), limits=limits)
    async with at_work(node.state.run, node.reconcile.run):
        yield node

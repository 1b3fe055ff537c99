"""Plain mode through random histories: whatever the kubelet forgets, nobody's directory is touched.

The kubelet here un-marks ids, rejects pods after the answer, dies before it writes an answer down,
starts without its pods, and loses its checkpoint.
"""

import dataclasses
import datetime as dt
import itertools
import math
import sys

import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from agent import reconcile as by_kubelet
from agent.allocate.plain import grant
from agent.cluster import PodTable, PodUid
from agent.ledger import (
    PLAIN,
    ContainerEdits,
    ContainerKey,
    Decider,
    Holding,
    KubeletEpoch,
    Ledger,
    Row,
)
from agent.model import SliceId
from agent.reconcile import ReconcileFacts, judge_by_kubelet
from tests.builders import NOON, a_gpu, a_shared_gpu, an_inventory
from tests.unit.core.allocation.plain_scene import RESOURCE, ids

SPLIT = 4
GPU = a_shared_gpu(gpu=a_gpu(index=0), split_count=SPLIT)
INVENTORY = an_inventory(gpus=(GPU,))
LISTED = ids(*range(SPLIT))

Held = frozenset[SliceId]


@dataclasses.dataclass
class PlainContainer:
    """A pod of one container that runs by one answer."""

    row: ContainerKey
    ids: Held
    init: bool


class PlainHistories(RuleBasedStateMachine):
    """A kubelet with its books, its file and its containers, and the agent's ledger."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.idle: dict = {}
        self.now = NOON
        self.numbers = itertools.count(1)
        self.epoch = KubeletEpoch(7, 0)
        self.running: dict[str, PlainContainer] = {}
        self.booked: dict[str, Held] = {}
        self.file: dict[str, Held] | None = {}
        self.knows_pods = True
        self.is_seen = True

    def answer(self, wanted: tuple[SliceId, ...]) -> Row:
        """What the agent answers, as its service does."""
        held = {text for found in self.ledger.held_ids.values() for text in found}
        shares = tuple(one.share for one in grant(wanted, INVENTORY, held))
        row = Row(
            ContainerKey(PodUid(f"{next(self.numbers):032x}"), PLAIN),
            None,
            shares,
            wanted,
            ContainerEdits(),
            self.now,
            self.epoch,
            decided_by=Decider.KUBELET,
            resource=RESOURCE,
        )
        self.ledger = self.ledger.put(row)
        self.is_seen = False
        return row

    def start(self, name: str, wanted: tuple[SliceId, ...], *, init: bool) -> None:
        """The kubelet asks, books the answer, writes its file and starts the container."""
        row = self.answer(wanted)
        self.running[name] = PlainContainer(row.key, frozenset(wanted), init)
        self.booked[name] = frozenset(wanted)
        self.file = dict(self.booked)

    def free(self, count: int, *, unmarked: bool) -> tuple[SliceId, ...]:
        used = frozenset() if unmarked else frozenset().union(*self.booked.values())
        return tuple(text for text in LISTED if text not in used)[:count]

    @precondition(lambda self: self.knows_pods)
    @rule(
        count=st.integers(1, 2),
        init=st.booleans(),
        unmarked=st.booleans(),
        outcome=st.sampled_from(["booked", "booked", "rejected", "killed"]),
    )
    def admit(self, count: int, init: bool, unmarked: bool, outcome: str) -> None:  # noqa: FBT001 -- drawn
        wanted = self.free(count, unmarked=unmarked)
        if len(wanted) < count:
            return
        if outcome == "killed":
            self.answer(wanted)
            self.new_kubelet()
        elif outcome == "rejected":
            self.answer(wanted)
            return
        self.start(f"p{next(self.numbers)}", wanted, init=init)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A pod ends; the file is not written for that."""
        name = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[name]
        self.booked.pop(name, None)

    @precondition(lambda self: self.running and self.knows_pods)
    @rule(data=st.data(), unmarked=st.booleans())
    def restart_container(self, data: st.DataObject, unmarked: bool) -> None:  # noqa: FBT001 -- drawn
        """A container that the kubelet has no record of dies and is allocated anew."""
        name = data.draw(st.sampled_from(sorted(self.running)))
        wanted = self.free(len(self.running[name].ids), unmarked=unmarked)
        if name not in self.booked and len(wanted) == len(self.running[name].ids):
            self.start(name, wanted, init=self.running[name].init)

    def new_kubelet(self) -> None:
        self.epoch = KubeletEpoch(7, self.epoch.ctime_ns + 1)

    @rule(knows_pods=st.booleans())
    def restart_kubelet(self, knows_pods: bool) -> None:  # noqa: FBT001 -- drawn
        """Without its pods while the API server is away: its containers run."""
        self.new_kubelet()
        self.knows_pods &= knows_pods

    @rule()
    def learn_pods(self) -> None:
        self.knows_pods = True

    @precondition(lambda self: self.is_seen and self.knows_pods)
    @rule()
    def lose_checkpoint(self) -> None:
        """Not within the moment between an answer and our look: that is the price that is known."""
        self.new_kubelet()
        self.booked, self.file = {}, None

    @rule()
    def restart_agent(self) -> None:
        self.idle = {}

    @rule(minutes=st.sampled_from([0.0, 0.2, 1.0, 3.0, 20.0]))
    def look(self, minutes: float) -> None:
        self.now += dt.timedelta(minutes=minutes)
        seen = ReconcileFacts(
            PodTable(synced=True),
            self.listed(),
            self.epoch,
            self.now,
            (self.now - NOON).total_seconds(),
            self.recorded(),
            idle=self.idle,
        )
        found = judge_by_kubelet(self.ledger, seen, RESOURCE)
        assert () == found.strangers  # every holder has a row
        for row in found.confirmed:
            self.ledger = self.ledger.put(row)
        self.ledger = self.ledger.drop(row.key for row in found.over)
        self.idle, self.is_seen = dict(found.idle), True

    def recorded(self) -> dict[ContainerKey, Held] | None:
        """The kubelet's file, by container."""
        if self.file is None:
            return None
        return {ContainerKey(PodUid(name), "c"): held for name, held in self.file.items()}

    def listed(self) -> tuple[Holding, ...]:
        """PodResources: no init container, and ids only where they are booked.

        Some pod without a GPU is on every node, once its kubelet knows its pods.
        """
        if not self.knows_pods:
            return ()
        bystander = Holding("kube-system", "proxy")
        return bystander, *(
            Holding(
                "a",
                name,
                {}
                if one.init
                else {"c": {RESOURCE: self.booked[name]} if name in self.booked else {}},
            )
            for name, one in self.running.items()
        )

    @invariant()
    def nobody_shares_a_directory(self) -> None:
        rows = [one.row for one in self.running.values()]
        assert len(set(rows)) == len(rows)

    @invariant()
    def every_container_has_its_row(self) -> None:
        for name, one in self.running.items():
            row = self.ledger.find(one.row)
            assert row is not None, name
            assert one.ids == frozenset(row.slice_ids)

    @invariant()
    def limits_of_distinct_ids_fit(self) -> None:
        mine = [one for one in self.running.values() if self.distinct(one)]
        rows = [row for one in mine if (row := self.ledger.find(one.row)) is not None]
        total = sum(share.memory_mib for row in rows for share in row.shares)
        assert total <= GPU.registered_mib

    def distinct(self, one: PlainContainer) -> bool:
        others = (other for other in self.running.values() if other is not one)
        return all(one.ids.isdisjoint(other.ids) for other in others)

    def teardown(self) -> None:
        """Once everybody has gone and the kubelet has written its file, no row is left."""
        self.running, self.booked, self.file, self.knows_pods = {}, {}, {}, True
        for _ in range(2):
            self.look(0.0)
            self.now += dt.timedelta(days=1)
            self.look(0.0)
        assert () == self.ledger.rows


TestHistories = PlainHistories.TestCase
TestHistories.settings = settings(stateful_step_count=30)


SEARCH = settings(
    max_examples=10_000,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)
"""For planted defects: the first history that shows one is enough."""


def _named_only(ledger, seen, resource):
    """A pod that is listed without ids is taken for one that is not listed."""
    named = [pod for pod in seen.holdings if any(pod.containers.values())]
    return by_kubelet.judge_by_kubelet(
        ledger, msgspec.structs.replace(seen, holdings=named), resource
    )


def _any_kubelet(row, seen, _left):
    """Who was seen under any kubelet is gone when this one does not name him."""
    if row.epoch == seen.epoch or seen.holdings:
        return by_kubelet.GRACE
    return math.inf


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("judge_by_kubelet", _named_only),
        ("_grace", lambda *_: by_kubelet.GRACE),
        ("_grace", _any_kubelet),
        ("LOST_GRACE", by_kubelet.GRACE),
    ],
    ids=["silence", "no grace", "any kubelet", "a lost init container"],
)
def test_the_histories_find_a_wrong_decision(monkeypatch, name, wrong):
    here = sys.modules[__name__]
    monkeypatch.setattr(here if hasattr(here, name) else by_kubelet, name, wrong)

    with pytest.raises(AssertionError):
        run_state_machine_as_test(PlainHistories, settings=SEARCH)

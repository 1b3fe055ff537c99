"""Limits engage while a neighbour on the same GPU is active, and release when it is not."""

import dataclasses
import datetime as dt
from collections.abc import Iterable, Mapping

import msgspec
import pytest

from agent.hami.region import Region, RegionChange, RegionState
from agent.ledger import Row
from agent.model import GpuUuid
from agent.sandbox.hami_core import HAMI_2_8_0, HAMI_2_8_1, HAMI_2_8_2, HAMI_2_9_0, HamiCoreLibrary
from agent.usage import ACTIVE_FOR, HIGHEST_RECENT, RegionUser, feedback, uses_sm
from tests.builders import G1, G2, NOON, a_row, a_share, a_uuid
from tests.fakes.limiter import LimitedProcess
from tests.fakes.regions import RegionReading, a_process, a_region, changed
from tests.fakes.scheduler_vectors import load_cases

# Containers on GPUs of a simulated node: kernels of HAMi-core, and rounds of feedback.

ROUND = dt.timedelta(seconds=5)


@dataclasses.dataclass
class SharingContainer:
    """One container: its row, its region, and its process once it has started one."""

    row: Row
    region: Region
    process: LimitedProcess | None = None
    last_work: dt.datetime | None = None


class SharedGpus:
    """Containers that run a release of HAMi-core, limited to 30 percent of each GPU."""

    def __init__(self, release: HamiCoreLibrary) -> None:
        self.release = release
        self.now = NOON
        self.containers: dict[str, SharingContainer] = {}
        self.released: Mapping[str, RegionChange] = {}

    def start(self, name: str, priority: int = 1, gpus: Iterable[GpuUuid] = (G1,)) -> None:
        """The first process of a container starts, and makes its region."""
        uuids = tuple(gpus)
        row = msgspec.structs.replace(
            a_row(shares=[a_share(uuid=uuid) for uuid in uuids]), priority=priority
        )
        region = a_region(*uuids, priority=priority, last_kernel=self.now)
        process = LimitedProcess(self.release, 30, "default", region.is_limiting)
        self.containers[name] = SharingContainer(row, region, process)

    def restart(self, name: str) -> None:
        """The process of a container is followed by another one."""
        one = self.containers[name]
        one.process = LimitedProcess(self.release, 30, "default", one.region.is_limiting)
        one.region = msgspec.structs.replace(one.region, last_kernel=self.now)

    def launch(self, name: str, sm: int = 50) -> bool:
        """A kernel that uses so much of each GPU; whether it was launched."""
        one = self.containers[name]
        assert one.process is not None
        after = one.process.launch(one.region, self.now)
        one.region = msgspec.structs.replace(
            after or msgspec.structs.replace(one.region, last_kernel=self.now),
            processes=(a_process(*[2**30] * len(one.region.gpus), sm=sm if after else 0),),
        )
        return after is not None

    def rest(self, name: str) -> None:
        """No kernel of the container runs."""
        one = self.containers[name]
        processes = (a_process(*[2**30] * len(one.region.gpus)),)
        one.region = msgspec.structs.replace(one.region, processes=processes)

    def round(self, *, alive: bool = True) -> None:
        """Five seconds later, one round; `alive`: the agent knows that the processes live."""
        self.now += ROUND
        users = {}
        for name, one in self.containers.items():
            living = frozenset({1}) if alive else None
            reading = RegionReading(RegionState.READABLE, one.region, alive=living)
            if uses_sm(reading.sums(), self.now):
                one.last_work = self.now
            users[name] = RegionUser(one.row, one.region, one.last_work)
        changes, self.released = feedback(users, self.now)
        for name, change in changes.items():
            self.containers[name].region = changed(self.containers[name].region, change)

    def is_limited(self, name: str) -> bool:
        """Whether launches of the container take tokens now."""
        one = self.containers[name]
        assert one.process is not None
        return one.process.is_limited(one.region)


KEEPING = [HAMI_2_8_1, HAMI_2_8_2]
LETS_GO = 3
"""Rounds until a container that has stopped counts as idle: 10 s are over in the third."""


def rounds(node: SharedGpus, count: int, *names: str) -> None:
    """So many rounds in which those containers launch kernels and the others rest."""
    for _ in range(count):
        for name in node.containers:
            if name in names:
                node.launch(name)
            else:
                node.rest(name)
        node.round()


@pytest.mark.parametrize("release", KEEPING)
def test_a_process_that_keeps_its_switch_is_limited_if_it_starts_beside_an_active_one(release):
    node = SharedGpus(release)
    node.start("first")
    rounds(node, 20, "first")
    assert node.is_limited("first"), "the first process found the switch of a new region"
    node.restart("first")
    assert not node.is_limited("first"), "the next one found it alone"

    node.start("second")
    rounds(node, 2, "first", "second")
    assert node.is_limited("second")
    node.restart("first")
    assert node.is_limited("first")

    rounds(node, LETS_GO, "first")
    node.restart("first")
    assert not node.is_limited("first")


@pytest.mark.parametrize("alive", [True, False])
def test_a_probe_with_nvidia_smi_limits_others_but_holds_nobody_back(alive):
    node = SharedGpus(HAMI_2_9_0)
    node.start("high", priority=0)
    node.start("low")
    node.start("other")
    for _ in range(10):
        node.restart("high")
        node.rest("high")
        node.launch("low")
        node.rest("other")
        node.restart("other")
        node.round(alive=alive)

    assert {name: RegionChange(False) for name in ("low", "other")} == node.released


def test_cuda_graphs_are_activity_where_it_is_known_that_the_process_lives():
    node = SharedGpus(HAMI_2_9_0)
    node.start("high", priority=0)
    node.start("low")
    for name in node.containers:
        node.launch(name)
    for _ in range(10):
        node.round()

    assert {"low": RegionChange(False, 0)} == node.released


@pytest.mark.parametrize(
    ("last_kernel", "alive", "sm", "expected"),
    [
        (NOON, None, 9, True),
        (NOON - ACTIVE_FOR, None, 9, True),
        (NOON - 2 * ACTIVE_FOR, None, 9, False),
        (NOON + 2 * ACTIVE_FOR, None, 9, False),
        (None, None, 9, False),
        (None, frozenset({1}), 9, True),
        (NOON, frozenset({1}), 0, False),
        (NOON, frozenset({2}), 9, False),
        (NOON, frozenset(), 9, False),
    ],
)
def test_the_number_of_a_dead_process_is_no_use_of_an_sm(last_kernel, alive, sm, expected):
    region = a_region(G1, processes=(a_process(1, sm=sm),), last_kernel=last_kernel)
    assert expected == uses_sm(
        RegionReading(RegionState.READABLE, region, alive=alive).sums(), NOON
    )


def a_user(region, *, priority=1, gpus=(G1,), work=None):
    row = msgspec.structs.replace(
        a_row(shares=[a_share(uuid=gpu) for gpu in gpus]), priority=priority
    )
    return RegionUser(row, region, work)


def test_a_forged_uuid_couples_nobody():
    working = a_region(G1, priority=0, recent_kernel=5, is_limiting=False)
    forged = a_user(working, priority=0, gpus=(G2,))
    victim = a_user(a_region(G1, recent_kernel=0, is_limiting=False))

    assert ({"forged": RegionChange(recent_kernel=4)}, {}) == feedback(
        {"forged": forged, "victim": victim}, NOON
    )


@pytest.mark.parametrize(("own", "forged", "counts"), [(1, 0, 1), (1, -5, 1), (0, 3, 3), (0, 0, 0)])
def test_a_region_cannot_take_a_better_priority_than_its_pod_has(own, forged, counts):
    assert counts == a_user(a_region(G1, priority=forged), priority=own).priority


def test_a_forged_count_of_kernels_lets_go():
    node = SharedGpus(HAMI_2_8_0)
    node.start("forger")
    node.start("other")
    for one in node.containers.values():
        one.region = msgspec.structs.replace(one.region, recent_kernel=2**31 - 1, last_kernel=None)
    for _ in range(HIGHEST_RECENT):
        node.round()

    assert {} == node.released


def test_the_end_releases_whom_this_process_held_back_or_limited_and_nobody_else():
    high = a_user(a_region(G1, recent_kernel=2, priority=0), priority=0, work=NOON)
    low = a_user(a_region(G1))
    alone = a_user(a_region(G2), gpus=(G2,))
    twins = [a_user(a_region(a_uuid(3)), gpus=(a_uuid(3),)) for _ in range(2)]

    users = {"high": high, "low": low, "alone": alone, "x": twins[0], "y": twins[1]}
    _, release = feedback(users, NOON)

    assert {
        "low": RegionChange(is_limiting=False, recent_kernel=0),
        "x": RegionChange(is_limiting=False),
        "y": RegionChange(is_limiting=False),
    } == release


# Feedback decides as HAMi's monitor did on the same regions.

CASES = load_cases("feedback")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_each_round_leaves_the_regions_as_hami_leaves_them(case):
    rows, regions = {}, {}
    for before in case["before"]:
        uuids = [GpuUuid(uuid) for uuid in before["uuids"]]
        row = a_row(shares=[a_share(uuid=uuid) for uuid in uuids])
        rows[before["name"]] = msgspec.structs.replace(row, priority=before["priority"])
        regions[before["name"]] = a_region(
            *uuids,
            priority=before["priority"],
            recent_kernel=before["recent_kernel"],
            is_limiting=bool(before["utilization_switch"]),
        )
    for expected in case["after_each_tick"]:
        users = {name: RegionUser(rows[name], regions[name]) for name in rows}
        for name, change in feedback(users, NOON)[0].items():
            regions[name] = changed(regions[name], change)

        assert expected == {
            name: {
                "recent_kernel": region.recent_kernel,
                "utilization_switch": int(region.is_limiting),
            }
            for name, region in regions.items()
        }

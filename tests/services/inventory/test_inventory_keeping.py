"""The inventory: one change, one generation; what is held or not well never goes out of sight."""

from collections.abc import Mapping

import msgspec
import pytest

from agent.hami.annotations import told
from agent.inventory import InventoryKeeper
from agent.kit.cell import Cell
from agent.model import (
    NO_INDEX,
    Condition,
    Gpu,
    GpuFault,
    GpuUuid,
    Health,
    Inventory,
    Scan,
    SharingSettings,
    SliceList,
    Trouble,
    slice_id,
)
from tests.builders import a_gpu, a_health, a_uuid
from tests.fakes.clock import ManualClock

# A keeper of the inventory with its cells and its lists.


class KeepingBench:
    """What the driver says goes in, what is shared and listed comes out."""

    def __init__(
        self,
        settings: SharingSettings | None = None,
        recalled: Mapping[GpuUuid, Health] | None = None,
    ) -> None:
        self.inventory = Cell(Inventory())
        self.settings = Cell(settings or SharingSettings())
        self.slices = Cell(SliceList())
        self.keeper = InventoryKeeper(
            self.inventory, self.settings, ManualClock(), recalled, slices=self.slices
        )

    def scan(self, *gpus: Gpu, faults: tuple[GpuFault, ...] = ()) -> None:
        self.keeper.found(Scan("570.1", gpus, faults))

    def hold(self, *numbers: int) -> None:
        held = {a_uuid(n): (slice_id(a_uuid(n), 3),) for n in numbers}
        self.keeper.hold(held)

    @property
    def shown(self) -> list[tuple[int, bool, bool]]:
        """Index, present and serving of every GPU."""
        return [(g.gpu.index, g.present, g.serving) for g in self.inventory.value.gpus]

    @property
    def kept(self) -> dict[str, int]:
        """The GPUs that are not present, with their indexes."""
        gpus = self.inventory.value.gpus
        return {gpu.uuid: gpu.gpu.index for gpu in gpus if not gpu.present}

    @property
    def generation(self) -> int:
        return self.inventory.value.generation


G0, G1, G2 = (a_uuid(number) for number in range(3))
LOST = GpuFault(G1, "GPU is lost", Trouble.LOST)
SILENT = GpuFault(G1, "does not answer in time")
REFUSED = GpuFault(G1, "GPU requires restart")
NAMELESS = GpuFault("index 1", "GPU is lost", Trouble.LOST)
OTHER = GpuFault("index 2", "Unknown Error")
BAD = a_health(condition=Condition.BAD, text="refused [H-RESET]")
FILTERED = [
    SharingSettings(filter_uuids=frozenset({G1})),
    SharingSettings(filter_indexes=frozenset({1})),
]
UNKNOWN = (NO_INDEX, False, False)


def gpus(*indexes: int) -> tuple[Gpu, ...]:
    return tuple(a_gpu(index=index) for index in indexes)


def left_out(bench: KeepingBench) -> list[str]:
    return [fault.gpu for fault in bench.keeper.left_out.value]


@pytest.fixture
def bench() -> KeepingBench:
    """One with GPUs 0 and 1."""
    bench = KeepingBench()
    bench.scan(*gpus(0, 1))
    return bench


def test_nothing_is_published_or_listed_before_the_first_scan():
    bench = KeepingBench()
    bench.keeper.judged({G0: BAD})
    bench.hold(0)

    assert (Inventory(), SliceList()) == (bench.inventory.value, bench.slices.value)
    bench.hold()
    bench.scan()
    assert SliceList(generation=1) == bench.slices.value


def test_a_scan_or_a_verdict_raises_the_generation_once_and_only_if_it_is_new(bench):
    before = bench.inventory.value
    bench.scan(*gpus(1, 0))
    assert before is bench.inventory.value
    for _ in range(2):
        bench.keeper.judged({G0: BAD, G1: BAD})

    assert ([(0, True, False), (1, True, False)], 2) == (bench.shown, bench.generation)


def test_a_gpu_that_vanished_is_gone_unless_a_slice_of_it_is_held_and_may_come_back(bench):
    bench.hold(1)
    bench.scan(*gpus(0))
    assert [(0, True, True), (1, False, False)] == bench.shown
    bench.scan()
    bench.scan(*gpus(0, 1))
    assert [(0, True, True), (1, True, True)] == bench.shown
    bench.scan(*gpus(0))
    bench.hold()
    assert [(0, True, True)] == bench.shown


def test_held_gpus_that_nobody_has_seen_are_named_alone_and_take_no_index_of_another():
    bench = KeepingBench()
    bench.hold(8, 9)
    bench.scan(*gpus(0))
    unknown = bench.inventory.value.gpus[1]

    assert (a_uuid(8), 0, "") == (unknown.uuid, unknown.registered_mib, unknown.gpu.name)
    assert [(0, True, True), UNKNOWN, UNKNOWN] == bench.shown
    bench.scan(*gpus(0, 1))
    assert [(0, True, True), (1, True, True), UNKNOWN, UNKNOWN] == bench.shown
    bench.scan(*gpus(0, 1, 9))
    assert [(0, True, True), (1, True, True), (9, True, True), UNKNOWN] == bench.shown


def test_a_lost_gpu_stays_in_view_and_one_that_is_silent_for_now_stays_as_it_was(bench):
    bench.scan(*gpus(0), faults=(SILENT,))
    assert ([(0, True, True), (1, True, True)], []) == (bench.shown, left_out(bench))
    bench.scan(*gpus(0), faults=(LOST,))
    lost = bench.inventory.value.gpus[1]

    assert ([(0, True, True), (1, False, False)], [G1]) == (bench.shown, left_out(bench))
    assert lost.wanted
    assert lost.unavailable_reason.startswith("is not shared: GPU is lost; ")


@pytest.mark.parametrize("settings", FILTERED)
def test_a_filtered_gpu_is_out_without_a_word_but_stays_while_it_is_held(settings):
    bench = KeepingBench(settings)
    bench.scan(*gpus(0, 1))
    assert ([(0, True, True)], []) == (bench.shown, left_out(bench))
    for fault in (LOST, SILENT):
        bench.scan(*gpus(0), faults=(fault,))
        assert [] == left_out(bench)
        bench.scan(*gpus(0, 1))
    bench.hold(1)
    held = bench.inventory.value.gpus[1]
    assert [(0, True, True), (1, False, False)] == bench.shown
    assert ("NVIDIA H100 80GB HBM3", True, False) == (held.gpu.name, held.there, held.wanted)
    bench.scan(*gpus(0))
    assert not bench.inventory.value.gpus[1].there
    bench.hold()
    bench.scan(*gpus(0), faults=(LOST,))
    assert [(0, True, True)] == bench.shown


@pytest.mark.parametrize(
    ("settings", "gpu", "says"),
    [
        (SharingSettings(mode="mig"), a_gpu(), "sharing.operatingMode"),
        (SharingSettings(), a_gpu(mig_enabled=True), "it is in MIG mode"),
        (SharingSettings(), a_gpu(memory_mib=None), "sharing.preconfiguredMemoryMiB"),
        (SharingSettings(), a_gpu(name=""), "does not report its name"),
    ],
)
def test_why_a_gpu_is_left_out_is_said(settings, gpu, says):
    bench = KeepingBench(settings)
    bench.scan(gpu)

    (why,) = bench.keeper.left_out.value
    assert [] == bench.shown
    assert says in why.text
    assert ("it is in MIG mode" in why.text) is gpu.mig_enabled
    assert why.index == gpu.index


# GPUs remembered as not well that the driver does not describe: in view, and offered to nobody.


def remembering(settings=None, recalled=None) -> KeepingBench:
    """One that remembers GPU 1 as bad, unless other things are recalled."""
    return KeepingBench(settings, {G1: BAD} if recalled is None else recalled)


@pytest.mark.parametrize("fault", [REFUSED, LOST])
def test_it_is_in_view_with_its_health_and_has_no_slice_and_no_place_in_the_annotation(fault):
    bench = remembering()
    bench.scan(*gpus(0), faults=(fault,))
    kept = bench.inventory.value.gpus[1]

    assert (G1, BAD, False) == (kept.uuid, kept.health, kept.serving)
    assert (0, "is bad: refused [H-RESET]") == (kept.split_count, kept.unavailable_reason)
    assert fault.lost is not kept.there
    assert [10, 0] == [len(group.ids) for group in bench.slices.value.groups]
    assert [G0] == [gpu.uuid for gpu in told(bench.inventory.value)]
    bench.scan(*gpus(0), faults=(msgspec.structs.replace(fault, index=1),))
    assert {G1: 1} == bench.kept


@pytest.mark.parametrize(
    ("settings", "fault", "named"),
    [
        (FILTERED[0], REFUSED, []),
        (FILTERED[0], LOST, []),
        (FILTERED[0], SILENT, []),
        (FILTERED[1], NAMELESS, []),
    ],
)
def test_one_that_is_filtered_out_is_not_kept(settings, fault, named):
    bench = remembering(settings)
    bench.scan(*gpus(0), faults=(fault,))

    assert ({}, named) == (bench.kept, left_out(bench))


def test_the_one_fault_without_a_name_is_the_one_that_is_missing_and_tells_its_index():
    bench = remembering()
    bench.scan(*gpus(0), faults=(NAMELESS,))
    assert ({G1: 1}, [G1]) == (bench.kept, left_out(bench))
    held = remembering(recalled={})
    held.hold(1)
    held.scan(*gpus(0), faults=(NAMELESS,))
    assert {G1: 1} == held.kept


def test_of_several_that_are_missing_nobody_knows_which_is_which():
    bench = remembering(recalled={G1: BAD, G2: BAD})
    bench.scan(*gpus(0), faults=(NAMELESS, OTHER))

    assert ({}, ["index 1", "index 2"]) == (bench.kept, left_out(bench))


# The list: one per change, all slices of a GPU alike, held ids always in.


def ids(bench: KeepingBench, gpu: int = 0) -> tuple[str, ...]:
    return bench.slices.value.groups[gpu].ids


def test_many_gpus_that_go_bad_at_once_are_one_list_and_what_no_list_shows_is_none():
    bench = KeepingBench(SharingSettings(numa_topology=True))
    bench.scan(*gpus(0, 1, 2), a_gpu(index=3, numa=1))
    lists = [bench.slices.value]
    bench.keeper.judged({a_uuid(number): BAD for number in range(3)})
    lists.append(bench.slices.value)
    bench.keeper.judged({G0: a_health(condition=Condition.BAD, text="another text")})

    assert lists[-1] == bench.slices.value
    assert [1, 2] == [listed.generation for listed in lists]
    assert [[True] * 4, [False] * 3 + [True]] == [
        [group.healthy for group in listed.groups] for listed in lists
    ]
    assert [0, 0, 0, 1] == [group.numa for group in lists[0].groups]

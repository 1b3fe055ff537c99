"""GPUs remembered as not well that the driver does not describe: in view, and offered to nobody."""

import msgspec
import pytest

from agent.hami.register import told
from agent.health.judge import switched_off
from agent.inventory import MOST_GONE
from agent.model import NO_INDEX, Condition, Gpu, GpuFault, SharingSettings, Trouble
from tests.builders import NOON, a_gpu, a_health, a_uuid
from tests.services.inventory.keeping import KeepingBench

G1, G2 = a_uuid(1), a_uuid(2)
BAD = a_health(condition=Condition.BAD, text="refused [H-RESET]")
REFUSED = GpuFault(G1, "GPU requires restart")
LOST = GpuFault(G1, "GPU is lost", Trouble.LOST)
NAMELESS = GpuFault("index 1", "GPU is lost", Trouble.LOST)
OTHER = GpuFault("index 2", "Unknown Error")


def a_bench(settings=None, recalled=None) -> KeepingBench:
    """One that remembers GPU 1 as bad, unless other things are recalled."""
    return KeepingBench(settings, {G1: BAD} if recalled is None else recalled)


def scan(bench: KeepingBench, *faults: GpuFault, gpus: tuple[Gpu, ...] = (a_gpu(index=0),)) -> None:
    bench.scan(*gpus, faults=faults)


@pytest.mark.parametrize("fault", [REFUSED, LOST])
def test_it_is_in_view_with_its_health_and_has_no_slice_and_no_place_in_the_annotation(fault):
    bench = a_bench()
    scan(bench, fault)
    kept = bench.inventory.value.gpus[1]

    assert (G1, BAD, False) == (kept.uuid, kept.health, kept.serving)
    assert (0, "is bad: refused [H-RESET]") == (kept.split_count, kept.plight)
    assert fault.lost is not kept.there
    assert [10, 0] == [len(group.ids) for group in bench.slices.value.groups]
    assert [a_uuid(0)] == [gpu.uuid for gpu in told(bench.inventory.value)]


@pytest.mark.parametrize("fault", [REFUSED, LOST])
def test_it_has_its_index_where_the_driver_tells_it(fault):
    bench = a_bench()
    scan(bench, msgspec.structs.replace(fault, index=1))

    assert [0, 1] == [kept.gpu.index for kept in bench.inventory.value.gpus]


def test_one_that_is_only_watched_since_a_boot_is_in_view_as_well():
    bench = a_bench(recalled={G1: a_health(condition=Condition.WATCH)})
    scan(bench, LOST)

    assert {G1: NO_INDEX} == bench.kept
    assert bench.inventory.value.gpus[1].plight.startswith("is not shared: GPU is lost; ")


def test_it_stays_in_view_while_a_fault_names_it_whatever_its_health_says_by_then():
    bench = a_bench()
    scan(bench, REFUSED)
    bench.keeper.judged({G1: a_health()})

    assert {G1: NO_INDEX} == bench.kept
    scan(bench, gpus=(a_gpu(index=0), a_gpu(index=1)))
    assert {} == bench.kept


def test_it_is_out_of_view_when_the_driver_lists_it_no_more_and_describes_all_others():
    bench = a_bench()
    scan(bench, REFUSED)
    scan(bench)

    assert {} == bench.kept


@pytest.mark.parametrize("recalled", [{}, {G1: a_health()}, {G1: switched_off(NOON)}])
def test_one_of_which_nothing_bad_is_remembered_is_only_named(recalled):
    bench = a_bench(recalled=recalled)
    scan(bench, REFUSED)

    assert {} == bench.kept
    assert [G1] == [fault.gpu for fault in bench.keeper.left_out.value]


def test_one_that_is_filtered_out_is_nobodys_news():
    bench = a_bench(SharingSettings(filter_uuids=frozenset({G1})))
    scan(bench, REFUSED)
    by_index = a_bench(SharingSettings(filter_indexes=frozenset({1})))
    scan(by_index, NAMELESS)

    assert {} == bench.kept == by_index.kept


def test_the_one_fault_without_a_name_is_the_one_that_is_missing_and_tells_its_index():
    bench = a_bench()
    scan(bench, NAMELESS)

    assert {G1: 1} == bench.kept
    assert [G1] == [fault.gpu for fault in bench.keeper.left_out.value]
    held = a_bench(recalled={})
    held.hold(1)
    scan(held, NAMELESS)
    assert {G1: 1} == held.kept


def test_of_several_that_are_missing_each_may_be_any_and_has_no_index():
    bench = a_bench(recalled={G1: BAD, G2: BAD})
    scan(bench, NAMELESS, OTHER)
    text = "it may be index 1: GPU is lost; it may be index 2: Unknown Error"

    assert {G1: NO_INDEX, G2: NO_INDEX} == bench.kept
    faults = {fault.gpu: fault.text for fault in bench.keeper.left_out.value}
    assert ["index 1", "index 2", G1, G2] == list(faults)
    assert faults[G1].startswith(text)


def test_a_gpu_that_was_described_and_left_is_not_taken_for_one_without_a_name():
    bench = a_bench(recalled={})
    bench.hold(1)
    scan(bench, gpus=(a_gpu(index=0), a_gpu(index=1)))
    scan(bench)
    scan(bench, NAMELESS)

    assert {G1: 1} == bench.kept
    assert not bench.inventory.value.gpus[1].there
    assert ["index 1"] == [fault.gpu for fault in bench.keeper.left_out.value]


def test_those_that_left_are_known_for_a_while_the_last_one_first():
    bench = a_bench()
    scan(bench, gpus=(a_gpu(index=0), a_gpu(index=1)))
    scan(bench)
    scan(bench, gpus=())

    assert [a_uuid(0), G1] == [gpu.uuid for gpu in bench.keeper.gone]
    scan(bench, gpus=(a_gpu(index=1),))
    assert [a_uuid(0)] == [gpu.uuid for gpu in bench.keeper.gone]
    for number in range(2, MOST_GONE + 4):
        scan(bench, gpus=(a_gpu(index=number),))
    assert MOST_GONE == len(bench.keeper.gone)

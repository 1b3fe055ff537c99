"""The inventory: one change, one generation; what is held never goes out of sight."""

import asyncio

import pytest

from agent.model import NO_INDEX, Condition, GpuFault, Inventory, SharingSettings, Trouble
from tests.builders import a_gpu, a_health, a_uuid
from tests.fakes.clock import START
from tests.services.inventory.keeping import KeepingBench

LOST = GpuFault(a_uuid(1), "GPU is lost", Trouble.LOST)
SILENT = GpuFault(a_uuid(1), "does not answer in time")


@pytest.fixture
def bench() -> KeepingBench:
    bench = KeepingBench()
    bench.scan(a_gpu(index=0), a_gpu(index=1))
    return bench


def test_nothing_is_published_before_the_first_scan():
    bench = KeepingBench()
    bench.keeper.judged({a_uuid(0): a_health(condition=Condition.BAD)})
    bench.hold(0)

    assert Inventory() == bench.inventory.value


def test_a_found_gpu_is_shared_as_the_settings_say_and_is_ok_from_then_on():
    settings = SharingSettings(split_count=4, memory_scaling=1.5, core_scaling=0.5)
    bench = KeepingBench(settings)
    bench.scan(a_gpu(name="Tesla T4", memory_mib=15361))
    gpu = bench.inventory.value.gpus[0]

    assert (4, 23041, 50) == (gpu.split_count, gpu.registered_mib, gpu.core_percent)
    assert ("NVIDIA-Tesla T4", "hami-core") == (gpu.type_name, gpu.mode)
    assert (Condition.OK, START) == (gpu.health.condition, gpu.health.since)
    assert "570.1" == bench.inventory.value.driver_version


def test_the_same_scan_again_changes_nothing(bench):
    before = bench.inventory.value
    bench.scan(a_gpu(index=1), a_gpu(index=0))

    assert before is bench.inventory.value


def test_a_verdict_raises_the_generation_once_and_only_if_it_is_new(bench):
    bad = {a_uuid(n): a_health(condition=Condition.BAD) for n in (0, 1)}
    bench.keeper.judged(bad)
    bench.keeper.judged(bad)

    assert ([(0, True, False), (1, True, False)], 2) == (bench.shown, bench.generation)


def test_a_recalled_illness_is_there_with_the_first_scan():
    bench = KeepingBench(recalled={a_uuid(0): a_health(condition=Condition.BAD)})
    bench.scan(a_gpu(index=0))

    assert [(0, True, False)] == bench.shown


def test_a_gpu_that_vanished_is_gone_unless_a_slice_of_it_is_held(bench):
    bench.hold(1)
    bench.scan(a_gpu(index=0))

    assert [(0, True, True), (1, False, False)] == bench.shown
    bench.hold()
    assert [(0, True, True)] == bench.shown


def test_a_gpu_that_comes_back_is_present_again(bench):
    bench.hold(1)
    bench.scan()
    bench.scan(a_gpu(index=0), a_gpu(index=1))

    assert [(0, True, True), (1, True, True)] == bench.shown


def test_a_held_gpu_that_nobody_has_seen_is_listed_by_its_name_alone():
    bench = KeepingBench()
    bench.hold(9)
    bench.scan(a_gpu(index=0))
    unknown = bench.inventory.value.gpus[1]

    assert [(0, True, True), (NO_INDEX, False, False)] == bench.shown
    assert (a_uuid(9), 0, "") == (unknown.uuid, unknown.registered_mib, unknown.gpu.name)


def test_held_gpus_that_nobody_has_seen_take_no_index_of_another():
    bench = KeepingBench()
    bench.hold(8, 9)
    bench.scan(a_gpu(index=0))
    unknown = [(NO_INDEX, False, False)] * 2

    assert [(0, True, True), *unknown] == bench.shown
    bench.scan(a_gpu(index=0), a_gpu(index=1))
    assert [(0, True, True), (1, True, True), *unknown] == bench.shown
    bench.scan(a_gpu(index=0), a_gpu(index=1), a_gpu(index=9))
    assert [(0, True, True), (1, True, True), (9, True, True), unknown[0]] == bench.shown


def test_a_lost_gpu_stays_listed_as_not_present(bench):
    bench.scan(a_gpu(index=0), faults=(LOST,))

    assert [(0, True, True), (1, False, False)] == bench.shown
    assert [a_uuid(1)] == [fault.gpu for fault in bench.keeper.left_out.value]
    assert bench.inventory.value.gpus[1].wanted
    assert bench.inventory.value.gpus[1].plight.startswith("is not shared: GPU is lost; ")


def test_a_gpu_that_cannot_be_described_just_now_stays_as_it_was(bench):
    bench.scan(a_gpu(index=0), faults=(SILENT,))

    assert [(0, True, True), (1, True, True)] == bench.shown
    assert () == bench.keeper.left_out.value


def test_a_faulty_gpu_that_nobody_has_described_is_only_named():
    bench = KeepingBench()
    bench.scan(a_gpu(index=0), faults=(GpuFault("index 1", "Unknown Error"), LOST))

    assert [(0, True, True)] == bench.shown
    assert ["index 1", a_uuid(1)] == [fault.gpu for fault in bench.keeper.left_out.value]


@pytest.mark.parametrize(
    "settings",
    [
        SharingSettings(filter_uuids=frozenset({a_uuid(1)})),
        SharingSettings(filter_indexes=frozenset({1})),
    ],
)
def test_a_filtered_gpu_is_out_without_a_word_but_stays_while_it_is_held(settings):
    bench = KeepingBench(settings)
    bench.scan(a_gpu(index=0), a_gpu(index=1))

    assert ([(0, True, True)], ()) == (bench.shown, bench.keeper.left_out.value)
    bench.hold(1)
    assert [(0, True, True), (1, False, False)] == bench.shown
    assert "NVIDIA H100 80GB HBM3" == bench.inventory.value.gpus[1].gpu.name
    assert (True, False) == (
        bench.inventory.value.gpus[1].there,
        bench.inventory.value.gpus[1].wanted,
    )
    bench.scan(a_gpu(index=0))
    assert not bench.inventory.value.gpus[1].there
    bench.hold()
    bench.scan(a_gpu(index=0), faults=(LOST,))
    assert [(0, True, True)] == bench.shown


@pytest.mark.parametrize("fault", [LOST, SILENT])
def test_a_gpu_in_mig_mode_stays_out_when_it_cannot_be_described_any_more(fault):
    bench = KeepingBench()
    bench.scan(a_gpu(index=0), a_gpu(index=1, mig_enabled=True))
    before = bench.generation

    bench.scan(a_gpu(index=0), faults=(fault,))
    bench.scan(a_gpu(index=0), faults=(fault,))

    assert ([(0, True, True)], before) == (bench.shown, bench.generation)
    assert a_uuid(1) == bench.keeper.left_out.value[0].gpu


@pytest.mark.parametrize("fault", [LOST, SILENT])
def test_a_filtered_gpu_that_fails_is_nobodys_news(fault):
    by_uuid = KeepingBench(SharingSettings(filter_uuids=frozenset({a_uuid(1)})))
    by_uuid.scan(a_gpu(index=0), faults=(fault,))
    by_index = KeepingBench(SharingSettings(filter_indexes=frozenset({1})))
    by_index.scan(a_gpu(index=0), a_gpu(index=1))
    by_index.scan(a_gpu(index=0), faults=(fault,))

    assert () == by_uuid.keeper.left_out.value == by_index.keeper.left_out.value


def test_a_node_whose_settings_name_mig_shares_nothing_and_says_that_they_do():
    bench = KeepingBench(SharingSettings(mode="mig"))
    bench.scan(a_gpu(index=0))

    (why,) = bench.keeper.left_out.value
    assert [] == bench.shown
    assert "sharing.operatingMode" in why.text
    assert "it is in MIG mode" not in why.text  # it is not the GPU's doing


def test_a_gpu_of_unknown_memory_is_left_out_unless_the_settings_know_it():
    bench = KeepingBench()
    bench.scan(a_gpu(index=0, memory_mib=None))
    known = KeepingBench(SharingSettings(preconfigured_mib=1000))
    known.scan(a_gpu(index=0, memory_mib=None))

    assert "sharing.preconfiguredMemoryMiB" in bench.keeper.left_out.value[0].text
    assert 1000 == known.inventory.value.gpus[0].registered_mib


async def test_new_settings_are_obeyed_at_once(bench):
    async with asyncio.TaskGroup() as group:
        running = group.create_task(bench.keeper.run())
        await asyncio.sleep(1)
        bench.settings.set(SharingSettings(split_count=2))
        await asyncio.sleep(0.01)
        running.cancel()

    assert [2, 2] == [gpu.split_count for gpu in bench.inventory.value.gpus]

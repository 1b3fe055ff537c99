"""Health: asked for by a person, switched off by the operator, remembered over a boot."""

import asyncio

import msgspec
import pytest

from agent.health.xids import HealthSettings, read_switches
from agent.model import NO_INDEX, WITHHELD, Condition, ProbeOutcome, Scan
from tests.builders import a_gpu, a_health, a_shared_gpu, an_inventory
from tests.services.health.watching import G0, G1, HealthBench, running

OFF = HealthSettings(switches=read_switches("all", ""))
ILL = msgspec.structs.replace(
    a_health(condition=Condition.BAD, cause="xid", xid=48, text="XID 48"), needs_reset=True
)


@pytest.mark.parametrize("name", ["1", G1])
async def test_a_recheck_asks_the_gpu_now_and_judges_the_answer(name):
    async with running() as bench:
        await asyncio.sleep(5)
        bench.driver.outcomes[G1] = ProbeOutcome.LOST
        found = await bench.watch.recheck(name)

        assert (G1, 1, "ok", "lost", False) == (
            found.gpu.uuid,
            found.gpu.index,
            found.before.condition,
            found.after.condition,
            found.serving,
        )
        assert ["ok", "lost", "ok"] == bench.conditions
        assert found.missing


async def test_a_recheck_finds_a_lost_gpu_by_its_index():
    async with running() as bench:
        lost = a_shared_gpu(gpu=a_gpu(index=1), present=False)
        bench.inventory.set(an_inventory(gpus=(a_shared_gpu(), lost)))

        assert G1 == (await bench.watch.recheck("1")).gpu.uuid


async def test_a_gpu_of_unknown_index_is_rechecked_by_its_uuid_alone():
    async with running() as bench:
        gone = a_shared_gpu(gpu=a_gpu(index=NO_INDEX, uuid=G1, name=""), present=False)
        bench.inventory.set(an_inventory(gpus=(a_shared_gpu(), gone)))

        assert await bench.watch.recheck(str(NO_INDEX)) is None
        assert NO_INDEX == (await bench.watch.recheck(G1)).gpu.index


async def test_a_recheck_cuts_no_rest_short():
    async with running() as bench:
        bench.driver.xid(G0, 54)
        await asyncio.sleep(1)
        for _ in range(5):
            found = await bench.watch.recheck("0")

        assert (Condition.BAD, ("599 s more without a bad report",)) == (
            found.after.condition,
            found.missing,
        )


async def test_a_recheck_of_a_gpu_that_does_not_answer_comes_back_in_time():
    async with running() as bench:
        await asyncio.sleep(1)
        bench.driver.hung = True
        async with asyncio.timeout(4.5):
            found = await bench.watch.recheck("0")

        assert (ProbeOutcome.SILENT, Condition.UNMONITORED) == (
            found.probe.outcome,
            found.after.condition,
        )


async def test_a_recheck_says_why_a_gpu_that_is_well_takes_no_pods():
    async with running() as bench:
        await asyncio.sleep(1)
        bench.keeper.withhold(True)
        found = await bench.watch.recheck("0")
        assert not found.serving
        assert (WITHHELD,) == found.missing

        kept_out = a_shared_gpu(present=False, wanted=False)
        bench.inventory.set(an_inventory(gpus=(kept_out,)))
        found = await bench.watch.recheck("0")
        assert ("ok", False) == (found.after.condition.value, found.serving)
        assert ("it is filtered out by the settings",) == found.missing


async def test_a_recheck_of_a_gpu_that_is_not_there_finds_nothing():
    async with running() as bench:
        assert await bench.watch.recheck("9") is None
        bench.keeper.found(Scan("570.1", ()))
        assert await bench.watch.recheck(G0) is None


async def test_gpus_whose_health_nobody_wants_to_know_are_served_and_shown_as_such():
    async with running(OFF, recalled={G0: ILL}) as bench:
        bench.driver.xid(G1, 79)
        bench.driver.outcomes[G1] = ProbeOutcome.LOST
        await asyncio.sleep(3600)

        assert ["unmonitored"] * 3 == bench.conditions
        assert all(bench.of(gpu.uuid).serving for gpu in bench.inventory.value.gpus)
        assert "switched off" in bench.of(G0).text
        bench.keeper.found(Scan("570.1", (a_gpu(index=0), a_gpu(index=5))))
        await asyncio.sleep(1)
        assert ["unmonitored"] * 2 == bench.conditions
        assert "off" == (await bench.watch.recheck("5")).after.cause
    assert ([], {}) == (bench.driver.probes[1:], bench.memory)


async def test_what_a_boot_has_mended_is_remembered_as_mended():
    bench = HealthBench(recalled={G0: ILL}, boot_changed=True)

    assert Condition.OK is bench.memory[G0].condition
    assert {} == HealthBench(recalled={G0: ILL}).memory

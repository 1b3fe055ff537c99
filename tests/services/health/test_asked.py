"""Health: asked for by a person, switched off by the operator, remembered over a boot."""

import asyncio

import msgspec
import pytest

from agent.errors import DriverError
from agent.health.judge import HealthSettings
from agent.kit.timing import until_tick
from agent.model import Cause, Condition, ProbeOutcome, Scan
from tests.builders import a_gpu, a_health, a_shared_gpu, a_uuid, an_inventory
from tests.services.health.watching import G0, G1, HealthBench, running

OFF = HealthSettings(disabled_xids="all")
ILL = msgspec.structs.replace(
    a_health(condition=Condition.BAD, cause="xid", xid=48, text="XID 48"), needs_reset=True
)


async def test_a_recheck_says_why_a_gpu_that_is_well_takes_no_pods():
    async with running() as bench:
        await asyncio.sleep(1)
        bench.keeper.withhold("the disk is full")
        found = await bench.watch.recheck("0")
        assert not found.serving
        assert ("no slice is on offer: the disk is full",) == found.missing

        kept_out = a_shared_gpu(present=False, wanted=False)
        bench.inventory.set(an_inventory(gpus=(kept_out,)))
        found = await bench.watch.recheck("0")
        assert ("ok", False) == (found.after.condition.value, found.serving)
        assert ("it is filtered out by the settings",) == found.missing


async def test_a_recheck_tells_what_the_gpu_was_and_what_it_is_now():
    async with running() as bench:
        await asyncio.sleep(1)
        bench.driver.outcomes[G1] = ProbeOutcome.LOST
        found = await bench.watch.recheck(G1)

        assert ("ok", "lost") == (found.before.condition, found.after.condition)


async def test_gpus_whose_health_nobody_wants_to_know_are_served_and_shown_as_such():
    async with running(OFF, recalled={G0: ILL}) as bench:
        bench.driver.xid(G1, 79)
        bench.driver.outcomes[G1] = ProbeOutcome.LOST
        await asyncio.sleep(3600)

        assert ["unmonitored"] * 3 == bench.conditions
        assert all(bench.of(gpu.uuid).serving for gpu in bench.inventory.value.gpus)
        assert "switched off" in bench.of(G0).text
        bench.scanned(Scan("570.1", (a_gpu(index=0), a_gpu(index=5))))
        await asyncio.sleep(1)
        assert ["unmonitored"] * 2 == bench.conditions
        assert "off" == (await bench.watch.recheck("5")).after.cause
        assert ([], {}) == (bench.driver.probes[1:], bench.memory)
        await bench.watch.release("5")
        assert not bench.of(a_uuid(5)).serving
        await bench.watch.recheck("5")
        assert (True, "off") == (bench.of(a_uuid(5)).serving, bench.of(a_uuid(5)).cause)


async def test_what_a_boot_has_mended_is_remembered_as_mended():
    bench = HealthBench(recalled={G0: ILL}, boot_changed=True)

    assert Condition.OK is bench.memory[G0].condition
    assert {} == HealthBench(recalled={G0: ILL}).memory


async def test_no_verdict_that_waits_for_the_stream_of_events_undoes_a_release():
    async with running() as bench:
        await asyncio.sleep(1)
        bench.driver.failure = DriverError("the driver is gone")
        bench.driver.break_events()
        await asyncio.sleep(150)
        assert not bench.of(G1).serving
        bench.driver.failure, bench.driver.opening = None, 1e9
        await asyncio.sleep(until_tick(HealthSettings().probe_interval) + 0.5)
        assert not bench.of(G0).serving  # it passed its probe, and waits for the stream

        await bench.watch.release("1")
        await asyncio.sleep(12)

        assert (True, Cause.RELEASED) == (bench.of(G0).serving, bench.of(G1).cause)


# A GPU that an operator has released: not served, not asked, and as it was when taken back.


async def test_the_events_of_the_others_are_heard_again_right_after_a_release():
    async with running() as bench:
        await asyncio.sleep(1)
        bench.driver.failure = DriverError("the driver is gone")
        bench.driver.break_events()
        await asyncio.sleep(40)
        bench.driver.failure = None
        await bench.watch.release("1")
        await asyncio.sleep(0.1)

        assert bench.driver.listening


def serving_and_deaf(bench) -> list[bool]:
    """At each publication of a GPU that is served again: whether no stream was open."""
    seen, publish = [], bench.watch._on_judged

    def judged(health):
        seen.extend(not bench.driver.listening for one in health.values() if one.serving)
        publish(health)

    bench.watch._on_judged = judged
    return seen


@pytest.mark.parametrize("away", [2.0, 18.0, 200.0])
@pytest.mark.parametrize("opening", [0.0, 0.3, 0.9])
async def test_all_gpus_that_are_taken_back_are_served_once_their_xids_are_heard(away, opening):
    async with running() as bench:
        await asyncio.sleep(1)
        bench.driver.opening = opening
        await bench.watch.release("all")
        bench.driver.failure = DriverError("all GPUs are released")
        bench.driver.break_events()
        await asyncio.sleep(away)
        seen = serving_and_deaf(bench)
        bench.driver.failure = None
        bench.driver.released.clear()

        found = await bench.watch.recheck("0")

        assert found
        assert (True, "ok", ()) == (found.serving, found.after.condition.value, found.missing)
        bench.driver.xid(G0, 48)
        await asyncio.sleep(0.5)
        assert not bench.of(G0).serving
        for name in ("1", "2"):
            await bench.watch.recheck(name)
        await asyncio.sleep(0.5)
        assert ["bad", "ok", "ok"] == bench.conditions
        assert seen
        assert not any(seen)

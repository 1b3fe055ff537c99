"""Probes that fail: looked at again a little later, so that no hiccup takes a GPU away."""

import asyncio

import pytest

from agent.errors import DriverError
from agent.health.watch import OPENING, SECOND_LOOK, SETTLED
from agent.model import Condition, DriverEvent, EventKind, GpuFault, ProbeOutcome, Scan, Trouble
from tests.builders import a_gpu
from tests.services.health.watching import G0, G1, G2, HealthBench, running

CHANGED = DriverEvent(EventKind.CHANGED)
ROUND = 10.0
SLACK = 0.2


def conditions_of(bench: HealthBench, uuid) -> list[Condition]:
    """What was published of that GPU, in its order."""
    return [verdict[uuid].condition for verdict in bench.verdicts if uuid in verdict]


@pytest.mark.parametrize("why", ["", "not supported"])
@pytest.mark.parametrize("seconds", [0.1, 3.0])
async def test_a_hiccup_of_the_probes_takes_no_gpu_away(why, seconds):
    async with running() as bench:
        bench.driver.unmonitored[G1] = why
        await asyncio.sleep(2 * ROUND)
        bench.driver.outcomes = dict.fromkeys((G0, G1, G2), ProbeOutcome.FAILED)
        bench.driver.report(CHANGED)
        await asyncio.sleep(seconds)
        bench.driver.outcomes.clear()
        await asyncio.sleep(60)

        assert all(bench.of(uuid).serving for uuid in (G0, G1, G2))
        assert Condition.BAD not in {*conditions_of(bench, G0), *conditions_of(bench, G1)}
        assert 1 == bench.slices.value.generation


@pytest.mark.parametrize("why", ["", "not supported"])
async def test_a_gpu_whose_probes_keep_failing_is_out_after_the_second_look(why):
    async with running() as bench:
        bench.driver.unmonitored[G1] = why
        await asyncio.sleep(2 * ROUND)
        bench.driver.outcomes[G1] = ProbeOutcome.FAILED
        bench.driver.report(CHANGED)
        await asyncio.sleep(SECOND_LOOK - SLACK)
        assert bench.of(G1).serving
        await asyncio.sleep(2 * SLACK)

        assert ["ok", "bad", "ok"] == bench.conditions
        asked = bench.driver.probes.count(G1)
        await asyncio.sleep(5 * ROUND)
        assert asked + 5 >= bench.driver.probes.count(G1)


async def test_a_driver_that_fails_once_is_asked_again_before_the_next_round():
    async with running() as bench:
        bench.driver.failure = DriverError("try again")
        bench.driver.report(CHANGED)
        await asyncio.sleep(1)
        assert ["unmonitored"] * 3 == bench.conditions
        bench.driver.failure = None
        await asyncio.sleep(SECOND_LOOK)

        assert ["ok"] * 3 == bench.conditions


async def test_a_gpu_that_a_scan_finds_lost_is_asked_at_once():
    async with running() as bench:
        await asyncio.sleep(1)
        bench.driver.outcomes[G1] = ProbeOutcome.LOST
        lost = GpuFault(G1, "GPU is lost", Trouble.LOST)
        bench.keeper.found(Scan("570.1", (a_gpu(index=0), a_gpu(index=2)), (lost,)))
        await asyncio.sleep(SLACK)

        assert ["ok", "lost", "ok"] == bench.conditions


async def test_a_stream_that_takes_long_to_open_hears_nothing_until_it_is_open():
    async with running() as bench:
        bench.driver.opening = 3 * SETTLED
        bench.driver.break_events()
        await asyncio.sleep(0.5 + 3 * SETTLED)
        bench.driver.report(CHANGED)
        await asyncio.sleep(SETTLED - SLACK)
        assert ["unmonitored"] * 3 == bench.conditions
        await asyncio.sleep(2 * ROUND)

        assert ["ok"] * 3 == bench.conditions


async def test_a_first_stream_that_never_opens_is_noticed():
    bench = HealthBench()
    bench.driver.opening = 3600.0
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(bench.watch.run())
        await asyncio.sleep(OPENING - SLACK)
        assert ["ok"] * 3 == bench.conditions
        await asyncio.sleep(ROUND)
        task.cancel()

    assert ["unmonitored"] * 3 == bench.conditions
    assert "does not open" in bench.of(G0).text

"""A GPU that an operator has released: not served, not asked, and as it was when taken back."""

import asyncio

import pytest

from agent.core.errors import DriverError
from agent.core.health.memory import remembered
from agent.core.health.reports import ProbeOutcome
from agent.core.health.settings import HealthSettings, read_switches
from agent.core.inventory.condition import Cause, Condition
from tests.builders import NOON
from tests.services.health.watching import G0, G1, running


async def test_a_released_gpu_is_not_served_and_not_asked():
    async with running() as bench:
        await asyncio.sleep(1)
        found = await bench.watch.release("1")
        bench.driver.probes.clear()
        bench.driver.xid(G1, 48)
        await asyncio.sleep(100)

        assert found
        assert ((G1,), "") == (found.gpus, found.obstacle)
        assert {G1} == bench.driver.released
        assert ["ok", "unmonitored", "ok"] == bench.conditions
        assert (False, "released") == (bench.of(G1).serving, bench.of(G1).cause)
        assert G1 not in bench.driver.probes
        assert Cause.RELEASED == bench.memory[G1].cause
        assert [False] == [g.healthy for g in bench.slices.value.groups if g.uuid == G1]


async def test_a_recheck_takes_it_back_and_looks_at_all():
    async with running() as bench:
        await asyncio.sleep(1)
        await bench.watch.release(G1)
        wanted = bench.scans_wanted
        found = await bench.watch.recheck("1")

        assert found
        assert ("ok", True, ()) == (found.after.condition.value, found.serving, found.missing)
        assert set() == bench.driver.released
        assert bench.scans_wanted > wanted


async def test_one_that_does_not_answer_is_served_only_when_it_does():
    async with running() as bench:
        await asyncio.sleep(1)
        await bench.watch.release("1")
        bench.driver.outcomes[G1] = ProbeOutcome.SILENT
        found = await bench.watch.recheck("1")
        await asyncio.sleep(20)

        assert found
        assert not found.serving
        assert not bench.of(G1).serving
        assert "[H-RELEASED]" in bench.of(G1).text
        del bench.driver.outcomes[G1]
        await asyncio.sleep(20)
        assert ("ok", True) == (bench.of(G1).condition, bench.of(G1).serving)


@pytest.mark.parametrize("outcome", [ProbeOutcome.LOST, ProbeOutcome.REFUSED])
async def test_one_that_its_work_has_left_unwell_is_never_on_offer(outcome):
    async with running() as bench:
        await asyncio.sleep(1)
        await bench.watch.release("1")
        told = len(bench.verdicts)
        bench.driver.outcomes[G1] = outcome
        await bench.watch.recheck("1")
        await asyncio.sleep(20)

        later = [one[G1].serving for one in bench.verdicts[told:] if G1 in one]
        assert later
        assert not any(later)


@pytest.mark.parametrize(("number", "needs"), [(48, "reset"), (151, "reboot"), (54, "rest")])
async def test_one_that_was_not_well_is_as_it_was(number, needs):
    async with running() as bench:
        bench.driver.xid(G0, number)
        await asyncio.sleep(1)
        await bench.watch.release("0")
        assert "unmonitored" == bench.conditions[0]
        found = await bench.watch.recheck("0")

        assert found
        after = found.after
        assert ("bad", number, f"H-{number:03d}") == (after.condition, after.xid, after.runbook)
        assert (needs != "rest", needs == "reboot") == (after.needs_reset, after.needs_reboot)
        assert "it was unhealthy before it was released" in after.text


@pytest.mark.parametrize("outcome", [ProbeOutcome.LOST, ProbeOutcome.FAILED])
async def test_one_that_is_as_unwell_as_before_is_promised_nothing(outcome):
    async with running() as bench:
        bench.driver.outcomes[G1] = outcome
        await asyncio.sleep(100)
        was, told = bench.conditions[1], len(bench.verdicts)
        await bench.watch.release("1")
        await bench.watch.recheck("1")
        await asyncio.sleep(20)

        assert was == bench.conditions[1]
        texts = [one[G1].text for one in bench.verdicts[told:] if G1 in one]
        assert not any("is served again" in text for text in texts)


async def test_one_that_needed_a_reset_and_was_reset_rests():
    async with running() as bench:
        bench.driver.xid(G0, 48)
        await asyncio.sleep(1)
        await bench.watch.release("0")
        found = await bench.watch.recheck("0", was_reset=True)
        await asyncio.sleep(620)

        assert found
        assert not found.after.needs_reset
        assert "ok" == bench.conditions[0]


async def test_where_health_checks_are_off_it_is_taken_back_to_that():
    async with running(HealthSettings(switches=read_switches("all", ""))) as bench:
        await asyncio.sleep(1)
        await bench.watch.release("1")
        assert not bench.of(G1).serving
        await bench.watch.recheck("1")

        assert (True, "off") == (bench.of(G1).serving, bench.of(G1).cause)


async def test_all_are_released_at_once():
    async with running() as bench:
        await asyncio.sleep(1)
        found = await bench.watch.release("all")

        assert found
        assert 3 == len(found.gpus) == len(bench.driver.released)
        assert bench.driver.released_everything
        assert ["unmonitored"] * 3 == bench.conditions


async def test_what_holds_a_gpu_is_said_and_nothing_is_placed_on_it_all_the_same():
    async with running() as bench:
        await asyncio.sleep(1)
        bench.driver.release_failure = DriverError("a call has not come back")
        found = await bench.watch.release("1")

        assert found
        assert "a call has not come back" == found.obstacle
        assert not bench.of(G1).serving


async def test_there_is_no_gpu_of_that_name():
    async with running() as bench:
        assert await bench.watch.release("9") is None


async def test_it_stays_released_over_a_restart_and_not_over_a_boot():
    async with running() as bench:
        await asyncio.sleep(1)
        await bench.watch.release("1")
        known = bench.memory[G1]

    assert Cause.RELEASED == remembered(known, NOON, boot_changed=False).cause
    assert Condition.OK is remembered(known, NOON, boot_changed=True).condition

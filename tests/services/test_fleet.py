"""5,000 nodes come back to one API server without a storm; BENCHMARKS.md says what the limits are.

Up to 500 nodes run the services themselves. For 5,000 the delays alone are drawn.
"""

import asyncio
from collections import Counter

import pytest

from agent import report
from agent.kit.tasks import Backoff
from agent.kube.objects import DELAYS, JITTER, SPREAD
from tests.fakes.chance import Seeded
from tests.fakes.fleet import open_fleet

AWAY = 600.0
RETURN = 0.2
"""Requests a second and node at most, after minutes without an API server: 1,000 of 5,000 nodes."""
JOLT = 1.1
"""The same after a moment in which all watches are lost: 5,500 of 5,000 nodes."""


async def after(happens, nodes):
    """What follows a disturbance: the most requests in one second and all, for each node."""
    seconds: Counter[int] = Counter()
    async with open_fleet(nodes, seconds) as fleet:
        await asyncio.sleep(1800)
        await happens(fleet)
        seconds.clear()
        await asyncio.sleep(60)
    return max(seconds.values()) / nodes, seconds.total() / nodes


async def an_outage(fleet):
    await fleet.outage(AWAY)


async def an_outage_with_news(fleet):
    fleet.change_gpus()
    await fleet.outage(AWAY, forgets=True)


async def a_stop_that_hands_over(fleet):
    fleet.end_watches()


async def a_cut(fleet):
    await fleet.outage(0.01)


async def a_fast_restart(fleet):
    await fleet.outage(0.01, forgets=True)


async def a_slow_restart_with_news(fleet):
    fleet.change_gpus()
    await fleet.outage(5.0)


@pytest.mark.parametrize(
    ("happens", "requests"),
    [(a_stop_that_hands_over, 2), (a_cut, 2), (a_fast_restart, 4), (a_slow_restart_with_news, 3)],
)
async def test_what_ends_all_watches_at_once_brings_the_nodes_back_one_after_the_other(
    happens, requests
):
    peak, total = await after(happens, nodes=200)

    assert peak <= JOLT, peak
    assert requests == pytest.approx(total, abs=0.5)  # each minute some watches end by themselves


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("happens", "requests"), [(an_outage, 3), (an_outage_with_news, 4)])
async def test_after_ten_minutes_without_an_api_server_the_nodes_come_back_spread(
    happens, requests
):
    peak, total = await after(happens, nodes=500)

    assert peak <= RETURN, peak
    assert requests == pytest.approx(total, abs=0.5)


def test_5000_nodes_with_a_report_that_failed_come_back_below_1000_requests_a_second():
    seconds: Counter[int] = Counter()
    for number in range(5000):
        chance = Seeded(number)
        seen, listed = back_at(chance), back_at(chance)
        seconds[int(seen)] += 1
        seconds[int(listed)] += 2  # a LIST, and the watch
        seconds[int(seen + chance.uniform(0.0, report.SPREAD))] += 1

    assert 20_000 == seconds.total()
    assert max(seconds.values()) <= RETURN * 5000


def back_at(chance):
    """When a stream that broke is opened again by a server that was away, in seconds."""
    delays = Backoff(DELAYS, JITTER, chance)
    at = chance.uniform(0.0, SPREAD)
    while at < AWAY:
        at += delays.next() + chance.uniform(0.0, SPREAD)
    return at

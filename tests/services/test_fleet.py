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


async def disturbed(fleet, *, seconds=0.0, forgets=False, news=False):
    """A server that is away for so long; 0: all watches end, as at a stop that hands over."""
    if news:
        fleet.change_gpus()
    if seconds:
        await fleet.outage(seconds, forgets=forgets)
    else:
        fleet.end_watches()


SLOW = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.mark.parametrize(
    ("happens", "nodes", "most", "requests"),
    [
        ({}, 100, JOLT, 2),
        ({"seconds": 0.01}, 100, JOLT, 2),
        ({"seconds": 0.01, "forgets": True}, 100, JOLT, 4),
        ({"seconds": 5.0, "news": True}, 100, JOLT, 3),
        pytest.param({"seconds": AWAY}, 500, RETURN, 3, marks=SLOW),
        pytest.param({"seconds": AWAY, "forgets": True, "news": True}, 500, RETURN, 4, marks=SLOW),
    ],
    ids=["a stop", "a cut", "a restart", "a restart with news", "an outage", "one with news"],
)
async def test_what_ends_all_watches_brings_the_nodes_back_one_after_the_other(
    happens, nodes, most, requests
):
    """`most`: requests of a node in the busiest second; `requests`: in the minute after it."""
    seconds: Counter[int] = Counter()
    async with open_fleet(nodes, seconds) as fleet:
        await asyncio.sleep(1800)
        await disturbed(fleet, **happens)
        seconds.clear()
        await asyncio.sleep(60)

    assert max(seconds.values()) <= most * nodes
    # Each minute some watches end by themselves.
    assert requests == pytest.approx(seconds.total() / nodes, abs=0.5)


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

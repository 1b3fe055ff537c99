"""A real agent on the real pynvml, whose driver hangs or reports, and what an operator sees."""

import asyncio
import statistics

import pytest

from tests.process.agent_process import PATIENCE, comes, offers
from tests.process.driver_node import GPUS, LIMIT, SLICES, a_node

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(120)]


# A whole agent on the real pynvml and a library of ours that hangs: the agent never does.

PROBE = 1.0
"""Seconds: a page that waits for a call to the driver takes the two of its deadline."""


async def test_a_library_that_hangs_holds_up_no_page_and_refuses_with_the_reason(library):
    async with a_node(library) as node:
        assert "" == await node.allocate(SLICES[0])
        assert await comes(lambda: node.stub.inside == 0)
        threads, loop = node.threads, asyncio.get_running_loop()
        refusals, pages = list[str](), list[float]()
        node.stub.hang()
        begun = loop.time()
        while len(refusals) < 3:
            asked = loop.time()
            live, words = await node.page("/livez")
            assert 200 == live, words
            await node.page("/readyz")
            pages.append(loop.time() - asked)
            said = await node.allocate(SLICES[len(pages)])
            assert said or (not refusals and loop.time() - begun < PATIENCE)
            refusals += [said] * bool(said)
            assert node.threads <= threads + GPUS + 2  # the driver's own, and a slow one's
            await asyncio.sleep(0.3)

        assert LIMIT <= loop.time() - begun
        # In the middle: a single page may be late on a busy machine, with any driver.
        assert statistics.median(pages) < 2 * PROBE, pages
        for words in ("the driver has not answered for its GPU", "HA-4005"):
            assert words in refusals[0]
        assert 0 == node.cluster.allocatable()

        node.stub.hang(hung=False)
        assert await offers(node.cluster, 10 * GPUS), node.cluster.log.last(20)
        assert "" == await node.allocate(SLICES[-1])
        assert await comes(lambda: node.stub.inside == 0)
        assert await comes(lambda: node.threads <= threads), (threads, node.threads)
        assert 0 == await node.cluster.stop_agent()
    assert (0, 0, 0) == (node.stub.sessions, node.stub.sets, node.stub.undefined)

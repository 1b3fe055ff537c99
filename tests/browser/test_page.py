"""The page in a browser: content, changes while it is open, keyboard, and accessibility."""

import contextlib
import json

import pytest

from agent.sandbox.lab.cluster import SandboxCluster
from agent.sandbox.scenario.stage import PLACED, plain
from agent.web.server import reading_pages, serve_port
from tests.browser.lab.chromium import Tab
from tests.browser.lab.node import GPUS, STRAY, shows
from tests.doors.page_facts import busy

# While a document loads it has no body yet.
LIVE = "document.getElementById('link')?.textContent.startsWith('Live')"
TEXT = "(document.body?.innerText ?? '')"
FOCUS = "document.activeElement.id"
SHOWN = "[...document.querySelectorAll('#allocations tbody tr')].filter((row) => !row.hidden)"
NOTICE = "idle for 1 h"
PODS = "document.getElementById('allocations').innerText"
PLACE = "document.getElementById('filter').getBoundingClientRect().top"
TAB = 9


@contextlib.asynccontextmanager
async def serving_page(facts):
    """The address of the page of the facts that a test makes."""
    async with serve_port(reading_pages(facts), "127.0.0.1", 0) as port:
        yield f"http://127.0.0.1:{port}"


async def opened(tab: Tab, cluster: SandboxCluster) -> None:
    await tab.go(cluster.web_address or "")
    assert await tab.until(LIVE)


async def test_it_shows_what_the_agent_knows(tab, node):
    await opened(tab, node)
    text = await tab.evaluate(TEXT)

    assert GPUS == await tab.evaluate("document.querySelectorAll('#gpus tbody tr').length")
    for words in ("sandbox", "ready", "cordoned", "HA-2005", f"Pod demo/{STRAY} ", "trio"):
        assert words in text
    # The init container has ended: what it held is free.
    shares = sum(wish.gpus for one in PLACED for wish in one.wishes if not wish.init)
    assert shares + 2 == await tab.evaluate(f"{SHOWN}.length")
    assert [] == tab.errors


async def test_an_xid_is_shown_while_the_page_is_open_and_disturbs_nobody(tab, node):
    await tab.look(height=500)
    await opened(tab, node)
    await tab.evaluate("document.getElementById('filter').focus()")
    await tab.write("demo pair")
    await tab.evaluate(
        "document.getElementById('h-allocations').scrollIntoView({behavior: 'instant'})"
    )
    place = await tab.evaluate(PLACE)
    assert "H-079" not in await tab.evaluate(TEXT)
    # A notice about a container comes and goes.
    await tab.evaluate(f"document.querySelector('#allocations table').after('{NOTICE}')")

    node.hardware.xid("1", 79)

    assert await tab.until("document.getElementById('gpus').innerText.includes('LOST')")
    assert await tab.until(f"{TEXT}.includes('fallen off the bus')")
    assert NOTICE not in await tab.evaluate(TEXT)
    assert ["filter", "demo pair", 2] == await tab.evaluate(
        f"[{FOCUS}, document.activeElement.value, {SHOWN}.length]"
    )
    # Without anchoring, what grew above it would have moved it by several lines of 20 px.
    assert pytest.approx(place, abs=10) == await tab.evaluate(PLACE)
    assert [] == tab.errors


async def test_the_keyboard_reaches_the_filter_and_it_filters(tab, node):
    await opened(tab, node)
    reached = []
    while "filter" not in reached and len(reached) < 20:
        await tab.press("Tab", TAB)
        reached.append(
            await tab.evaluate(f"{FOCUS} || document.activeElement.getAttribute('href')")
        )

    assert "filter" == reached[-1]
    await tab.write("trio")
    assert ["left", "right"] == await tab.evaluate(f"{SHOWN}.map((row) => row.cells[2].innerText)")
    assert "2 of 8" == await tab.evaluate("document.getElementById('shown').textContent")
    await tab.press("Escape", 27)
    assert 8 == await tab.evaluate(f"{SHOWN}.length")


async def test_what_is_selected_stays_until_it_is_selected_no_more(tab, node):
    await opened(tab, node)
    await tab.evaluate("getSelection().selectAllChildren(document.getElementById('refusals'))")

    node.submit(plain("late").pod())

    assert await shows(node, ">late<")
    assert await tab.until("document.getElementById('link').textContent.startsWith('Paused')")
    assert [False, True] == await tab.evaluate(
        f"[{PODS}.includes('late'), getSelection().toString().includes('HA-2005')]"
    )
    await tab.evaluate("getSelection().removeAllRanges()")
    assert await tab.until(f"{PODS}.includes('late') && {LIVE}")


async def test_an_agent_that_is_away_is_said_and_comes_back(tab):
    known = [busy(gpus=1, each=1)]
    async with serving_page(lambda: known[0]) as address:
        await tab.go(address)
        assert await tab.until(LIVE)
        kept = known.pop()
        assert await tab.until(f"{TEXT}.includes('The agent has not answered since')")
        assert "gpu-a07" in await tab.evaluate(TEXT)

        known.append(kept)

        assert await tab.until(LIVE)


async def test_after_an_update_of_the_agent_the_page_is_loaded_anew(tab, node):
    await opened(tab, node)
    await tab.evaluate("document.documentElement.dataset.build = 'older'; self.before = true")

    node.submit(plain("after").pod())

    assert await tab.until(f"!self.before && {TEXT}.includes('after') && {LIVE}")
    assert [] == tab.errors


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
async def test_axe_finds_nothing(tab, axe, dark, width):
    async with serving_page(lambda: busy(gpus=8, each=6)) as address:
        await tab.look(width=width, dark=dark)
        await tab.go(address)
        assert await tab.until(LIVE)

        await tab.evaluate(axe)
        found = json.loads(await tab.evaluate("axe.run().then((found) => JSON.stringify(found))"))

        assert [] == [
            (one["id"], one["help"], [node["html"] for node in one["nodes"]][:3])
            for one in found["violations"]
        ]
        assert [] == [one["id"] for one in found["incomplete"] if one["impact"] == "critical"]
        assert {"color-contrast", "landmark-one-main"} <= {one["id"] for one in found["passes"]}


@pytest.mark.parametrize("width", [320, 390, 1280])
async def test_nothing_is_wider_than_the_window(tab, width):
    async with serving_page(lambda: busy(gpus=8, each=6)) as address:
        await tab.look(width=width)
        await tab.go(address)
        assert await tab.until(LIVE)

        assert width >= await tab.evaluate("document.documentElement.scrollWidth")
        # No table has to be moved sideways: on a narrow screen each row is a box.
        tables = "[...document.querySelectorAll('.wide')]"
        hides = f"{tables}.some((one) => one.scrollWidth > one.clientWidth)"
        assert not await tab.evaluate(hides)

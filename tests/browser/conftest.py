"""One browser and one simulated node for all tests of the page; both end with them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agent.sandbox.lab.cluster import SandboxCluster
from tests.browser.lab.chromium import Chromium, Tab, found, open_chromium
from tests.browser.lab.node import open_node
from tests.marking import on_real_time

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".cache"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real time, and one event loop for all: browser and node outlive a test."""
    on_real_time(items, HERE, 90, one_loop=True)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def node() -> AsyncIterator[SandboxCluster]:
    """A node with pods, a GPU that is cordoned, and a refusal."""
    async with open_node() as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def chromium() -> AsyncIterator[Chromium]:
    """The browser."""
    program = found()
    if program is None:
        pytest.fail("there is no chromium: run make test-browser", pytrace=False)
    async with open_chromium(program) as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="session")
async def tab(chromium: Chromium) -> AsyncIterator[Tab]:
    """An empty tab for each test."""
    async with chromium.tab() as opened:
        yield opened


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core."""
    (path,) = CACHE.glob("axe-core-*.js")
    return path.read_text(encoding="utf-8")

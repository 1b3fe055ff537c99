"""One node for all attacks, and the table of what came of them."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from tests.hostile.lab.node import open_node
from tests.hostile.lab.siege import AttackTable, Siege
from tests.marking import on_real_time
from tests.peers.lab.cluster import kept

HERE = Path(__file__).parent
TABLE = HERE.parents[1] / "build" / "hostile.md"
TRIED: Final = pytest.StashKey[AttackTable]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real time, and one event loop for all: the node outlives a test."""
    on_real_time(items, HERE, 150, one_loop=True)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """What was tried is shown and written at the end."""
    table = config.stash.get(TRIED, AttackTable())
    if table.lines:
        TABLE.parent.mkdir(parents=True, exist_ok=True)
        TABLE.write_text(table.text())
        terminalreporter.section(f"tried, and in {TABLE}")
        terminalreporter.write(table.text())


@pytest.fixture(scope="session")
def table(pytestconfig: pytest.Config) -> AttackTable:
    """Where an attack is noted."""
    return pytestconfig.stash.setdefault(TRIED, AttackTable())


@pytest.fixture(scope="session")
def many(pytestconfig: pytest.Config) -> int:
    """How many files a tenant leaves behind."""
    return int(pytestconfig.getoption("--hostile-files"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def siege(table: AttackTable) -> AsyncIterator[Siege]:
    """The node that all attack."""
    async with kept(open_node()) as node:
        table.lines.append(f"On {node.kind}; 20 pods in a row before each attack and in it.")
        yield Siege(node, table)

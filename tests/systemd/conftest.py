"""One machine with systemd for all tests here, and a service that nobody has touched for each."""

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from agent import __version__
from tests.marking import on_real_time
from tests.peers.lab.cluster import kept
from tests.peers.lab.table import Table
from tests.systemd.lab.bare_metal import BareMetal, open_bare_metal
from tests.systemd.lab.machine import CannotBootError, lacks
from tests.systemd.lab.made import make_wheels, name

HERE = Path(__file__).parent
TABLE = HERE.parents[1] / "build" / "systemd.md"
MEASURED: Final = pytest.StashKey[Table]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real time, and one event loop for all: the machine outlives a test."""
    on_real_time(items, HERE, 300, one_loop=True)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """What was measured is shown and written at the end."""
    table = config.stash.get(MEASURED, Table())
    if table.told():
        table.write(TABLE)
        terminalreporter.section(f"measured, and in {TABLE}")
        terminalreporter.write(table.text())


@pytest.fixture(scope="session")
def table(pytestconfig: pytest.Config) -> Table:
    """Where a test notes what it measured."""
    return pytestconfig.stash.setdefault(MEASURED, Table())


def _cannot(reason: str) -> None:
    """Elsewhere one line, and no failure; in CI nothing may be skipped."""
    text = f"the tests with a systemd of their own cannot run here: {reason}"
    if os.environ.get("CI"):  # noqa: TID251 -- said by who runs it
        pytest.fail(text, pytrace=False)
    pytest.skip(text)


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """A place for the machine, on a short path."""
    made = Path(tempfile.mkdtemp(prefix="hami-systemd-"))
    yield made
    shutil.rmtree(made)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def machine_of_session(folder: Path) -> AsyncIterator[BareMetal]:
    """The machine that tests share, with nothing installed."""
    wheels = os.environ.get("HAMI_SYSTEMD_WHEELS")  # noqa: TID251 -- said by tests/systemd/run
    missing = lacks() or ("" if wheels else "wheels (tests/systemd/run fetches them)")
    if missing or wheels is None:
        _cannot(f"there is no {missing}")
        return
    make_wheels(folder / "dist")
    try:
        async with kept(open_bare_metal(folder, Path(wheels))) as opened:
            yield opened
    except CannotBootError as error:
        _cannot(str(error))


@pytest_asyncio.fixture(loop_scope="session")
async def bare(machine_of_session: BareMetal) -> BareMetal:
    """The machine without the agent."""
    machine = machine_of_session.machine
    await machine_of_session.clear()
    await machine.run("/src/systemd/uninstall", "--purge")
    machine_of_session.settings()
    return machine_of_session


async def _fresh(found: BareMetal, *how: str) -> BareMetal:
    await found.clear()
    found.keep(__version__)
    said = await found.install(*how, f"/src/dist/{name(__version__)}")
    assert 0 == said.code, said
    return found


@pytest_asyncio.fixture(loop_scope="session")
async def node(machine_of_session: BareMetal) -> BareMetal:
    """The machine with the agent installed, its own settings alone, and not started."""
    await _fresh(machine_of_session, "--no-start")
    await machine_of_session.machine.run("systemctl", "daemon-reload")
    return machine_of_session


@pytest_asyncio.fixture(loop_scope="session")
async def first(machine_of_session: BareMetal) -> BareMetal:
    """The machine with the agent as it is, started, and no version before it to go back to."""
    for link in ("current", "previous"):
        machine_of_session.machine.path(f"/opt/hami-agent/{link}").unlink(missing_ok=True)
    return await _fresh(machine_of_session)

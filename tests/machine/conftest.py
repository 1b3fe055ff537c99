"""No history tells of itself; how many are played is said on the command line."""

import os
import secrets
from collections.abc import Callable, Iterator

import pytest

from tests.machine.playing import Many, silence


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    with silence():
        yield


@pytest.fixture
def many(request: pytest.FixtureRequest) -> Many:
    """How many histories to play: other ones at every run, unless told otherwise."""
    told, jobs = (request.config.getoption(f"--history-{what}") for what in ("seed", "jobs"))
    first = secrets.randbelow(1 << 31) if told is None else int(told)
    return Many(
        first, int(request.config.getoption("--histories")), int(jobs or os.cpu_count() or 1)
    )


@pytest.fixture
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Text that stands in the report of a test that passed, too (pytest -rP)."""

    def add(text: str) -> None:
        request.node.add_report_section("call", "histories", text)

    return add

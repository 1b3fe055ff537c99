"""No history tells of itself."""

from collections.abc import Iterator

import pytest

from tests.machine.playing import silence


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    with silence():
        yield

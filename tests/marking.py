"""What all tests of a folder have in common, for the folder's conftest."""

from collections.abc import Iterable
from pathlib import Path

import pytest


def on_real_time(
    items: Iterable[pytest.Item], folder: Path, seconds: int, *, one_loop: bool = False
) -> None:
    """Real time, and so many seconds for a test that names none; `one_loop`: the same for all."""
    for item in items:
        if item.path.parent != folder:
            continue
        if one_loop:
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
        item.add_marker(pytest.mark.looptime(False))
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(seconds))

"""Prometheus is a real program: real time."""

from pathlib import Path

import pytest

from tests.marking import on_real_time

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real time, and two minutes for each test: they run beside other steps."""
    on_real_time(items, HERE, 120)

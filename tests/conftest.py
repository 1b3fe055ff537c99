"""What holds for every test."""

import asyncio
from pathlib import Path

import pytest

PEERS = Path(__file__).parent / "peers"

# On Python 3.11 pytest-asyncio asks for "the current loop" before its first test; asyncio then
# makes one that nobody closes, and its ResourceWarning fails whatever test runs later.
asyncio.set_event_loop(None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--peers` is for tests/peers/run, which sees to it that there are peers."""
    parser.addoption("--peers", action="store_true", help="collect tests/peers/test_*.py too")
    parser.addoption("--gpu-watch", default="5", metavar="SECONDS", help="watch a real GPU so long")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests beside the real peers are for those who ask; what needs no peers runs always."""
    if collection_path.parent == PEERS and collection_path.name.startswith("test_"):
        return not config.getoption("--peers") or None
    return None

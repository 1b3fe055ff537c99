"""The C stub of the driver's library, for whole agents over a real one; a node that is well."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agent.sandbox.lab.cluster import SandboxCluster
from tests.fakes.nvml_fixtures import built
from tests.process.doctored_node import a_node

__all__ = ["built"]


@pytest.fixture
def library(built: Path, tmp_path: Path) -> Path:
    """The stub where drivers have it."""
    return Path(shutil.copy(built, tmp_path / "libnvidia-ml.so.1"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def well() -> AsyncIterator[SandboxCluster]:
    """A node on which nothing is wrong, for tests that leave it so."""
    async with a_node() as cluster:
        yield cluster


@pytest.fixture
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verb in this process sets up no log: it would be that of all tests."""
    monkeypatch.setattr("agent.cli.doctor.configure", lambda *_: None)

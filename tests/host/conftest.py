"""A driver over the library in memory; a module with other GPUs overrides `library`."""

from pathlib import Path

import pytest

from agent.host.nvml.driver import NvmlDriver
from tests.fakes.nvml import FakeGpu, FakeNvml


@pytest.fixture
def library() -> FakeNvml:
    return FakeNvml([FakeGpu("GPU-0"), FakeGpu("GPU-1")])


@pytest.fixture
async def driver(library: FakeNvml, tmp_path: Path):
    driver = NvmlDriver(library, sys_root=tmp_path, deadline=0.3)
    yield driver
    library.release()
    await driver.close()

"""A driver over the library in memory, and one over the C stub.

A module with other GPUs overrides `library`; one of the stub takes `stub_driver` for its `driver`.
"""

from pathlib import Path

import pytest

from agent.host.nvml.driver import NvmlDriver
from tests.fakes.nvml import FakeGpu, FakeNvml
from tests.fakes.nvml_fixtures import built, forgetful, stub, stub_driver, stub_path

__all__ = ["built", "forgetful", "stub", "stub_driver", "stub_path"]


@pytest.fixture
def library() -> FakeNvml:
    return FakeNvml([FakeGpu("GPU-0"), FakeGpu("GPU-1")])


@pytest.fixture
async def driver(library: FakeNvml, tmp_path: Path):
    driver = NvmlDriver(library, sys_root=tmp_path, deadline=0.3)
    yield driver
    library.release()
    await driver.close()
    assert 0 == library.undefined

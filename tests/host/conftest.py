"""A driver over the library in memory, and one over the C stub.

A module with other GPUs overrides `library`; one of the stub takes `stub_driver` for its `driver`.
"""

import shutil
from pathlib import Path

import pytest

from agent.host.nvml.driver import NvmlDriver
from agent.host.nvml.library import pynvml as the_library
from tests.fakes import nvml_stub
from tests.fakes.nvml import FakeGpu, FakeNvml
from tests.fakes.nvml_stub import NvmlStub


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


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    return nvml_stub.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def stub_path(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(built, tmp_path / "libstub.so"))


@pytest.fixture
def forgetful():
    yield
    nvml_stub.forget()


@pytest.fixture
def stub(stub_path: Path) -> NvmlStub:
    return NvmlStub(stub_path)


@pytest.fixture
async def stub_driver(stub_path: Path, stub: NvmlStub, tmp_path: Path):
    driver = NvmlDriver(the_library(), path=stub_path, sys_root=tmp_path, deadline=0.3)
    yield driver
    stub.hang(hung=False)
    await driver.close()
    assert 0 == stub.undefined

"""The C stub as fixtures, for the folders that ask for them in their conftest."""

import shutil
from pathlib import Path

import pytest

from agent.gpu.driver import NvmlDriver
from tests.fakes import nvml_stub
from tests.fakes.nvml_stub import NvmlStub


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
def deadline() -> float:
    """Seconds of each call of a driver; a module whose calls take long has more."""
    return 0.3


@pytest.fixture
async def stub_driver(stub_path: Path, stub: NvmlStub, tmp_path: Path, deadline: float):
    driver = NvmlDriver(path=stub_path, sys_root=tmp_path, deadline=deadline)
    yield driver
    stub.hang(hung=False)
    await driver.close()
    assert 0 == stub.undefined

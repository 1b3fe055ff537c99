"""A driver over the C stub, and HAMi-core's directories."""

import asyncio
from pathlib import Path

import pytest

from agent.gpu.driver import NvmlDriver
from agent.hookdirs import HostHookDirs
from tests.fakes.nvml_fixtures import built, deadline, forgetful, stub, stub_driver, stub_path
from tests.fakes.offload import Inline
from tests.host.hook_space import NAME

__all__ = ["built", "deadline", "forgetful", "stub", "stub_driver", "stub_path"]


@pytest.fixture
def driver(forgetful: None, stub_driver: NvmlDriver) -> NvmlDriver:
    return stub_driver


@pytest.fixture
def hook(tmp_path: Path) -> Path:
    """The hook path: a directory of root's."""
    (tmp_path / "hook").mkdir()
    return tmp_path / "hook"


@pytest.fixture
def dirs(hook: Path, tmp_path: Path) -> HostHookDirs:
    return HostHookDirs(hook, tmp_path / "dev", "2.10.0", Inline(), Inline())


@pytest.fixture
def leaf(hook: Path, dirs: HostHookDirs) -> Path:
    """The directory of a container that runs, as the agent made it."""
    asyncio.run(dirs.prepare(NAME, wipe=True))
    return hook / "vgpu" / "containers" / NAME

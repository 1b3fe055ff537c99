"""A driver over the C stub, HAMi-core's directories, and API servers."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from agent.gpu.driver import NvmlDriver
from agent.hookdirs import HostHookDirs
from tests.fakes.http import a_session
from tests.fakes.kubeworld import model_world
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


@pytest.fixture
async def serve(tmp_path: Path):
    """Makes a session whose requests the given handler answers."""
    async with contextlib.AsyncExitStack() as opened:
        yield lambda handler: opened.enter_async_context(a_session(handler, tmp_path))


@pytest.fixture
async def world(tmp_path: Path):
    """The model of the API server, and a session on it."""
    async with model_world(tmp_path) as made:
        yield made

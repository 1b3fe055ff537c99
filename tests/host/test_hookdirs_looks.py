"""HAMi-core's directories, looked at without a write: what would have every new pod refused."""

import pytest

from agent.errors import StateError
from agent.hookdirs import HostHookDirs
from tests.fakes.offload import Inline

NAME = "6f1c1f0e-8f5a-4a52-9d2e-6b8b8a1d0001_main"


async def refused(dirs):
    """What a look without a write finds wrong; nothing: all that is needed can be made."""
    try:
        await dirs.check()
    except StateError as error:
        return str(error)
    return ""


async def test_a_look_finds_nothing_wrong_before_and_after_the_first_directory(dirs, hook):
    assert "" == await refused(dirs)
    assert [] == list(hook.iterdir())
    await dirs.prepare(NAME, wipe=True)

    assert "" == await refused(dirs)


@pytest.mark.parametrize("place", ["vgpu", "vgpu/containers"])
async def test_a_look_finds_what_lies_in_a_directorys_place(dirs, hook, place):
    await dirs.prepare(NAME, wipe=True)
    (hook / place).rename(hook / "away")
    (hook / place).symlink_to(hook / "away")

    assert "remove the link or file in its place" in await refused(dirs)


async def test_a_look_finds_an_unsafe_or_missing_hook_path(dirs, hook):
    hook.chmod(0o777)
    assert "writable by everybody" in await refused(dirs)
    hook.rmdir()
    assert f"make the directory {hook}, owned by root" in await refused(dirs)


async def test_files_that_cannot_be_looked_at_are_said(hook, tmp_path):
    (hook / "vgpu").mkdir()

    with pytest.raises(StateError, match="File name too long"):
        await HostHookDirs(hook, tmp_path / "dev", "2" * 300, Inline(), Inline()).facts()

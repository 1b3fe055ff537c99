"""What was in container directories goes part by part, on a thread of its own."""

import asyncio
import os
import threading
from collections.abc import Callable

import pytest

from agent.hookdirs import HostHookDirs
from agent.host.process import Worker
from tests.fakes.offload import Inline, R, Ts
from tests.host.hook_space import NAME, cleared


async def test_content_stays_unless_it_is_to_be_wiped(dirs, hook):
    await dirs.prepare(NAME, wipe=True)
    cache = hook / "vgpu" / "containers" / NAME / "a.cache"
    cache.write_text("limits")

    await dirs.prepare(NAME, wipe=False)
    assert cache.exists()
    await dirs.prepare(NAME, wipe=True)

    assert not cache.exists()


async def test_a_wipe_removes_links_and_not_what_they_name(dirs, hook, tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").write_text("mine")
    await dirs.prepare(NAME, wipe=True)
    leaf = hook / "vgpu" / "containers" / NAME
    (leaf / "to-directory").symlink_to(tmp_path / "victim")
    (leaf / "to-file").symlink_to(tmp_path / "victim" / "file")
    (leaf / "nested").mkdir()
    (leaf / "nested" / "deeper").symlink_to(tmp_path / "victim")
    os.mkfifo(leaf / "pipe")

    await dirs.prepare(NAME, wipe=True)
    await cleared(dirs)

    assert [leaf] == list(leaf.parent.iterdir())
    assert [] == list(leaf.iterdir())
    assert "mine" == (tmp_path / "victim" / "file").read_text()


async def test_what_is_set_aside_after_its_caller_gave_up_is_counted(hook, tmp_path):
    class Slow:
        async def call(self, work: Callable[[*Ts], R], *args: *Ts) -> R:
            await asyncio.sleep(3)
            return work(*args)

    dirs = HostHookDirs(hook, tmp_path / "dev", "2.10.0", Slow(), Inline())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await dirs.remove(NAME)

    assert 1 == dirs.set_aside.value


@pytest.mark.timeout(60)  # thousands of renames, on a disk that others use, too
async def test_no_depth_is_too_deep_to_remove(dirs, hook):
    await dirs.prepare(NAME, wipe=True)
    leaf = hook / "vgpu" / "containers" / NAME
    at = os.open(leaf, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=at)
        above, at = at, os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(above)
    os.close(at)

    await dirs.remove(NAME)
    await cleared(dirs)

    assert [] == list(leaf.parent.iterdir())


async def test_a_removal_takes_many_small_parts_and_comes_to_an_end(dirs, hook, monkeypatch):
    monkeypatch.setattr("agent.hookdirs.SLICE_ENTRIES", 3)
    monkeypatch.setattr("agent.hookdirs.VISIT", 5)
    other = NAME.replace("main", "other")
    for name in (NAME, other):
        await dirs.prepare(name, wipe=True)
        for number in range(20):
            (hook / "vgpu" / "containers" / name / str(number)).write_text("")
        await dirs.remove(name)

    parts = [(await dirs.clear(again=False)).more for _ in range(30)]

    assert (True, False) == (parts[12], parts[-1])
    assert [] == list((hook / "vgpu" / "containers").iterdir())


async def test_a_container_that_goes_on_writing_holds_up_nobody_elses_removal(
    dirs, hook, monkeypatch
):
    monkeypatch.setattr("agent.hookdirs.VISIT", 50)
    monkeypatch.setattr("agent.hookdirs.SLICE_ENTRIES", 20)
    containers = hook / "vgpu" / "containers"
    for number in range(5):
        name = NAME.replace("main", f"c{number}")
        await dirs.prepare(name, wipe=True)
        (containers / name / "a").write_text("")
        await dirs.remove(name)
    busy = min(containers.iterdir())

    for number in range(100):
        for more in range(20):
            (busy / f"{number}-{more}").write_text("")
        assert (await dirs.clear(again=False)).more

    assert [busy] == list(containers.iterdir())


async def test_removing_is_repeatable_and_touches_no_other(dirs, hook):
    other = NAME.replace("main", "other")
    await dirs.remove(NAME)
    await dirs.prepare(NAME, wipe=True)
    await dirs.prepare(other, wipe=True)

    await dirs.remove(NAME)
    await dirs.remove(NAME)
    await cleared(dirs)

    assert [other] == [path.name for path in (hook / "vgpu" / "containers").iterdir()]


async def test_a_linked_container_directory_is_removed_and_not_what_it_names(dirs, hook, tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").write_text("mine")
    (hook / "vgpu" / "containers").mkdir(parents=True)
    (hook / "vgpu" / "containers" / NAME).symlink_to(tmp_path / "victim")

    await dirs.remove(NAME)
    await cleared(dirs)

    assert [] == list((hook / "vgpu" / "containers").iterdir())
    assert "mine" == (tmp_path / "victim" / "file").read_text()


async def test_no_removal_is_waited_for_by_what_is_made_beside_it(hook, tmp_path):
    """One file can take the disk seconds."""
    async with Worker("disk", 4) as disk, Worker("clearing", 4) as clearing:
        dirs = HostHookDirs(hook, tmp_path, "", disk, clearing)
        await dirs.prepare(NAME, wipe=True)
        await dirs.remove(NAME)
        held, begun = threading.Event(), threading.Event()

        def hang():
            begun.set()
            held.wait()

        async with asyncio.TaskGroup() as group:
            group.create_task(clearing.call(hang))
            part = group.create_task(dirs.clear(again=True))
            try:
                await asyncio.to_thread(begun.wait)
                for wipe in (True, False):
                    await dirs.prepare(NAME, wipe=wipe)
                await dirs.remove(NAME)
                assert {} == await dirs.found()
                assert not part.done()
            finally:
                held.set()
        assert 2 == dirs.set_aside.value

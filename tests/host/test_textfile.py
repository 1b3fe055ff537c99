"""Files of settings: read whole, refused with a sentence, and never waited for."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from agent.errors import SettingsError
from agent.host.files import is_there, read_file
from agent.host.process import Worker
from tests.fakes.offload import Inline


async def content(file: Path, limit: int = 10) -> bytes:
    return await read_file(file, limit, Inline())


async def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path):
    pipe = tmp_path / "config.yaml"
    os.mkfifo(pipe)

    with pytest.raises(SettingsError, match=r"config\.yaml: is a pipe"):
        await content(pipe)


@pytest.mark.parametrize(("size", "reason"), [(3, None), (10, None), (11, "is larger than 0 KiB")])
async def test_a_file_is_read_up_to_its_bound(tmp_path, size, reason):
    file = tmp_path / "config.yaml"
    file.write_bytes(b"x" * size)

    if reason is None:
        assert b"x" * size == await content(file)
    else:
        with pytest.raises(SettingsError, match=reason):
            await content(file)


@pytest.mark.parametrize("name", ["none", "here", "loop", "x" * 300])
async def test_what_cannot_be_read_is_refused_with_what_to_do(tmp_path, name):
    (tmp_path / "here").mkdir()
    (tmp_path / "loop").symlink_to("loop")

    with pytest.raises(SettingsError, match=r"cannot be read: .*; check the path and its rights"):
        await content(tmp_path / name)


async def test_a_file_that_fails_while_it_is_read_is_refused_with_the_reason():
    with pytest.raises(SettingsError, match="/proc/self/mem: cannot be read: Input/output error"):
        await content(Path("/proc/self/mem"))


@pytest.mark.parametrize(
    ("name", "there"),
    [("file", True), ("none", False), ("here", False), ("loop", False), ("x" * 300, True)],
)
async def test_a_file_that_cannot_be_looked_at_counts_as_one(tmp_path, name, there):
    (tmp_path / "file").touch()
    (tmp_path / "here").mkdir()
    (tmp_path / "loop").symlink_to("loop")

    assert there is await is_there(tmp_path / name, Inline())


@pytest.mark.looptime(False)
async def test_all_steps_are_done_on_the_thread_that_is_lent(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    before = set(threading.enumerate())  # those of other tests may end meanwhile
    async with Worker("lent", 1) as worker:
        assert b"x" == await read_file(tmp_path / "file", 10, worker)
        assert ["lent"] == [one.name for one in set(threading.enumerate()) - before]


@pytest.mark.looptime(False)
async def test_a_read_that_hangs_is_given_up_and_holds_up_no_end(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    hangs, over = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        over.wait()

    try:
        async with asyncio.timeout(5), Worker("hung", 1, patience=0.01) as worker:
            async with asyncio.TaskGroup() as group:
                hanging = group.create_task(worker.call(hang))
                assert await asyncio.to_thread(hangs.wait, 5)
                hanging.cancel()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await read_file(tmp_path / "file", 10, worker)
    finally:
        over.set()

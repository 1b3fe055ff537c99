"""The Disk port: one body over the real directory and over the one in memory."""

import contextlib
import errno

import pytest

from agent.errors import StateError
from tests.fakes.disk import MemoryDisk, with_faults


@pytest.fixture(params=["directory", "memory"])
async def disk_and_faults(request, tmp_path):
    if request.param == "memory":
        memory = MemoryDisk()
        yield memory, memory.faults
        return
    disk, faults = await with_faults(tmp_path / "state")
    yield disk, faults
    disk.close()


async def test_an_absent_file_reads_as_none(disk_and_faults):
    disk, _ = disk_and_faults

    assert None is await disk.read("state.json")


async def test_what_was_written_is_read(disk_and_faults):
    disk, _ = disk_and_faults
    large = bytes(range(256)) * 1024
    await disk.replace("state.json", b"small")
    await disk.replace("other.json", b"")

    await disk.replace("state.json", large)

    assert large == await disk.read("state.json")
    assert b"" == await disk.read("other.json")


async def test_keep_receives_the_content_before(disk_and_faults):
    disk, _ = disk_and_faults
    for generation in (b"1", b"2", b"3"):
        await disk.replace("state.json", generation, keep="state.json.1")

    assert b"3" == await disk.read("state.json")
    assert b"2" == await disk.read("state.json.1")


async def test_the_first_content_keeps_nothing(disk_and_faults):
    disk, _ = disk_and_faults

    await disk.replace("state.json", b"1", keep="state.json.1")

    assert None is await disk.read("state.json.1")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize(("keep", "before"), [(None, 1), ("state.json.1", 1), ("state.json.1", 3)])
async def test_an_error_at_any_step_is_said_and_the_old_content_stands_until_the_last(
    disk_and_faults, keep, before, code
):
    disk, faults = disk_and_faults
    for _ in range(before):
        await disk.replace("state.json", b"old", keep=keep)
    begun = faults.steps
    await disk.replace("state.json", b"old", keep=keep)
    steps, found = faults.steps - begun, []
    for step in range(steps):
        faults.fail_at(step, code)
        with contextlib.suppress(StateError):
            await disk.replace("state.json", b"new", keep=keep)
            faults.revive()  # the step was the removal of what is not there
            continue
        found.append(await disk.read("state.json"))
        faults.revive()
        await disk.replace("state.json", b"old", keep=keep)

    # The last step makes the rename durable: where it fails, either content may outlive a crash.
    assert [*[b"old"] * (len(found) - 1), b"new"] == found
    assert len(found) >= steps - 1


async def test_after_an_error_the_next_write_goes_well(disk_and_faults):
    disk, faults = disk_and_faults
    await disk.replace("state.json", b"old", keep="state.json.1")
    faults.fail_at(3, errno.EIO, times=20)
    with pytest.raises(StateError):
        await disk.replace("state.json", b"lost", keep="state.json.1")
    faults.revive()

    await disk.replace("state.json", b"new", keep="state.json.1")

    assert b"new" == await disk.read("state.json")
    assert b"old" == await disk.read("state.json.1")

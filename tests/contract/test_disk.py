"""The Disk port: one body over the real directory and over the one in memory."""

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
async def test_an_error_at_any_step_is_said_and_the_old_content_stands(
    disk_and_faults, keep, before, code
):
    disk, faults = disk_and_faults
    for _ in range(before):
        await disk.replace("state.json", b"old", keep=keep)
    begun = faults.steps
    await disk.replace("state.json", b"old", keep=keep)
    refused = 0
    for step in range(faults.steps - begun):
        faults.fail_at(step, code)
        try:
            await disk.replace("state.json", b"new", keep=keep)
        except StateError as error:
            refused += 1
            assert "state.json cannot be written" in str(error)  # noqa: PT017 -- some steps may fail
            assert errno.errorcode[code] in str(error)  # noqa: PT017
            assert b"old" == await disk.read("state.json")
        else:
            assert b"new" == await disk.read("state.json")
            faults.revive()  # a write that took fewer steps has not met it
            await disk.replace("state.json", b"old", keep=keep)

    assert refused >= 6


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

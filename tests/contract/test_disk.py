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


async def test_what_was_written_is_read_and_the_content_before_is_kept_where_it_is_asked(
    disk_and_faults,
):
    disk, _ = disk_and_faults
    large = bytes(range(256)) * 1024
    assert None is await disk.read("state.json")
    await disk.replace("state.json", b"1", keep="state.json.1")
    assert (b"1", None) == (await disk.read("state.json"), await disk.read("state.json.1"))

    for content in (b"2", b"", large):
        await disk.replace("state.json", content, keep="state.json.1")
    await disk.replace("other.json", b"")

    found = [await disk.read(name) for name in ("state.json", "state.json.1", "other.json")]
    assert [large, b"", b""] == found


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

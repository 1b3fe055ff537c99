"""What no generation could be read from is kept: an older agent must not end a newer one's rows."""

import errno

import pytest

from agent.ledger import Ledger
from agent.state import CURRENT, PREVIOUS, PREVIOUS_UNREADABLE, UNREADABLE, StateService, recover
from tests.fakes.disk import MemoryDisk
from tests.services.test_state_recovery import MACHINE, a_disk, putting, recovered

NEWER = b'{"kind":"hami-agent-state","version":9,"checksum":"","data":{}}'
OLDER = NEWER.replace(b"9", b"8")


async def write(disk, state):
    service = StateService(disk=disk, recovered=state, boot_id="boot-2")
    waiting = service.commit(putting(service.generation))
    waiting.send(None)
    await service.flush()
    waiting.close()


async def test_generations_of_a_newer_version_outlive_the_writes_of_this_one():
    disk = await a_disk(NEWER, OLDER)
    found = await recovered(disk)
    for _ in range(3):
        await write(disk, found.state)
        found = await recovered(disk)

    assert NEWER == await disk.read(UNREADABLE)
    assert OLDER == await disk.read(PREVIOUS_UNREADABLE)


async def test_where_they_are_kept_is_said():
    found = await recovered(await a_disk(NEWER, OLDER))

    assert Ledger() == found.state.ledger
    assert "it has version 9" in found.notice
    assert f"{CURRENT} is kept as {UNREADABLE}" in found.notice
    assert f"{PREVIOUS} is kept as {PREVIOUS_UNREADABLE}" in found.notice


@pytest.mark.parametrize(
    ("current", "previous", "kept"),
    [(NEWER, None, UNREADABLE), (None, OLDER, PREVIOUS_UNREADABLE)],
)
async def test_a_single_generation_is_kept_too(current, previous, kept):
    disk = await a_disk(current, previous)

    await recovered(disk)

    assert (current or previous) == await disk.read(kept)
    assert {CURRENT if current else PREVIOUS, kept} == set(disk.files.names)


async def test_a_disk_that_keeps_nothing_aside_is_said():
    disk = await a_disk(NEWER, OLDER)
    disk.faults.fail_at(0, errno.ENOSPC, times=99)

    found = await recovered(disk)

    assert f"{UNREADABLE} cannot be written: ENOSPC" in found.notice


async def test_a_new_node_keeps_nothing():
    disk = MemoryDisk()

    await recover(disk, boot_id="b", machine_id=MACHINE)

    assert {} == disk.files.names

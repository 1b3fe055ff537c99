"""Whatever lies in the state directory, start goes on from the newest generation that is whole."""

import pytest

from agent.errors import StateError
from agent.ledger import Ledger, State
from agent.state import (
    CURRENT,
    PREVIOUS,
    UNREADABLE,
    Recovered,
    StateService,
    encode_state,
    recover,
)
from tests.builders import a_pod_uid, a_row
from tests.fakes.chance import Seeded
from tests.fakes.disk import Killed, MemoryDisk

MACHINE = "machine-1"


def a_state(generation, machine=MACHINE):
    rows = tuple(a_row(pod_uid=a_pod_uid(n), pod=f"p{n}") for n in range(generation))
    return State(generation, "boot-1", machine, Ledger(rows))


ENCODED = {generation: encode_state(a_state(generation)) for generation in (1, 2)}


FRESH = State(boot_id="boot-2", machine_id=MACHINE)
NEWER = b'{"kind":"hami-agent-state","version":9,"checksum":"","data":{}}'
OLDER = NEWER.replace(b"9", b"8")


async def a_disk(current, previous=None):
    disk = MemoryDisk()
    for name, content in ((CURRENT, current), (PREVIOUS, previous)):
        if content is not None:
            await disk.replace(name, content)
    disk.faults.steps = 0
    return disk


async def recovered(disk):
    return await recover(disk, boot_id="boot-2", machine_id=MACHINE)


@pytest.mark.parametrize(
    ("current", "previous", "state", "kept"),
    [(ENCODED[2], ENCODED[1], a_state(2), {CURRENT, PREVIOUS}), (None, None, FRESH, set())],
    ids=["the newest generation", "a new node"],
)
async def test_what_is_whole_or_absent_is_taken_without_a_word(current, previous, state, kept):
    disk = await a_disk(current, previous)
    found = await recovered(disk)

    assert (state, "") == (found.state, found.notice)
    assert kept == set(disk.files.names)


@pytest.mark.parametrize("current", [b"", b"\0" * 40, ENCODED[2][:-20], None])
async def test_an_unusable_generation_is_said_and_the_one_before_is_used(current):
    disk = await a_disk(current, ENCODED[1])

    found = await recovered(disk)

    assert a_state(1) == found.state
    assert CURRENT in found.notice
    assert "generation 1 in state.previous.json" in found.notice


FOREIGN = encode_state(a_state(2, machine="machine-9"))


@pytest.mark.parametrize(
    ("generations", "said"),
    [
        ((FOREIGN, FOREIGN), ["belongs to another machine"]),
        ((b"x", b"y"), ["rebuilding", CURRENT, PREVIOUS]),
        ((NEWER, OLDER), ["it has version 9", "it has version 8", f"kept as {UNREADABLE}"]),
        ((None, OLDER), [f"{CURRENT} is missing", "it has version 8"]),
    ],
    ids=["another machine's", "both unusable", "of newer versions", "a single one"],
)
async def test_what_cannot_be_used_is_said_and_nothing_is_written(generations, said):
    disk = await a_disk(*generations)

    found = await recovered(disk)

    assert FRESH == found.state
    assert [] == [text for text in said if text not in found.notice]
    assert 0 == disk.faults.steps


@pytest.mark.parametrize(
    ("written", "now", "kept"),
    [("", MACHINE, MACHINE), (MACHINE, "", MACHINE), ("", "", "")],
    ids=["from a container to the host", "from the host to a container", "in containers"],
)
async def test_where_one_of_the_machines_has_no_name_the_state_is_taken(written, now, kept):
    disk = await a_disk(encode_state(a_state(2, machine=written)))

    found = await recover(disk, boot_id="boot-2", machine_id=now)

    assert (a_state(2, machine=kept), "") == (found.state, found.notice)


class Unreadable(MemoryDisk):
    """A bad sector under each of `names`."""

    names: tuple[str, ...] = (CURRENT,)

    async def read(self, name):
        if name in self.names:
            raise StateError(f"/state/{name} cannot be read: EIO")
        return await super().read(name)


async def test_a_directory_that_cannot_be_read_is_never_taken_for_an_empty_one():
    disk = Unreadable()
    disk.names = (CURRENT, PREVIOUS)

    with pytest.raises(StateError, match="cannot be read"):
        await recovered(disk)


def putting(number):
    row = a_row(pod_uid=a_pod_uid(number), pod=f"p{number}")
    return lambda ledger: ledger.put(row)


async def generations(disk, count, found=None):
    """Commit rows one by one until the process dies; return how many were acknowledged."""
    found = found or Recovered(State(machine_id=MACHINE))
    service = service_on(disk, found)
    for number in range(count):
        try:
            await flushed(service, putting(number))
        except Killed:
            return number
    return count


def service_on(disk, found):
    return StateService(disk=disk, recovered=found.state, boot_id="boot-1", keep=found.keep)


async def flushed(service, change):
    """The change is made and written, without the service at work."""
    waiting = service.commit(change)
    assert waiting.send(None) is not None
    try:
        await service.flush()
    finally:
        waiting.close()


async def steps_of(count):
    disk = MemoryDisk()
    assert count == await generations(disk, count)
    return disk.faults.steps


@pytest.mark.parametrize("seed", range(4))
async def test_at_whatever_step_the_power_fails_what_was_acknowledged_is_there(seed):
    for step in range(await steps_of(3)):
        disk = MemoryDisk(Seeded(seed))
        disk.faults.kill_at(step)
        acknowledged = await generations(disk, 3)

        disk.crash()
        found = await recovered(disk)

        names = [row.pod for row in found.state.ledger.rows]
        assert [f"p{n}" for n in range(acknowledged)] == names[:acknowledged]
        assert len(names) <= acknowledged + 1
        assert (not names) == (not found.state.generation)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("current", [b"rubbish", None])
async def test_the_only_good_generation_outlives_a_power_failure_in_the_write_after_a_fall_back(
    seed, current
):
    whole = await a_disk(current, ENCODED[2])
    await generations(whole, 1, await recovered(whole))
    for step in range(whole.faults.steps):
        disk = await a_disk(current, ENCODED[2])
        disk.files._chance = Seeded(seed)
        disk.faults.kill_at(step)
        assert 0 == await generations(disk, 1, await recovered(disk))

        disk.crash()

        names = [row.pod for row in (await recovered(disk)).state.ledger.rows]
        assert ["p0", "p1"] == sorted(names)


async def test_the_writes_after_a_fall_back_keep_a_good_generation_and_the_unusable_content():
    disk = await a_disk(b"rubbish", ENCODED[1])
    service = service_on(disk, await recovered(disk))
    await flushed(service, lambda ledger: ledger.drop(row.key for row in ledger.rows))
    assert ENCODED[1] == await disk.read(PREVIOUS)
    last = await disk.read(CURRENT)
    await flushed(service, putting(5))

    assert (last, b"rubbish") == (await disk.read(PREVIOUS), await disk.read(UNREADABLE))
    await disk.replace(CURRENT, b"torn")
    assert () == (await recovered(disk)).state.ledger.rows

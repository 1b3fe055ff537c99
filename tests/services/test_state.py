"""A change counts once it is on disk; changes that wait share a write, and none hangs for ever."""

import asyncio
import contextlib
import errno

import pytest

from agent.cluster import NodeEvent
from agent.errors import StateError
from agent.ledger import Ledger, State
from agent.model import Condition, GpuUuid
from agent.state import (
    COMMIT_DEADLINE,
    CURRENT,
    LAST_WRITE,
    PREVIOUS,
    RETRY,
    UNREADABLE,
    NodeJournal,
    Recovered,
    StateService,
    decode_state,
    encode_state,
    recover,
)
from tests.builders import G1, NOON, a_health, a_pod_uid, a_row
from tests.fakes.chance import Seeded
from tests.fakes.clock import ManualClock
from tests.fakes.disk import GatedDisk, Killed, MemoryDisk
from tests.services.at_work import at_work


def row(number):
    return a_row(pod_uid=a_pod_uid(number), pod=f"p{number}")


def putting(number):
    return lambda ledger: ledger.put(row(number))


@contextlib.asynccontextmanager
async def a_service(disk):
    service = StateService(disk=disk, recovered=State(), boot_id="boot")
    async with at_work(service.run):
        yield service


async def test_ten_changes_at_once_need_two_writes():
    disk = GatedDisk(shut=True)
    async with a_service(disk) as service, asyncio.TaskGroup() as group:
        group.create_task(service.commit(putting(0)))
        await asyncio.sleep(0.01)
        for number in range(1, 10):
            group.create_task(service.commit(putting(number)))
        await asyncio.sleep(0.01)
        disk.gate.set()

    assert (2, 10) == (disk.writes, len(service.ledger.value.rows))


async def test_a_change_that_changes_nothing_is_not_written():
    disk = GatedDisk()
    async with a_service(disk) as service:
        await service.commit(putting(1))
        await service.commit(putting(1))
        await service.commit(lambda ledger: ledger)
        service.remember({})
        await asyncio.sleep(1)

    assert 1 == disk.writes


async def test_a_failed_write_leaves_the_ledger_and_tells_every_author():
    disk = GatedDisk()
    async with a_service(disk) as service:
        await service.commit(putting(1))
        before = service.ledger.value
        disk.faults.fail_at(0, errno.ENOSPC, times=50)

        for number in (2, 3):
            with pytest.raises(StateError, match="ENOSPC"):
                await service.commit(putting(number))

        assert before == service.ledger.value
        assert before == decode_state(await disk.content(CURRENT)).ledger
        assert "ENOSPC" in service.error.value
        assert (((), 2),) == service.errors.items()

        disk.faults.revive()
        await asyncio.sleep(RETRY)  # although nobody writes, for no pod is admitted meanwhile
        assert "" == service.error.value


async def test_after_a_write_that_hung_and_failed_the_next_one_is_waited_for():
    disk = GatedDisk(shut=True)
    async with a_service(disk) as service:
        service.remember({GpuUuid(G1): a_health(condition=Condition.BAD)})
        await asyncio.sleep(COMMIT_DEADLINE + 1)
        disk.faults.fail_at(0, errno.EIO)
        disk.gate.set()
        await asyncio.sleep(0.01)
        assert "EIO" in service.error.value
        assert (((), 1),) == service.errors.items()

        await service.commit(putting(1))

        assert (row(1),) == service.ledger.value.rows


@pytest.mark.parametrize(
    ("has_begun", "written"), [(True, ["p1"]), (False, ["p1", "p2"])], ids=["waiting", "writing"]
)
async def test_an_author_who_gives_up_disturbs_nobody_and_what_only_waited_is_not_written(
    has_begun, written
):
    disk = GatedDisk(shut=True)
    async with a_service(disk) as service, asyncio.TaskGroup() as group:
        group.create_task(service.commit(putting(1)))
        if has_begun:  # else both changes are in one write
            await asyncio.sleep(0.01)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await service.commit(putting(2))
        disk.gate.set()

    assert written == sorted(one.pod for one in service.ledger.value.rows)


ILL = {GpuUuid(G1): a_health(condition=Condition.BAD)}


async def test_a_write_that_hangs_is_an_error_while_it_does():
    disk = GatedDisk(shut=True)
    async with a_service(disk) as service:
        service.remember(ILL)
        await asyncio.sleep(9.9)
        assert "" == service.error.value

        await asyncio.sleep(5.2)
        assert "the disk has not answered for 10 s: look at /state's disk" == service.error.value
        assert (((), 1),) == service.errors.items()

        disk.gate.set()
        await asyncio.sleep(0.1)
        assert "" == service.error.value
        await asyncio.sleep(10)
        assert "" == service.error.value
    assert (((), 1),) == service.errors.items()


async def test_all_who_wait_when_the_disk_is_silent_are_told_at_once_and_so_is_who_comes_later():
    disk = GatedDisk(shut=True)
    loop = asyncio.get_running_loop()
    async with a_service(disk) as service:
        service.remember(ILL)
        await asyncio.sleep(0.01)
        for wait, expected in ((4, 6), (0, 0)):
            await asyncio.sleep(wait)
            began = loop.time()
            with pytest.raises(StateError, match="has not answered for 10 s"):
                await service.commit(putting(1))
            assert expected == pytest.approx(loop.time() - began, abs=0.02)
        disk.gate.set()
        await asyncio.sleep(0.1)
        await service.commit(putting(1))
    assert (row(1),) == service.ledger.value.rows


async def test_a_second_cancellation_does_not_cut_the_last_write():
    disk = GatedDisk()
    service = StateService(disk=disk, recovered=State(), boot_id="boot")
    async with asyncio.TaskGroup() as group:
        running = group.create_task(service.run())
        await asyncio.sleep(0.01)
        disk.gate.clear()
        service.remember(ILL)
        running.cancel()
        await asyncio.sleep(0.01)
        running.cancel()
    disk.gate.set()
    await asyncio.sleep(0.01)

    assert ILL.keys() == decode_state(await disk.content(CURRENT)).health.keys()


@pytest.mark.parametrize("answers", [0.5, None], ids=["answers", "is silent"])
async def test_at_the_stop_authors_are_told_and_health_is_written_if_the_disk_answers(answers):
    disk = GatedDisk(shut=True)
    loop = asyncio.get_running_loop()

    async def author() -> None:
        with pytest.raises(StateError, match="stopped"):
            await service.commit(putting(1))

    async with asyncio.TaskGroup() as group, a_service(disk) as service:
        group.create_task(author())
        await asyncio.sleep(0.01)
        service.remember(ILL)
        began = loop.time()
        if answers:
            loop.call_later(answers, disk.gate.set)

    assert (answers or LAST_WRITE) == pytest.approx(loop.time() - began)
    disk.gate.set()
    if answers:
        assert ILL.keys() == decode_state(await disk.content(CURRENT)).health.keys()


# The journal keeps what happened in 24 hours, the newest first, and no more than it may.


def test_the_newest_comes_first_and_yesterday_is_gone():
    clock = ManualClock(NOON)
    journal = NodeJournal(clock)
    journal.changed(NodeEvent("GpuUnhealthy", "GPU 1", warning=True))
    clock.advance(3600)
    journal.changed(NodeEvent("GpuRecovered", "GPU 1", warning=False))

    def shown():
        return [entry.reason for entry in journal.recent(journal.changes)]

    assert ["GpuRecovered", "GpuUnhealthy"] == shown()

    clock.advance(23 * 3600)
    assert (["GpuRecovered"], NOON) == (shown(), journal.since)
    clock.advance(60)
    assert NOON.replace(minute=1) == journal.since


# Whatever lies in the state directory, start goes on from the newest generation that is whole.


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


FOREIGN, TWO = encode_state(a_state(2, machine="machine-9")), ENCODED[2]
LAST = [CURRENT, "generation 1 in state.previous.json"]


@pytest.mark.parametrize(
    ("generations", "machine", "state", "said"),
    [
        # What is whole or absent is taken without a word.
        ((TWO, ENCODED[1]), MACHINE, a_state(2), []),
        ((None, None), MACHINE, FRESH, []),
        # Between a container and its host: one of the machines has no name.
        ((encode_state(a_state(2, machine="")), None), MACHINE, a_state(2), []),
        ((TWO, None), "", a_state(2), []),
        ((encode_state(a_state(2, machine="")), None), "", a_state(2, machine=""), []),
        # In place of an unusable generation the one before is used.
        *(
            ((current, ENCODED[1]), MACHINE, a_state(1), LAST)
            for current in (b"", b"\0" * 40, TWO[:-20], None)
        ),
        ((FOREIGN, FOREIGN), MACHINE, FRESH, ["belongs to another machine"]),
        ((b"x", b"y"), MACHINE, FRESH, ["rebuilding", CURRENT, PREVIOUS]),
        (
            (NEWER, OLDER),
            MACHINE,
            FRESH,
            ["it has version 9", "it has version 8", f"kept as {UNREADABLE}"],
        ),
        ((None, OLDER), MACHINE, FRESH, [f"{CURRENT} is missing", "it has version 8"]),
    ],
)
async def test_the_newest_whole_generation_is_taken_the_others_are_said_and_nothing_is_written(
    generations, machine, state, said
):
    disk = await a_disk(*generations)
    before = set(disk.files.names)

    found = await recover(disk, boot_id="boot-2", machine_id=machine)

    assert state == found.state
    assert bool(said) == bool(found.notice)
    assert [] == [text for text in said if text not in found.notice]
    assert (0, before) == (disk.faults.steps, set(disk.files.names))


async def test_a_directory_that_cannot_be_read_is_never_taken_for_an_empty_one():
    class Unreadable(MemoryDisk):
        async def read(self, name):
            raise StateError(f"/state/{name} cannot be read: EIO")

    with pytest.raises(StateError, match="cannot be read"):
        await recovered(Unreadable())


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

"""A change counts once it is on disk; changes that wait share a write, and none hangs for ever."""

import asyncio
import contextlib
import errno

import pytest

from agent.cluster import NodeEvent
from agent.errors import StateError
from agent.ledger import State
from agent.model import Condition, GpuUuid
from agent.state import (
    COMMIT_DEADLINE,
    CURRENT,
    LAST_WRITE,
    RETRY,
    NodeJournal,
    StateService,
    decode_state,
)
from tests.builders import G1, NOON, a_health, a_pod_uid, a_row
from tests.fakes.clock import ManualClock
from tests.fakes.disk import GatedDisk
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
    assert ["GpuRecovered"] == shown()

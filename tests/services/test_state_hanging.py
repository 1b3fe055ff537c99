"""A disk that hangs is said to hang, holds nobody up for ever, and the last news are written."""

import asyncio
import errno

import pytest

from agent.errors import StateError
from agent.ledger import State
from agent.model import Condition, GpuUuid
from agent.state import COMMIT_DEADLINE, CURRENT, LAST_WRITE, StateService, decode_state
from tests.builders import G1, a_health, a_pod_uid, a_row
from tests.fakes.gated_disk import GatedDisk
from tests.services.test_state_commit import a_service

ROW = a_row(pod_uid=a_pod_uid(1), pod="p1")
ILL = {GpuUuid(G1): a_health(condition=Condition.BAD)}


def putting(row=ROW):
    return lambda ledger: ledger.put(row)


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


async def test_a_write_that_hung_and_failed_is_one_error_with_the_later_reason():
    disk = GatedDisk(shut=True)
    async with a_service(disk) as service:
        service.remember(ILL)
        await asyncio.sleep(11)
        disk.faults.fail_at(0, errno.EIO, times=50)
        disk.gate.set()
        await asyncio.sleep(0.1)

        assert "EIO" in service.error.value
        assert (((), 1),) == service.errors.items()


async def test_an_author_waits_for_a_hanging_disk_no_longer_than_the_deadline():
    disk = GatedDisk(shut=True)
    async with a_service(disk) as service:
        began = asyncio.get_running_loop().time()
        with pytest.raises(StateError, match="has not answered for 10 s"):
            await service.commit(putting())

        assert COMMIT_DEADLINE == pytest.approx(asyncio.get_running_loop().time() - began)


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
                await service.commit(putting())
            assert expected == pytest.approx(loop.time() - began, abs=0.02)
        disk.gate.set()
        await asyncio.sleep(0.1)
        await service.commit(putting())
    assert (ROW,) == service.ledger.value.rows


async def test_changes_that_were_given_up_take_no_place_and_are_written_once_at_most():
    disk = GatedDisk(shut=True)
    async with a_service(disk, limit=2) as service:
        for _ in range(6):
            with pytest.raises(StateError, match="has not answered"):
                await service.commit(putting())
        disk.gate.set()
        await asyncio.sleep(0.1)
        await service.commit(lambda ledger: ledger)

        assert (ROW,) == service.ledger.value.rows
        assert 1 == disk.writes


async def test_health_noted_in_the_last_moment_is_written():
    disk = GatedDisk()
    async with a_service(disk) as service:
        await service.commit(putting())
        service.remember(ILL)

    state = decode_state(await disk.content(CURRENT))
    assert Condition.BAD is state.health[GpuUuid(G1)].condition
    assert (ROW,) == state.ledger.rows


async def test_health_whose_write_was_cut_by_the_stop_is_written():
    disk = GatedDisk(shut=True)
    async with a_service(disk) as service:
        service.remember(ILL)
        await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_later(0.5, disk.gate.set)

    assert ILL.keys() == decode_state(await disk.content(CURRENT)).health.keys()


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


async def test_a_hanging_disk_holds_up_the_stop_for_a_moment_only():
    disk = GatedDisk(shut=True)
    async with a_service(disk) as service:
        service.remember(ILL)
        await asyncio.sleep(0.01)
        began = asyncio.get_running_loop().time()

    assert LAST_WRITE == pytest.approx(asyncio.get_running_loop().time() - began)

"""GPUs that take long to wake, and one that is lost beside others: over the real pynvml."""

import asyncio

import pytest

from agent.model import DriverEvent, EventKind, GpuUuid, Trouble
from tests.fakes.nvml import until
from tests.fakes.nvml_events import hear, listening

pytestmark = [pytest.mark.looptime(False), pytest.mark.usefixtures("forgetful")]

UUIDS = [GpuUuid(f"GPU-5708-{slot}") for slot in range(16)]

HANDLE = "nvmlDeviceGetHandleByIndex_v2"
"""The call that wakes a GPU."""


async def change(heard) -> None:
    """Wait until everybody is asked to look again."""
    async with asyncio.timeout(30):
        while await heard.get() != DriverEvent(EventKind.CHANGED):
            pass


@pytest.mark.parametrize(("count", "serial"), [(1, False), (8, False), (8, True)])
async def test_gpus_that_answer_late_are_there_as_soon_as_they_do(stub_driver, stub, count, serial):
    """`serial`: the driver wakes one after the other."""
    stub.order(range(count))
    for slot in range(count):
        stub.hang(HANDLE, slot)
    async with listening(stub_driver) as heard:
        scan = await stub_driver.scan()
        assert [] == list(scan.gpus)
        assert [Trouble.SILENT] * count == [fault.trouble for fault in scan.faults]
        for slot in range(count):
            stub.hang(HANDLE, slot, hung=False)
            while serial and UUIDS[slot] not in {gpu.uuid for gpu in scan.gpus}:
                await change(heard)
                scan = await stub_driver.scan()
            assert not serial or slot + 1 == len(scan.gpus)
        while scan.faults:
            await change(heard)
            scan = await stub_driver.scan()

    assert UUIDS[:count] == [gpu.uuid for gpu in scan.gpus]


async def test_who_listens_only_after_a_gpu_woke_is_told_of_it(stub_driver, stub):
    stub.hang(HANDLE, 1)
    assert [Trouble.SILENT] == [fault.trouble for fault in (await stub_driver.scan()).faults]
    stub.hang(HANDLE, 1, hung=False)
    await until(lambda: stub.inside == 0)
    async with listening(stub_driver) as heard:
        assert [DriverEvent(EventKind.CHANGED)] == await hear(heard, 1)

    assert () == (await stub_driver.scan()).faults


async def test_a_gpu_that_answers_in_time_is_no_news(stub_driver, stub):
    async with listening(stub_driver) as heard:
        await stub_driver.scan()
        stub.xid(0, 48)

        assert EventKind.XID is (await hear(heard, 1))[0].kind


async def reports(stub, heard, slot: int, number: int) -> list[DriverEvent]:
    """The GPU reports until it is heard: what comes while there is no set is heard by nobody."""
    async with asyncio.timeout(30):
        while heard.empty():
            stub.xid(slot, number)
            await asyncio.sleep(0.01)
    known = []
    while not heard.empty():
        known.append(heard.get_nowait())
    return known


async def test_one_lost_gpu_deafens_no_other(stub_driver, stub):
    await stub_driver.scan()
    async with listening(stub_driver) as heard:
        await reports(stub, heard, 2, 94)
        begun = asyncio.get_running_loop().time()
        stub.lose(1)
        while DriverEvent(EventKind.XID, UUIDS[2], 48) not in await reports(stub, heard, 2, 48):
            pass

        assert asyncio.get_running_loop().time() - begun < 1.0
        assert "GPU is lost" in (await stub_driver.probe(UUIDS[1])).text
        assert 1 == stub.sets

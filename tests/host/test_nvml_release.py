"""A GPU that is released is held by no handle, whatever is asked of the others."""

import asyncio

import pytest

from agent.errors import DriverError, GpuError
from agent.model import DriverEvent, EventKind, GpuUuid, ProbeOutcome, Trouble
from tests.fakes.nvml_stub import listening, until

pytestmark = [pytest.mark.looptime(False), pytest.mark.usefixtures("forgetful")]

UUIDS = [GpuUuid(f"GPU-5708-{slot}") for slot in range(16)]
G0, G1, G2 = UUIDS[:3]


def attached(stub) -> list[bool]:
    return [stub.attached(slot) for slot in range(3)]


def is_back(driver, stub) -> bool:
    """No call hangs, and the driver has heard so: it could not end its session before."""
    return stub.inside == 0 and not driver._threads._calls


async def test_a_released_gpu_is_let_go_of_and_the_others_are_asked_on(stub_driver, stub):
    before = await stub_driver.scan()
    assert [True] * 3 == attached(stub)
    await stub_driver.release([G1])
    assert [False] * 3 == attached(stub)
    scan = await stub_driver.scan()
    probes = [await stub_driver.probe(uuid) for uuid in (G0, G2)]
    await stub_driver.sample(G0)

    assert [before.gpus[0], before.gpus[2]] == list(scan.gpus)  # links and indexes, too
    assert [(G1, Trouble.RELEASED, 1)] == [(f.gpu, f.trouble, f.index) for f in scan.faults]
    assert {ProbeOutcome.PASSED} == {probe.outcome for probe in probes}
    assert [True, False, True] == attached(stub)


@pytest.mark.parametrize("ask", ["probe", "sample"])
async def test_a_released_gpu_itself_is_asked_nothing(stub_driver, stub, ask):
    await stub_driver.scan()
    await stub_driver.release([G1])
    with pytest.raises(GpuError, match="hami-agent recheck takes it back"):
        await getattr(stub_driver, ask)(G1)

    assert not stub.attached(1)


async def test_who_listens_when_a_gpu_is_released_is_told_that_the_session_ended(stub_driver, stub):
    await stub_driver.scan()
    async with listening(stub_driver) as heard:
        await reports(stub, heard, 2, 48)
        await stub_driver.release([G1])
        ends = [await heard.get() for _ in range(heard.qsize() or 1)]

    assert isinstance(ends[-1], DriverError)
    assert 0 == stub.sets


async def test_with_all_released_no_session_is_open_and_none_is_begun(stub_driver, stub):
    await stub_driver.scan()
    await stub_driver.release([G0, G1, G2])
    for ask in (stub_driver.scan(), stub_driver.probe(G0), anext(stub_driver.events())):
        with pytest.raises(DriverError, match="all GPUs are released"):
            await ask
    assert 0 == stub.sessions
    begun = stub.calls("nvmlInitWithFlags")
    stub_driver.take_back(G0)
    scan = await stub_driver.scan()

    assert [G0] == [gpu.uuid for gpu in scan.gpus]
    assert ([True, False, False], 1) == (attached(stub), stub.calls("nvmlInitWithFlags") - begun)


async def test_all_are_let_go_of_with_those_that_nobody_shares(stub_driver, stub):
    await stub_driver.scan()
    await stub_driver.release([G0, G2], everything=True)  # G1 is in MIG mode, or filtered out
    with pytest.raises(DriverError, match="all GPUs are released"):
        await stub_driver.scan()

    assert ([False] * 3, 0) == (attached(stub), stub.sessions)
    stub_driver.take_back(G0)
    scan = await stub_driver.scan()
    assert [G0, G1] == [gpu.uuid for gpu in scan.gpus]
    assert [True, True, False] == attached(stub)
    stub_driver.take_back(G2)
    assert [G0, G1, G2] == [gpu.uuid for gpu in (await stub_driver.scan()).gpus]


async def test_a_gpu_that_is_taken_back_is_heard_again(stub_driver, stub):
    await stub_driver.scan()
    await stub_driver.release([G1])
    async with listening(stub_driver) as heard:
        await reports(stub, heard, 2, 94)
        stub_driver.take_back(G1)
        await stub_driver.scan()
        while not heard.empty():
            heard.get_nowait()

        assert DriverEvent(EventKind.XID, G1, 48) == (await reports(stub, heard, 1, 48))[0]


async def test_a_call_that_does_not_come_back_is_named_as_what_holds_the_gpus(stub_driver, stub):
    await stub_driver.scan()
    stub.hang(slot=0)
    await stub_driver.probe(G0)
    with pytest.raises(DriverError, match="has not returned from the driver"):
        await stub_driver.release([G1])
    stub.hang(slot=0, hung=False)
    await until(lambda: is_back(stub_driver, stub))
    await stub_driver.release([G1])

    assert [False] * 3 == attached(stub)


async def release_all_with_one_undescribed(driver, stub) -> None:
    stub.hang(slot=1)
    await driver.scan()
    stub.hang(slot=1, hung=False)
    await until(lambda: is_back(driver, stub))
    with pytest.raises(GpuError, match=r"has not described it.*release all"):
        await driver.release([G1])
    await driver.release([G0, G1, G2], everything=True)


async def test_all_are_let_go_of_although_one_of_them_was_never_described(stub_driver, stub):
    await release_all_with_one_undescribed(stub_driver, stub)

    assert ([False] * 3, 0) == (attached(stub), stub.sessions)
    with pytest.raises(DriverError, match="all GPUs are released"):
        await stub_driver.scan()
    for uuid in (G0, G1, G2):
        stub_driver.take_back(uuid)
    assert [G0, G1, G2] == [gpu.uuid for gpu in (await stub_driver.scan()).gpus]


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

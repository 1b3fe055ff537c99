"""Events of the driver: whose they are, who cannot report, waits that fail, threads that hang."""

import asyncio
import threading

import pynvml
import pytest

from agent.errors import DriverError
from agent.gpu import driver as nvml_driver
from agent.model import DriverEvent, EventKind, GpuUuid, ProbeOutcome
from tests.fakes.nvml_stub import hear, listening, until

pytestmark = [pytest.mark.looptime(False), pytest.mark.usefixtures("forgetful")]

G0, G1, G2 = (GpuUuid(f"GPU-5708-{slot}") for slot in range(3))
WAIT = "nvmlEventSetWait_v2"


async def reports(stub, heard, slot, number):
    """The GPU reports until it is heard: what comes while there is no set is heard by nobody."""
    event, told = DriverEvent(EventKind.XID, GpuUuid(f"GPU-5708-{slot}"), number), []
    async with asyncio.timeout(30):
        while event not in told:
            stub.xid(slot, number)
            await asyncio.sleep(0.02)
            told += emptied(heard)


def emptied(heard):
    return [heard.get_nowait() for _ in range(heard.qsize())]


@pytest.fixture
async def heard(driver, stub):
    """What a listener hears once its stream is open, as events of the last GPU have shown."""
    await driver.scan()
    async with listening(driver) as heard:
        await reports(stub, heard, 2, 13)
        await asyncio.sleep(0.1)
        emptied(heard)
        yield heard


@pytest.mark.parametrize(
    ("slot", "gpu", "kind", "bit", "xid"),
    [
        (2, G2, EventKind.XID, 0x8, 94),
        (0, G0, EventKind.ECC_DOUBLE, 0x2, None),
        (1, G1, EventKind.CHANGED, 0x100, None),
    ],
)
async def test_an_event_of_any_wanted_kind_arrives_with_its_gpu(
    driver, stub, heard, slot, gpu, kind, bit, xid
):
    await driver.scan()
    assert 3 == stub.calls("nvmlDeviceRegisterEvents")
    stub.event(slot, bit, xid or 0)

    assert [DriverEvent(kind, gpu, xid)] == await hear(heard, 1)


@pytest.mark.parametrize(
    ("types", "call", "code", "words"),
    [
        (2, "", 0, "does not report XIDs"),
        (16, "", 0, "does not report XIDs"),
        (8, "nvmlDeviceGetSupportedEventTypes", 3, "no events: Not Supported"),
        (8, "nvmlDeviceRegisterEvents", 999, "Unknown Error"),
    ],
)
async def test_a_probe_says_that_a_gpu_is_unmonitored_and_why(
    driver, stub, types, call, code, words
):
    stub.set(0, event_types=types)
    if call:
        stub.fail(call, 0, code=code)
    async with listening(driver) as heard:
        await reports(stub, heard, 2, 13)
        probes = [await driver.probe(G0), await driver.probe(G1)]
        stub.succeed()
        await driver.scan()
        after = (await driver.probe(G0)).unmonitored

    assert words in probes[0].unmonitored
    assert [ProbeOutcome.PASSED] * 2 == [probe.outcome for probe in probes]
    # A registration that failed may succeed at the next scan; nobody listens any more at the end.
    assert code != 999 or after == ""
    assert ["", ""] == [probes[1].unmonitored, (await driver.probe(G0)).unmonitored]


@pytest.mark.parametrize("code", ["dies", 15, 999])
async def test_a_wait_that_fails_is_an_error_and_the_next_stream_has_another_set(
    driver, stub, heard, monkeypatch, code
):
    with monkeypatch.context() as broken:
        if code == "dies":
            broken.setattr(pynvml, WAIT, len)  # whatever it may stumble over
        else:
            stub.fail(WAIT, code=code)
        (error,) = await hear(heard, 1)
    stub.succeed()

    assert isinstance(error, DriverError)
    assert ("has died" if code == "dies" else "waiting for events failed") in str(error)
    async with listening(driver) as again:
        await reports(stub, again, 0, 31)
    assert stub.calls("nvmlEventSetCreate") >= 2


async def test_no_second_thread_is_sent_into_a_wait_that_does_not_come_back(
    driver, stub, monkeypatch
):
    monkeypatch.setattr(nvml_driver, "STALL", 0.1)
    monkeypatch.setattr(nvml_driver, "FAREWELL", 0.1)
    before = set(threading.enumerate())
    stub.hang(WAIT)
    with pytest.raises(DriverError):
        await anext(driver.events())
    with pytest.raises(DriverError, match="an earlier wait for events has not returned"):
        await anext(driver.events())

    waiting = {one for one in threading.enumerate() if one.name == "nvml-events"} - before
    assert 1 == len(waiting)
    stub.release()
    await until(lambda: not any(one.is_alive() for one in waiting))
    async with listening(driver) as heard:
        await reports(stub, heard, 2, 13)


@pytest.mark.parametrize("reason", ["", "Unknown Error"])
async def test_a_gpu_that_was_stuck_is_registered_as_soon_as_it_answers_or_says_the_new_reason(
    driver, stub, reason
):
    await driver.scan()
    stub.hang("nvmlDeviceGetHandleByUUID", 1)
    await driver.probe(G1)
    async with listening(driver) as heard:
        await reports(stub, heard, 2, 13)
        await asyncio.sleep(0.1)
        emptied(heard)
        assert "has not returned" in (await driver.probe(G1)).unmonitored
        if reason:
            stub.fail("nvmlDeviceRegisterEvents", 1, code=999)
        stub.release()
        assert [DriverEvent(EventKind.CHANGED)] == await hear(heard, 1)

        assert reason == (await driver.probe(G1)).unmonitored


async def test_without_a_thread_that_waits_for_events_the_stream_says_so(driver, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    await driver.scan()
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(DriverError, match="no thread can be started to wait for events"):
            await anext(driver.events())


async def test_who_listens_is_told_of_a_release_and_hears_what_is_taken_back(driver, stub, heard):
    await driver.release([G1])
    (*_, end) = emptied(heard) or [await heard.get()]
    assert isinstance(end, DriverError)
    assert 0 == stub.sets
    async with listening(driver) as again:
        await reports(stub, again, 2, 94)
        driver.take_back(G1)
        await driver.scan()
        await reports(stub, again, 1, 48)

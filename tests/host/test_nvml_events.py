"""Events through NVML: whose they are, who cannot report, storms, and threads that hang."""

import asyncio
import contextlib
import threading

import pynvml
import pytest

from agent.errors import DriverError
from agent.gpu import driver as nvml_driver
from agent.model import DriverEvent, EventKind, GpuUuid, ProbeOutcome
from tests.fakes.nvml_stub import hear, listening, until

pytestmark = [pytest.mark.looptime(False), pytest.mark.usefixtures("forgetful")]

G0, G1 = GpuUuid("GPU-5708-0"), GpuUuid("GPU-5708-1")


@contextlib.asynccontextmanager
async def open_stream(driver, stub):
    """What a listener hears once its stream is open, as events of the last GPU have shown."""
    async with listening(driver) as heard:
        while heard.empty():
            stub.xid(2, 13)
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)
        while not heard.empty():
            heard.get_nowait()
        yield heard


@pytest.mark.parametrize(
    ("types", "words"),
    [(2, "does not report XIDs"), (16, "does not report XIDs"), (None, "no events: Not Supported")],
)
async def test_a_probe_says_that_a_gpu_is_unmonitored_and_why(driver, stub, types, words):
    if types is None:
        stub.fail("nvmlDeviceGetSupportedEventTypes", 0, code=3)
    else:
        stub.set(0, event_types=types)
    async with open_stream(driver, stub):
        probes = [await driver.probe(G0), await driver.probe(G1)]
        await driver.scan()

    assert words in probes[0].unmonitored
    assert [ProbeOutcome.PASSED] * 2 == [probe.outcome for probe in probes]
    assert "" == probes[1].unmonitored
    assert "" == (await driver.probe(G0)).unmonitored  # nobody listens any more


async def test_a_gpu_whose_registration_failed_is_asked_again_by_the_next_scan(driver, stub):
    stub.fail("nvmlDeviceRegisterEvents", 0, code=999)
    await driver.scan()
    async with open_stream(driver, stub):
        unmonitored = (await driver.probe(G0)).unmonitored
        stub.succeed()
        await driver.scan()

        assert "Unknown Error" == unmonitored
        assert "" == (await driver.probe(G0)).unmonitored


async def test_a_thread_that_dies_is_an_error_and_no_silence(driver, stub, monkeypatch):
    async with open_stream(driver, stub) as heard:
        monkeypatch.setattr(pynvml, "nvmlEventSetWait_v2", len)  # whatever it may stumble over
        (error,) = await hear(heard, 1)

    assert isinstance(error, DriverError)
    assert "has died" in str(error)
    await until(lambda: not stub.sets)


async def test_no_second_thread_is_sent_into_a_wait_that_does_not_come_back(
    driver, stub, monkeypatch
):
    monkeypatch.setattr(nvml_driver, "STALL", 0.1)
    monkeypatch.setattr(nvml_driver, "FAREWELL", 0.1)
    before = set(threading.enumerate())

    async def listen() -> str:
        with pytest.raises(DriverError) as caught:
            await anext(driver.events())
        return str(caught.value)

    stub.hang("nvmlEventSetWait_v2")
    said = [await listen() for _ in range(2)]

    waiting = {one for one in threading.enumerate() if one.name == "nvml-events"} - before
    assert 1 == len(waiting)
    assert "an earlier wait for events has not returned" in said[1]
    stub.release()
    await until(lambda: not any(one.is_alive() for one in waiting))
    async with open_stream(driver, stub):
        pass


@pytest.mark.parametrize("code", [15, 999])
async def test_a_wait_that_fails_is_an_error_and_the_next_stream_has_another_set(
    driver, stub, code
):
    async with open_stream(driver, stub) as heard:
        stub.fail("nvmlEventSetWait_v2", code=code)
        (error,) = await hear(heard, 1)
        stub.succeed()
        told = error
        while isinstance(told, DriverError):
            stub.xid(0, 31)
            await asyncio.sleep(0.02)
            told = told if heard.empty() else heard.get_nowait()

    assert "waiting for events failed" in str(error)
    assert DriverEvent(EventKind.XID, G0, 31) == told
    assert stub.calls("nvmlEventSetCreate") >= 2


@pytest.mark.parametrize("reason", ["", "Unknown Error"])
async def test_a_gpu_that_was_stuck_is_registered_as_soon_as_it_answers_or_says_the_new_reason(
    driver, stub, reason
):
    await driver.scan()
    stub.hang("nvmlDeviceGetHandleByUUID", 1)
    await driver.probe(G1)
    async with open_stream(driver, stub) as heard:
        assert "has not returned" in (await driver.probe(G1)).unmonitored
        if reason:
            stub.fail("nvmlDeviceRegisterEvents", 1, code=999)
        stub.release()
        assert [DriverEvent(EventKind.CHANGED)] == await hear(heard, 1)

        assert reason == (await driver.probe(G1)).unmonitored


async def test_without_a_thread_that_waits_for_events_the_stream_says_so(driver, monkeypatch):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    await driver.scan()
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(DriverError, match="no thread can be started to wait for events"):
            await anext(driver.events())

"""Events through NVML: whose they are, who cannot report, storms, and threads that hang."""

import contextlib
import threading

import pytest

from agent.errors import DriverError
from agent.gpu import driver as nvml_driver
from agent.model import DriverEvent, EventKind, GpuUuid, ProbeOutcome
from tests.fakes.nvml import FakeGpu, until
from tests.fakes.nvml_events import hear, listening

pytestmark = pytest.mark.looptime(False)

G0, G1 = GpuUuid("GPU-0"), GpuUuid("GPU-1")


@contextlib.asynccontextmanager
async def open_stream(driver, library):
    """What a listener hears once its stream is open, as a first event shows."""
    async with listening(driver) as heard:
        library.xid(0, 13)
        await hear(heard, 1)
        yield heard


@pytest.mark.parametrize(("code", "uuid"), [(None, G1), (15, None)])
async def test_an_event_of_a_gpu_that_could_not_be_registered_is_asked_for_its_name(
    driver, library, code, uuid
):
    library.failures["nvmlDeviceRegisterEvents", 1] = 999
    async with open_stream(driver, library) as heard:
        if code:
            library.failures["nvmlDeviceGetUUID", 1] = code
        library.xid(1, 48)

        assert [DriverEvent(EventKind.XID, uuid, 48)] == await hear(heard, 1)


@pytest.mark.parametrize(
    ("types", "words"),
    [(2, "does not report XIDs"), (16, "does not report XIDs"), (None, "no events: Not Supported")],
)
async def test_a_probe_says_that_a_gpu_is_unmonitored_and_why(driver, library, types, words):
    if types is None:
        library.failures["nvmlDeviceGetSupportedEventTypes", 0] = 3
    else:
        library.gpus[0].event_types = types
    async with listening(driver) as heard:
        library.xid(1, 31)
        await hear(heard, 1)
        probes = [await driver.probe(G0), await driver.probe(G1)]
        await driver.scan()

    assert words in probes[0].unmonitored
    assert [ProbeOutcome.PASSED] * 2 == [probe.outcome for probe in probes]
    assert "" == probes[1].unmonitored
    assert "" == (await driver.probe(G0)).unmonitored  # nobody listens any more


async def test_a_gpu_whose_registration_failed_is_asked_again_by_the_next_scan(driver, library):
    library.failures["nvmlDeviceRegisterEvents", 0] = 999
    await driver.scan()
    async with listening(driver) as heard:
        library.xid(1, 31)
        await hear(heard, 1)
        unmonitored = (await driver.probe(G0)).unmonitored
        library.failures.clear()
        await driver.scan()

        assert "error 999" == unmonitored
        assert "" == (await driver.probe(G0)).unmonitored
    assert {0, 1} == library.registered.keys()


async def test_a_thread_that_dies_is_an_error_and_no_silence(driver, library):
    async with open_stream(driver, library) as heard:
        library.report(0, "no number")  # whatever a thread may stumble over
        (error,) = await hear(heard, 1)

    assert isinstance(error, DriverError)
    assert "has died" in str(error)
    await until(lambda: library.sets_freed == 1)


async def test_no_second_thread_is_sent_into_a_wait_that_does_not_come_back(
    driver, library, monkeypatch
):
    monkeypatch.setattr(nvml_driver, "STALL", 0.1)
    monkeypatch.setattr(nvml_driver, "FAREWELL", 0.1)
    before = set(threading.enumerate())

    async def listen() -> str:
        with pytest.raises(DriverError) as caught:
            await anext(driver.events())
        return str(caught.value)

    library.hanging.add(("nvmlEventSetWait_v2", None))
    said = [await listen() for _ in range(2)]

    waiting = {one for one in threading.enumerate() if one.name == "nvml-events"} - before
    assert 1 == len(waiting)
    assert "an earlier wait for events has not returned" in said[1]
    library.release()
    await until(lambda: not any(one.is_alive() for one in waiting))
    async with listening(driver) as heard:
        library.xid(0, 13)
        await hear(heard, 1)


@pytest.mark.parametrize("code", [15, 999])
async def test_a_wait_that_fails_is_an_error_and_the_next_stream_has_another_set(
    driver, library, code
):
    async with listening(driver) as heard:
        library.fail_wait(code)
        library.xid(0, 13)
        error, event = await hear(heard, 2)

    assert "waiting for events failed" in str(error)
    assert DriverEvent(EventKind.XID, G0, 13) == event
    assert 2 == library.calls["nvmlEventSetCreate"]


@pytest.mark.parametrize("order", [(1, 2), (0, 2), (0, 1), (2, 1, 0), (0, 2, 1)])
async def test_an_event_after_a_move_is_of_the_gpu_whose_handle_it_is_now(driver, library, order):
    library.gpus.append(FakeGpu("GPU-2"))
    async with open_stream(driver, library) as heard:
        await driver.scan()
        library.gpus = [library.gpus[index] for index in order]
        await driver.scan()
        for index in range(len(order)):
            library.failures["*", index] = 15  # it tells its name no more
            library.xid(index, 79)
        told = [event.uuid for event in await hear(heard, len(order))]

    assert [gpu.uuid for gpu in library.gpus] == told


@pytest.mark.parametrize("reason", ["", "error 999"])
async def test_a_gpu_that_was_stuck_is_registered_as_soon_as_it_answers_or_says_the_new_reason(
    driver, library, reason
):
    await driver.scan()
    library.hanging.add(("nvmlDeviceGetHandleByUUID", 1))
    await driver.probe(G1)
    async with open_stream(driver, library) as heard:
        assert {0} == library.registered.keys()
        assert "has not returned" in (await driver.probe(G1)).unmonitored
        if reason:
            library.failures["nvmlDeviceRegisterEvents", 1] = 999
        library.release()
        assert [DriverEvent(EventKind.CHANGED)] == await hear(heard, 1)

        assert reason == (await driver.probe(G1)).unmonitored
        assert bool(reason) == (1 not in library.registered)

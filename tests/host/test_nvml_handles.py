"""Whose a handle is: after GPUs went, moved or were slow, no event is put down to another GPU."""

import threading

import pytest

from agent.errors import DriverError
from agent.gpu import events as nvml_events
from agent.gpu.handles import Handles
from agent.model import DriverEvent, EventKind, GpuUuid
from tests.fakes.nvml import FakeGpu, FakeNvml, until
from tests.fakes.nvml_events import hear, listening

pytestmark = pytest.mark.looptime(False)

G0, G1 = GpuUuid("GPU-0"), GpuUuid("GPU-1")


@pytest.mark.parametrize("gone", range(3))
async def test_an_event_after_a_removal_is_of_the_gpu_whose_handle_it_is_now(driver, library, gone):
    library.gpus.append(FakeGpu("GPU-2"))
    async with listening(driver) as heard:
        library.xid(0, 13)
        await hear(heard, 1)
        await driver.scan()
        library.gpus.pop(gone)
        await driver.scan()
        for index in range(2):
            library.xid(index, 79)
        told = [event.uuid for event in await hear(heard, 2)]

    assert [gpu.uuid for gpu in library.gpus] == told


async def test_an_event_of_a_handle_that_is_in_doubt_names_no_gpu(driver, library):
    library.gpus.append(FakeGpu("GPU-2"))
    async with listening(driver) as heard:
        library.xid(0, 13)
        await hear(heard, 1)
        await driver.scan()
        library.gpus.pop(0)
        library.failures["*", 1] = 15
        await driver.scan()
        library.xid(1, 79)

        assert [DriverEvent(EventKind.XID, None, 79)] == await hear(heard, 1)


async def test_an_answer_of_before_the_gpus_moved_names_no_handle():
    library = FakeNvml([FakeGpu("GPU-0")])
    stream = nvml_events.EventStream(library, Handles(library))
    stream.create()
    before = stream.register(0)
    stream.forget()
    stream.settle(before)
    assert G0 not in stream.settled
    stream.settle(stream.register(0))

    assert G0 in stream.settled
    stream.start()
    await stream.stop()


async def test_a_gpu_that_is_registered_late_is_known_by_its_address_all_the_same(driver, library):
    await driver.scan()
    library.hanging.add(("nvmlDeviceRegisterEvents", 1))
    async with listening(driver) as heard:
        library.xid(0, 13)
        await hear(heard, 1)
        assert "" != (await driver.probe(G1)).unmonitored
        library.release()
        await until(lambda: 1 in library.registered)
        assert "" == (await driver.probe(G1)).unmonitored
        library.failures["*", 1] = 15
        library.xid(1, 79)

        assert [DriverEvent(EventKind.XID, G1, 79)] == await hear(heard, 1)


async def test_a_gpu_that_was_stuck_is_registered_as_soon_as_it_answers(driver, library):
    await driver.scan()
    library.hanging.add(("nvmlDeviceGetHandleByUUID", 1))
    await driver.probe(G1)
    async with listening(driver) as heard:
        library.xid(0, 13)
        await hear(heard, 1)
        assert {0} == library.registered.keys()
        assert "has not returned" in (await driver.probe(G1)).unmonitored
        library.release()
        await until(lambda: 1 in library.registered)

        assert "" == (await driver.probe(G1)).unmonitored


async def test_a_gpu_that_answers_again_but_cannot_be_registered_says_the_new_reason(
    driver, library
):
    await driver.scan()
    library.hanging.add(("nvmlDeviceGetHandleByUUID", 1))
    await driver.probe(G1)
    async with listening(driver) as heard:
        library.xid(0, 13)
        await hear(heard, 1)
        library.failures["nvmlDeviceRegisterEvents", 1] = 999
        calls = library.calls["nvmlDeviceRegisterEvents"]
        library.release()
        await until(lambda: library.calls["nvmlDeviceRegisterEvents"] > calls)

        assert "error 999" == (await driver.probe(G1)).unmonitored


async def test_streams_begin_again_once_the_machine_gives_threads(driver, library, monkeypatch):
    monkeypatch.setattr(nvml_events, "FAREWELL", 0.1)
    await driver.scan()
    with monkeypatch.context() as full:

        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        full.setattr(threading.Thread, "start", refuse)
        for _ in range(3):
            with pytest.raises(DriverError, match=r"no thread|have not returned"):
                await anext(driver.events())
    with pytest.raises(DriverError, match="have not returned"):
        await anext(driver.events())  # which sends those of before home
    await until(lambda: library.sets_freed == 2)

    async with listening(driver) as heard:
        library.xid(0, 13)

        assert [DriverEvent(EventKind.XID, G0, 13)] == await hear(heard, 1)

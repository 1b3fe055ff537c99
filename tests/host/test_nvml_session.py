"""The session with the driver: what is missing is said, what broke is begun anew, close ends it."""

import asyncio
import contextlib

import pytest

from agent.errors import DriverError, DriverMissing
from agent.gpu.driver import NvmlDriver
from agent.model import GpuUuid, ProbeOutcome
from tests.fakes.nvml_stub import ANY, until

pytestmark = [pytest.mark.looptime(False), pytest.mark.usefixtures("forgetful")]

UUIDS = [GpuUuid(f"GPU-5708-{n}") for n in range(3)]
ENDED = 1


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (12, "libnvidia-ml.so.1 is not found: install the NVIDIA driver"),
        (9, "the NVIDIA kernel module is not loaded"),
        (18, "differ in version"),
        (4, "/dev/nvidiactl cannot be opened"),
    ],
)
async def test_a_driver_that_is_not_there_says_what_to_do(driver, stub, code, words):
    stub.fail("nvmlInitWithFlags", code=code)
    with pytest.raises(DriverMissing, match=words):
        await driver.scan()

    stub.succeed()
    assert 3 == len((await driver.scan()).gpus)


async def test_a_session_that_the_driver_ended_is_begun_anew(driver, stub):
    await driver.scan()
    stub.fail("nvmlDeviceGetName", code=1)
    with pytest.raises(DriverError, match="session"):
        await driver.scan()
    stub.succeed()

    assert 3 == len((await driver.scan()).gpus)
    assert (2, 1) == (stub.calls("nvmlInitWithFlags"), stub.sessions)


async def test_an_error_of_the_whole_driver_names_it(driver, stub):
    stub.fail("nvmlDeviceGetCount_v2", code=999)
    with pytest.raises(DriverError, match="answers with an error: Unknown Error"):
        await driver.scan()


async def test_close_leaves_a_driver_that_hangs_in_each_step(
    stub, stub_path, tmp_path, monkeypatch
):
    monkeypatch.setattr("agent.gpu.driver.CLOSE_DEADLINE", 0.2)
    driver = NvmlDriver(path=stub_path, sys_root=tmp_path, deadline=30)
    await driver.scan()
    stub.hang("nvmlDeviceGetCount_v2")
    stub.hang("nvmlShutdown")
    async with asyncio.TaskGroup() as tasks:
        scan = tasks.create_task(driver.scan())
        await until(lambda: stub.inside == 1)
        async with asyncio.timeout(5):
            await driver.close()
        stub.release()
        scan.cancel()

    assert 0 == stub.calls("nvmlShutdown")


@contextlib.asynccontextmanager
async def with_a_call_inside(stub, stub_path, tmp_path):
    """A driver of much patience whose session has ended while a call about GPU 0 is inside."""
    driver = NvmlDriver(path=stub_path, sys_root=tmp_path, deadline=30)
    await driver.scan()
    stub.hang(ANY, 0)
    async with asyncio.TaskGroup() as tasks:
        inside = tasks.create_task(driver.probe(UUIDS[0]))
        await until(lambda: stub.inside == 1)
        stub.fail("nvmlDeviceGetCount_v2", code=ENDED)
        with pytest.raises(DriverError, match="session"):
            await driver.scan()
        stub.succeed()
        yield driver, tasks
        stub.release()
    assert ProbeOutcome.PASSED is inside.result().outcome
    await driver.close()
    assert (0, 0) == (stub.undefined, stub.sessions)


async def test_no_session_is_ended_or_begun_around_a_call_that_is_inside(stub, stub_path, tmp_path):
    async with with_a_call_inside(stub, stub_path, tmp_path) as (driver, tasks):
        scan = tasks.create_task(driver.scan())
        await asyncio.wait([scan], timeout=0.3)
        assert (0, 1) == (stub.calls("nvmlShutdown"), stub.calls("nvmlInitWithFlags"))
        stub.release()

        assert 3 == len((await scan).gpus)
        assert (1, 2) == (stub.sessions, stub.calls("nvmlInitWithFlags"))


async def test_a_session_around_a_stuck_call_stays_open_until_that_is_back(driver, stub):
    await driver.scan()
    stub.hang(ANY, 0)
    assert ProbeOutcome.SILENT is (await driver.probe(UUIDS[0])).outcome
    stub.fail("nvmlDeviceGetCount_v2", code=ENDED)
    with pytest.raises(DriverError, match="session"):
        await driver.scan()
    stub.succeed()
    assert 2 == len((await driver.scan()).gpus)
    assert (0, 2) == (stub.calls("nvmlShutdown"), stub.sessions)

    stub.release()
    while (await driver.probe(UUIDS[0])).outcome is ProbeOutcome.SILENT:  # noqa: ASYNC110 -- nothing tells when it is back
        await asyncio.sleep(0.02)
    await driver.close()
    assert 0 == stub.sessions


async def test_a_driver_that_begins_slowly_is_open_although_nobody_waits_so_long(driver, stub):
    stub.hang("nvmlInitWithFlags")
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await driver.scan()
    assert 1 == stub.calls("nvmlInitWithFlags")
    stub.release()

    await until(lambda: stub.sessions == 1)
    assert 3 == len((await driver.scan()).gpus)
    assert (1, 0) == (stub.calls("nvmlInitWithFlags"), stub.calls("nvmlShutdown"))


async def test_a_session_that_the_driver_does_not_end_is_told_to_who_releases_a_gpu(driver, stub):
    await driver.scan()
    stub.fail("nvmlShutdown", code=999)
    with pytest.raises(DriverError, match="does not end the session, which holds all GPUs"):
        await driver.release([UUIDS[0]])
    stub.succeed()

    assert ProbeOutcome.PASSED is (await driver.probe(UUIDS[1])).outcome
    assert (2, 1) == (stub.calls("nvmlInitWithFlags"), stub.sessions)

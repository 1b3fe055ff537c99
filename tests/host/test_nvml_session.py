"""The session with the driver: what is missing is said, what broke is begun anew, close ends it."""

import asyncio
import contextlib

import pytest

from agent.errors import DriverError, DriverMissing
from agent.gpu.driver import NvmlDriver
from agent.model import GpuUuid, ProbeOutcome
from tests.fakes.nvml import FakeGpu, FakeNvml, until

pytestmark = pytest.mark.looptime(False)

UUIDS = [GpuUuid(f"GPU-{n}") for n in range(3)]
ENDED = 1


@pytest.fixture
def library() -> FakeNvml:
    return FakeNvml([FakeGpu(f"GPU-{n}", minor=n) for n in range(3)])


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (12, "libnvidia-ml.so.1 is not found: install the NVIDIA driver"),
        (9, "the NVIDIA kernel module is not loaded"),
        (18, "differ in version"),
        (4, "/dev/nvidiactl cannot be opened"),
    ],
)
async def test_a_driver_that_is_not_there_says_what_to_do(driver, library, code, words):
    library.failures["nvmlInit", None] = code
    with pytest.raises(DriverMissing, match=words):
        await driver.scan()

    library.failures.clear()
    assert 3 == len((await driver.scan()).gpus)


async def test_a_session_that_the_driver_ended_is_begun_anew(driver, library):
    await driver.scan()
    library.failures["nvmlDeviceGetName", None] = 1
    with pytest.raises(DriverError, match="session"):
        await driver.scan()
    library.failures.clear()

    assert 3 == len((await driver.scan()).gpus)
    assert (2, 1) == (library.calls["nvmlInit"], library.open)


async def test_an_error_of_the_whole_driver_names_it(driver, library):
    library.failures["nvmlDeviceGetCount", None] = 999
    with pytest.raises(DriverError, match="answers with an error: error 999"):
        await driver.scan()


async def test_close_leaves_a_driver_that_hangs_in_each_step(library, tmp_path, monkeypatch):
    monkeypatch.setattr("agent.gpu.driver.CLOSE_DEADLINE", 0.2)
    driver = NvmlDriver(library, sys_root=tmp_path, deadline=30)
    await driver.scan()
    library.hanging |= {("nvmlDeviceGetCount", None), ("nvmlShutdown", None)}
    async with asyncio.TaskGroup() as tasks:
        scan = tasks.create_task(driver.scan())
        await until(lambda: library.inside == 1)
        async with asyncio.timeout(5):
            await driver.close()
        library.release()
        scan.cancel()

    assert 0 == library.calls["nvmlShutdown"]


@contextlib.asynccontextmanager
async def with_a_call_inside(library, tmp_path):
    """A driver of much patience whose session has ended while a call about GPU 0 is inside."""
    driver = NvmlDriver(library, sys_root=tmp_path, deadline=30)
    await driver.scan()
    library.hanging.add(("*", 0))
    async with asyncio.TaskGroup() as tasks:
        inside = tasks.create_task(driver.probe(UUIDS[0]))
        await until(lambda: library.inside == 1)
        library.failures["nvmlDeviceGetCount", None] = ENDED
        with pytest.raises(DriverError, match="session"):
            await driver.scan()
        library.failures.clear()
        yield driver, tasks
        library.release()
    assert ProbeOutcome.PASSED is inside.result().outcome
    await driver.close()
    assert (0, 0) == (library.undefined, library.open)


async def test_no_session_is_ended_or_begun_around_a_call_that_is_inside(library, tmp_path):
    async with with_a_call_inside(library, tmp_path) as (driver, tasks):
        scan = tasks.create_task(driver.scan())
        await asyncio.wait([scan], timeout=0.3)
        assert (0, 1) == (library.calls["nvmlShutdown"], library.calls["nvmlInit"])
        library.release()

        assert 3 == len((await scan).gpus)
        assert (1, 2) == (library.calls["nvmlShutdown"], library.calls["nvmlInit"])


async def test_a_session_around_a_stuck_call_stays_open_until_that_is_back(driver, library):
    await driver.scan()
    library.hanging.add(("*", 0))
    assert ProbeOutcome.SILENT is (await driver.probe(UUIDS[0])).outcome
    library.failures["nvmlDeviceGetCount", None] = ENDED
    with pytest.raises(DriverError, match="session"):
        await driver.scan()
    library.failures.clear()
    assert 2 == len((await driver.scan()).gpus)
    assert (0, 2) == (library.calls["nvmlShutdown"], library.open)

    library.release()
    await until(lambda: library.inside == 0)
    await driver.close()
    assert (2, 0) == (library.calls["nvmlShutdown"], library.open)


async def test_a_driver_that_begins_slowly_is_open_although_nobody_waits_so_long(driver, library):
    library.hanging.add(("nvmlInit", None))
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await driver.scan()
    assert 1 == library.calls["nvmlInit"]
    library.release()

    await until(lambda: library.open == 1)
    assert 3 == len((await driver.scan()).gpus)
    assert (1, 0) == (library.calls["nvmlInit"], library.calls["nvmlShutdown"])


async def test_a_session_that_the_driver_does_not_end_is_told_to_who_releases_a_gpu(
    driver, library
):
    await driver.scan()
    library.failures["nvmlShutdown", None] = 999
    with pytest.raises(DriverError, match="does not end the session, which holds all GPUs"):
        await driver.release([UUIDS[0]])
    library.failures.clear()

    assert ProbeOutcome.PASSED is (await driver.probe(UUIDS[1])).outcome
    assert (2, 1) == (library.calls["nvmlInit"], library.open)

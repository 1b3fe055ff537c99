"""The session with the driver: what is missing is said, what broke is begun anew, close ends it."""

import pytest

from agent.core.errors import DriverError, DriverMissing
from agent.host.nvml.driver import NvmlDriver
from tests.fakes.nvml import FakeGpu, FakeNvml

pytestmark = pytest.mark.looptime(False)


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


async def test_a_driver_that_hangs_as_a_whole_is_no_answer_in_time(driver, library):
    await driver.scan()
    library.hanging.add(("nvmlDeviceGetCount", None))
    with pytest.raises(DriverError, match="does not answer"):
        await driver.scan()


async def test_close_ends_the_session_once_and_for_all(driver, library):
    await driver.scan()
    await driver.close()
    await driver.close()

    assert (0, 1) == (library.open, library.calls["nvmlShutdown"])
    with pytest.raises(DriverError, match="closed"):
        await driver.scan()


async def test_close_leaves_the_library_alone_while_a_thread_is_in_it(driver, library):
    await driver.scan()
    library.hanging.add(("*", 0))
    await driver.scan()
    await driver.close()

    assert 0 == library.calls["nvmlShutdown"]


async def test_a_library_file_that_cannot_be_loaded_is_named(library, tmp_path):
    driver = NvmlDriver(library, path=tmp_path / "libnone.so")
    with pytest.raises(DriverMissing, match=r"libnone\.so cannot be loaded"):
        await driver.scan()
    await driver.close()

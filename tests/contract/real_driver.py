"""The NVIDIA driver of this machine, for tests that can use one.

As a program it says in one line why there is none, and fails.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agent.errors import DriverError
from agent.gpu.driver import NvmlDriver
from agent.model import Scan
from tests.fakes import nvml_stub


@asynccontextmanager
async def open_real_driver() -> AsyncIterator[tuple[NvmlDriver, Scan]]:
    """The driver and what it has; skips the test where there is none, or no GPU."""
    driver = NvmlDriver()
    try:
        try:
            scan = await driver.scan()
        except DriverError as error:
            pytest.skip(f"no NVIDIA GPU is here: {error}")
        if not scan.gpus:
            pytest.skip("no NVIDIA GPU is here: the driver has none")
        yield driver, scan
    finally:
        await driver.close()
        nvml_stub.forget()


async def _look() -> str:
    """Why the tests would be skipped; empty: they would not."""
    try:
        async with open_real_driver():
            return ""
    except pytest.skip.Exception as reason:
        return str(reason)


if __name__ == "__main__":
    raise SystemExit(asyncio.run(_look()) or 0)

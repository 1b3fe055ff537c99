"""The stub of the CUDA driver behaves as the driver does where HAMi-core relies on it."""

import os
from pathlib import Path

import pytest

from tests.host.core_space import MIB, CoreContainer, open_container
from tests.host.hook_space import HERE

OUT_OF_MEMORY = 2
MEMORY = 16 * 1024
"""MiB of each GPU."""

pytestmark = HERE


@pytest.fixture
async def container(tmp_path: Path, built_cuda: Path):
    async with open_container(tmp_path, built_cuda, None) as opened:
        yield opened


async def test_a_process_is_known_by_its_pid_on_the_host(container: CoreContainer):
    process = await container.start()

    assert process.pid != process.host_pid
    os.kill(process.host_pid, 0)
    assert 0 == await process.do("launch", 1)
    assert 1 == container.cuda.launches(process.host_pid)


async def test_gpus_hold_what_is_allocated_and_no_more(container: CoreContainer):
    one, other = await container.start(), await container.start()
    context = container.cuda.context

    assert 0 == await one.do("allocate", 10_000)
    assert OUT_OF_MEMORY == await other.do("allocate", MEMORY - 10_000)
    assert 2 * context + 10_000 * MIB == container.cuda.used(0)
    assert 0 == container.cuda.used(1)
    assert 0 == await one.do("free")
    assert 2 * context == container.cuda.used(0)
    assert [0, 16384 * MIB - 2 * context, 16384 * MIB] == await other.told("tell")


async def test_what_a_killed_process_held_is_free(container: CoreContainer):
    killed = await container.start()
    await killed.do("ordered", 10_000)

    await killed.kill()

    assert 0 == container.cuda.used(0)

"""Containers in which HAMi-core's own library runs: a PID namespace each, and real processes in it.

The library is not ours and is not built here. HAMI_CORE_LIBRARY names a libvgpu.so that was built
from HAMi-core's source.
"""

import asyncio
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from agent.hami.region import NoRegion, Region, RegionChange, RegionState, read_region
from agent.usage import ContainerProcesses, HostRegions
from tests.fakes import cuda_process
from tests.fakes.cuda_stub import CudaStub
from tests.fakes.offload import Inline
from tests.fakes.regions import RegionReading
from tests.host.hook_space import can_mount
from tests.peers.lab.part import until

LIBRARY: Final = os.environ.get("HAMI_CORE_LIBRARY", "")  # noqa: TID251 -- said by who runs the tests
BESIDE_LIBRARY: Final = [
    pytest.mark.process,
    pytest.mark.timeout(60),
    pytest.mark.looptime(False),
    pytest.mark.skipif(not LIBRARY, reason="HAMI_CORE_LIBRARY names no libvgpu.so of HAMi-core"),
    pytest.mark.skipif(os.geteuid() != 0 or not can_mount(), reason="needs root and mounts"),
]
"""Marks of the tests that use the library."""
NAME: Final = "6f1c1f0e-8f5a-4a52-9d2e-6b8b8a1d0001_main"
MOUNTED: Final = "mounted"
"""Where a container has its directory."""
MIB: Final = 1 << 20
DEADLINE: Final = 20.0
"""Seconds that any answer may take on a busy machine."""
HELD: Final = 1.5
"""Seconds without an answer after which a call counts as held back: the library polls by 1 s."""


class CudaProcess:
    """One program in a container. `pid`: there; `host_pid`: on the host."""

    def __init__(self, running: asyncio.subprocess.Process) -> None:
        self.pid = self.host_pid = 0
        self._running = running

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._running.returncode is None

    async def do(self, verb: str, *numbers: int) -> int:
        """Do it, as tests/fakes/cuda_process.py can, and return CUDA's code."""
        return (await self.told(verb, *numbers))[0]

    async def told(self, verb: str, *numbers: int) -> list[int]:
        """Do it and return CUDA's code with what it told."""
        self.begin(verb, *numbers)
        return await self.end()

    def begin(self, verb: str, *numbers: int) -> None:
        """Begin what may not end."""
        assert self._running.stdin is not None
        self._running.stdin.write(" ".join([verb, *map(str, numbers)]).encode() + b"\n")

    async def end(self, seconds: float = DEADLINE) -> list[int]:
        """Return the result of what was begun. Raises TimeoutError."""
        assert self._running.stdout is not None
        async with asyncio.timeout(seconds):
            return [int(word) for word in (await self._running.stdout.readline()).split()]

    async def is_held(self) -> bool:
        """Whether what was begun does not end."""
        try:
            await self.end(HELD)
        except TimeoutError:
            return True
        return False

    async def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.host_pid, signal.SIGKILL)
        await self.over()

    async def leave(self) -> None:
        """Let it end in order."""
        assert self._running.stdin is not None
        self._running.stdin.close()
        await self.over()

    async def over(self) -> None:
        """Wait until it has ended."""
        async with asyncio.timeout(DEADLINE):
            await self._running.communicate()


class CoreContainer:
    """A container of HAMi's, with its own PIDs, and the region that its processes share."""

    def __init__(
        self, folder: Path, library: Path | None, cuda: CudaStub, init: int, host_proc: int
    ) -> None:
        hook, cgroups = folder / "hook", folder / "cgroup"
        self.file = hook / "vgpu" / "containers" / NAME / "usage.cache"
        self._cgroup = cgroups / "pids" / "kubepods" / f"pod{NAME.partition('_')[0]}" / "main"
        self._cgroup.mkdir(parents=True)
        self._mounted = folder / MOUNTED / "usage.cache"
        self.cuda = cuda
        self._library = library
        self._regions = HostRegions(hook, Inline())
        self._processes = ContainerProcesses(cgroups)
        self._inside = ("nsenter", "--target", str(init), "--pid", "--mount", "--")
        self._host_proc = host_proc
        self._started: list[CudaProcess] = []

    def environment(self, **more: str) -> dict[str, str]:
        """What HAMi's plugin gives a container, with two limits."""
        return {
            "LD_LIBRARY_PATH": str(self.cuda.folder),
            "CUDA_REDIRECT": str(self._library),
            "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(self._mounted),
            "CUDA_DEVICE_MEMORY_LIMIT_0": "1000m",
            "CUDA_DEVICE_MEMORY_LIMIT_1": "2000m",
            "LIBCUDA_LOG_LEVEL": "0",
            "STUB_PROC": f"/proc/self/fd/{self._host_proc}",
            **more,
        }

    async def start(self, gpu: int | None = 0, **more: str) -> CudaProcess:
        """Start a program; with `gpu`, it has a context there. `more`: of its environment."""
        environ = self.environment(**more)
        if self._library is not None:
            environ["LD_PRELOAD"] = str(self._library)
        words = [f"{name}={text}" for name, text in environ.items()]
        running = await asyncio.create_subprocess_exec(
            *self._inside,
            "env",
            *words,
            sys.executable,
            "-IS",
            str(Path(cuda_process.__file__)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self._host_proc,),
        )
        process = CudaProcess(running)
        self._started.append(process)
        process.pid, process.host_pid = await process.end()
        if gpu is not None:
            assert await process.do("start", gpu) == 0
        return process

    async def read(self) -> Region:
        """What the agent reads."""
        reading = await self.reading()
        assert reading.region is not None, reading
        return reading.region

    async def reading(self) -> RegionReading:
        """What the agent reads before it sums it, with the processes that are alive."""
        live = [process.host_pid for process in self._started if process.is_alive]
        (self._cgroup / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in live))
        try:
            with self.file.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                region = read_region(size, functools.partial(os.pread, file.fileno()))
        except NoRegion as error:
            return RegionReading(error.sums.state, reason=error.sums.reason)
        except FileNotFoundError:
            return RegionReading(RegionState.ABSENT)
        for _ in range(2):
            self._processes.begin([NAME])
            self._processes.alive(NAME, frozenset({1}))
        pids = frozenset(process.pid for process in region.processes)
        alive = self._processes.alive(NAME, pids)
        return RegionReading(RegionState.READABLE, region, alive=alive)

    async def end(self) -> None:
        """Wait for all that was started, when the namespace is over."""
        for process in self._started:
            await process.over()

    async def write(self, change: RegionChange) -> None:
        """Write as the agent does."""
        assert await self._regions.write({NAME: change}) == {}


@contextlib.asynccontextmanager
async def open_container(
    folder: Path, built: Path, library: Path | None
) -> AsyncIterator[CoreContainer]:
    """A container without a region yet; with the block all its processes end.

    `built`: the stub of the driver. Without a library, its programs use the driver as it is.
    """
    hook = folder / "hook"
    (hook / "vgpu" / "containers" / NAME).mkdir(parents=True)
    cuda = CudaStub(shutil.copytree(built, folder / "cuda", symlinks=True))
    # As the runtime does, it mounts the container's directory.
    (folder / MOUNTED).mkdir()
    mounted = (
        f"mount --bind {hook}/vgpu/containers/{NAME} {folder}/{MOUNTED} && exec sleep infinity"
    )
    words = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", mounted)
    host_proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    outer = await asyncio.create_subprocess_exec(*words)
    try:
        init = await _child_of(outer.pid)
        container = CoreContainer(folder, library, cuda, init, host_proc)
        try:
            yield container
        finally:
            outer.kill()
            await container.end()
    finally:
        await outer.wait()
        os.close(host_proc)


async def _child_of(pid: int) -> int:
    """The first process of the namespace, when it is what it is to be. Raises TimeoutError."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    await until(lambda: _is_there(children), DEADLINE, lambda: "the namespace has no process")
    return _first(children)


def _first(children: Path) -> int:
    return int(children.read_text().split()[0])


def _is_there(children: Path) -> bool:
    found = children.read_text().split()
    return bool(found) and "sleep" in Path(f"/proc/{found[0]}/comm").read_text()

"""The C stub of the management library: built where there is a compiler, and told what to be.

Its state is shared by all processes that load the same file, so a whole agent can be driven too.
"""

import asyncio
import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pynvml
import pytest

from agent.errors import DriverError
from agent.model import DriverEvent
from agent.ports import Driver

XID: Final = 0x8
ANY: Final = "any"
"""Every call."""


def build(folder: Path, *flags: str) -> Path:
    """The library file, built in `folder`; skips the test where there is no C compiler.

    `-DOLD_DRIVER` leaves out what old drivers lack.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc) to build the stub library with")
    path = folder / "libnvidia-ml-stub.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run(  # noqa: S603 -- the compiler that PATH names, on our own file
        [
            compiler,
            "-shared",
            "-fPIC",
            "-O1",
            "-Wall",
            "-Werror",
            *flags,
            "-o",
            path,
            source,
            "-ldl",
        ],
        check=True,
        timeout=60,
    )
    return path


def forget() -> None:
    """pynvml keeps the library that it has loaded: what comes next starts without."""
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()


class NvmlStub:
    """The GPUs in the stub at `path`. A GPU is named by its slot; None: the driver as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._calls = self._names(self._library.stub_call)
        self._fields = self._names(self._library.stub_field)

    @property
    def sessions(self) -> int:
        """Sessions that are open."""
        return int(self._library.stub_sessions())

    @property
    def sets(self) -> int:
        """Event sets that are not freed."""
        return int(self._library.stub_sets())

    @property
    def inside(self) -> int:
        """Threads that hang in a call."""
        return int(self._library.stub_inside())

    @property
    def undefined(self) -> int:
        """Calls that met a shutdown, for which the library promises nothing."""
        return int(self._library.stub_undefined())

    def calls(self, call: str) -> int:
        """How often `call` was made."""
        return int(self._library.stub_calls(self._calls[call]))

    def fail(self, call: str, slot: int | None = None, *, code: int) -> None:
        """`call` returns `code` from now on; 0 ends that."""
        self._library.stub_fail(self._calls[call], _slot(slot), code)

    def hang(self, call: str = ANY, slot: int | None = None, *, hung: bool = True) -> None:
        """`call` does not come back until it is told to."""
        self._library.stub_hang(self._calls[call], _slot(slot), int(hung))

    def release(self) -> None:
        """Every call that hangs comes back."""
        for call, slot in itertools.product(self._calls, (None, 0, 1, 2)):
            self.hang(call, slot, hung=False)

    def succeed(self) -> None:
        """No call fails any more."""
        for call, slot in itertools.product(self._calls, (None, 0, 1, 2)):
            self.fail(call, slot, code=0)

    def attached(self, slot: int) -> bool:
        """A session holds the GPU: it can neither be reset nor be repartitioned."""
        return bool(self._library.stub_attached(slot))

    def lose(self, slot: int, *, lost: bool = True) -> None:
        """The GPU has fallen off the bus, or is back, reset: its registrations are gone."""
        self.fail(ANY, slot, code=15 if lost else 0)

    def refuse(self, slot: int) -> None:
        """The GPU must be reset before it answers anything else."""
        self.fail(ANY, slot, code=16)

    def set(self, slot: int, **values: int) -> None:
        """Fields of a GPU; -1: it does not support the question."""
        for name, value in values.items():
            self._library.stub_set(slot, self._fields[name], ctypes.c_longlong(value))

    def name(self, slot: int, name: bytes) -> None:
        """What the GPU is called."""
        self._library.stub_name(slot, name)

    def spoil(self, code: int) -> None:
        """Every call about a GPU fails until all sessions have ended and another begins."""
        self._library.stub_spoil(code)

    def end(self) -> None:
        """The driver is loaded anew: no session is left."""
        self._library.stub_end()

    def version(self, driver: str) -> None:
        self._library.stub_version(driver.encode())

    def order(self, slots: Sequence[int]) -> None:
        """The GPUs that are there, by index: what is missing was removed, what is new was added."""
        self._library.stub_order(len(slots), (ctypes.c_int * len(slots))(*slots))

    def event(self, slot: int, kind: int, value: int = 0) -> None:
        """The GPU reports; heard by the sets where it is registered for that kind."""
        self._library.stub_event(slot, ctypes.c_ulonglong(kind), ctypes.c_ulonglong(value))

    def xid(self, slot: int, number: int) -> None:
        """The GPU reports an XID."""
        self.event(slot, XID, number)

    def _names(self, ask: Callable[[int], bytes | None]) -> dict[str, int]:
        ask.restype = ctypes.c_char_p  # type: ignore[attr-defined]
        known = itertools.takewhile(lambda name: name is not None, map(ask, itertools.count()))
        return {name.decode(): number for number, name in enumerate(known) if name is not None}


def _slot(slot: int | None) -> int:
    return -1 if slot is None else slot


async def until(holds: Callable[[], bool], within: float = 10.0) -> None:
    """Wait until it holds, on real time: nothing tells when a thread has moved."""
    loop = asyncio.get_running_loop()
    end = loop.time() + within
    while not holds():
        assert loop.time() < end
        await asyncio.sleep(0.005)


@asynccontextmanager
async def listening(driver: Driver):
    """A queue of what the driver reports; an error ends it, but a set that failed is made anew."""
    heard: asyncio.Queue[DriverEvent | DriverError] = asyncio.Queue()

    async def listen() -> None:
        is_over = False
        while not is_over:
            try:
                async for event in driver.events():
                    heard.put_nowait(event)
            except DriverError as error:
                heard.put_nowait(error)
                is_over = "waiting for events failed" not in str(error)

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(listen())
        yield heard
        task.cancel()


async def hear(heard, count: int) -> list:
    async with asyncio.timeout(30):
        return [await heard.get() for _ in range(count)]

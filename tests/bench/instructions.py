"""Instructions that a start takes: neither neighbours nor the machine's clock change them.

Counted by the processor where it lets us, else by valgrind, which runs the agent on a processor of
its own making, some fifty times slower.
"""

import asyncio
import ctypes
import os
import platform
import re
import shutil
from pathlib import Path

from tests.bench.beside import RealBed
from tests.peers.lab.proc import status_of
from tests.peers.lab.waiting import until

MILLION = 1e6
HARDWARE_INSTRUCTIONS = (0, 1)
"""Type and number of an event of perf_event_open(2)."""
_SYSCALLS = {"x86_64": 298, "aarch64": 241}
_INHERIT, _NO_KERNEL, _NO_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6
_DEADLINE = 60.0


class Uncounted(Exception):  # noqa: N818 -- says what happened
    """Nothing on this machine counts instructions."""


class PerfAttributes(ctypes.Structure):
    """The first form of struct perf_event_attr, of 64 bytes."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("config", ctypes.c_uint64),
        ("sampling", ctypes.c_uint64 * 3),
        ("flags", ctypes.c_uint64),
        ("wake_ups", ctypes.c_uint64),
        ("more", ctypes.c_uint64),
    )


class Counter:
    """Counts an event in user mode, in a process and all threads that it starts from now on.

    Raises OSError: the processor does not count it, or nobody may ask.
    """

    def __init__(self, pid: int, event: tuple[int, int] = HARDWARE_INSTRUCTIONS) -> None:
        size = ctypes.sizeof(PerfAttributes)
        flags = _INHERIT | _NO_KERNEL | _NO_HYPERVISOR
        asked = PerfAttributes(type=event[0], size=size, config=event[1], flags=flags)
        call = ctypes.CDLL(None, use_errno=True).syscall
        number = _SYSCALLS.get(platform.machine(), -1)
        self._handle = call(number, ctypes.byref(asked), pid, -1, -1, 0)
        if self._handle < 0:
            raise OSError(ctypes.get_errno(), "perf_event_open")

    def read(self) -> int:
        """What was counted until now."""
        return int.from_bytes(os.read(self._handle, 8), "little")

    def close(self) -> None:
        os.close(self._handle)


async def count(bed: RealBed, runs: int) -> tuple[list[float], str]:
    """Millions of instructions until the kubelet has the Register, and how they were counted.

    Raises:
        Uncounted: nothing here counts them; the text says what was tried.
    """
    try:
        Counter(0).close()
    except OSError as error:
        refusal = os.strerror(error.errno or 0)
    else:
        return [await _by_processor(bed) for _ in range(runs)], "perf_event_open, user mode"
    if shutil.which("valgrind"):
        return [await _by_valgrind(bed) for _ in range(runs)], "valgrind --tool=callgrind"
    raise Uncounted(f"the processor does not count ({refusal}), and there is no valgrind")


async def _by_processor(bed: RealBed) -> float:
    counters: list[Counter] = []
    one = await bed.start(at_gate=lambda pid: counters.append(Counter(pid)))
    (counter,) = counters
    counted = counter.read()
    counter.close()
    await bed.end(one.agent)
    return counted / MILLION


async def _by_valgrind(bed: RealBed) -> float:
    """Have it write down what it counted as soon as the kubelet has the Register."""
    out = bed.cluster.root / "callgrind"
    for old in out.parent.glob(f"{out.name}.*"):
        old.unlink()
    tool = ("valgrind", "--tool=callgrind", "--cache-sim=no", f"--callgrind-out-file={out}")
    part = (one := await bed.start(*tool)).agent.part
    inside = status_of(part.pid)["NSpid"].split()[-1]
    command = bed.cluster.space.command(("vgdb", f"--pid={inside}", "dump"))
    asked = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    async with asyncio.timeout(_DEADLINE):
        await asked.wait()
    dump = Path(f"{out}.1")
    await until(lambda: dump.exists() and _total(dump) > 0, _DEADLINE, part.tail)
    await bed.end(one.agent)
    return _total(dump) / MILLION


def _total(dump: Path) -> int:
    found = re.search(r"^totals: (\d+)", dump.read_text(), re.MULTILINE)
    return int(found[1]) if found else 0

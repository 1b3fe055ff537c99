"""`python -m tests.hostile.lab.tenant DIRECTORY ATTACK MOST SECONDS RATE`: root in a container.

It sees DIRECTORY alone. Each attack is a generator: a step, and how many tries it was.
"""

import errno
import itertools
import os
import stat
import struct
import sys
from collections.abc import Iterator

from agent.hami.region import MAX_GPUS, V1_2
from tests.hostile.lab.node import DEFAULT, enter
from tests.hostile.lab.working import Bounds, work


def files() -> Iterator[int]:
    """Empty files, ten thousand in a directory, every other directory closed."""
    for number in itertools.count():
        if number % 10_000 == 0:
            made = f"d{number}"
            os.mkdir(made)
        os.close(os.open(f"{made}/{number}", os.O_CREAT | os.O_WRONLY))
        if number % 10_000 == 9_999 and number % 20_000 == 19_999:
            os.chmod(made, 0)
        yield 1


def inodes() -> Iterator[int]:
    """Files until there is no inode left, and again as soon as there is one."""
    for number in itertools.count():
        try:
            os.close(os.open(f"f{number}", os.O_CREAT | os.O_WRONLY))
        except OSError as error:
            FACTS["full"] += error.errno == errno.ENOSPC
        yield 1


def space() -> Iterator[int]:
    """Bytes until there is no block left, and again as soon as there is one."""
    handle = os.open("big", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    part = bytes(65_536)
    for size in itertools.cycle((65_536, 4096, 512)):
        try:
            os.write(handle, part[:size])
        except OSError as error:
            FACTS["full"] += error.errno == errno.ENOSPC
        yield 1


REGION = "region.cache"
"""HAMi-core's region, which is there."""


def shortens() -> Iterator[int]:
    """The region becomes shorter, at every border of its parts, and is whole again."""
    with open(REGION, "r+b") as region:
        whole = region.read()
        for length in itertools.cycle((0, 4, 1887, V1_2.slots, V1_2.tail, V1_2.size - 1)):
            region.truncate(length)
            yield 1
            region.seek(length)
            region.write(whole[length:])
            region.flush()
            yield 1


def swells() -> Iterator[int]:
    """The region has 10 GiB, of which almost all is a hole."""
    with open(REGION, "r+b", buffering=0) as region:
        for number in itertools.count():
            region.truncate(10 * 2**30 + number % 4096)
            yield 1


def swaps() -> Iterator[int]:
    """In the region's place is a FIFO, or a device that would give zeros without end."""
    for number in itertools.count():
        if number % 2:
            os.mkfifo("next")
        else:
            os.mknod("next", stat.S_IFCHR | 0o666, os.makedev(1, 5))
        os.rename("next", REGION)
        yield 1


def points() -> Iterator[int]:
    """In the region's place is a link to that of the tenant whose directory is named."""
    while True:
        os.symlink(f"../{sys.argv[6]}/{REGION}", "next")
        os.rename("next", REGION)
        yield 1


def crowds() -> Iterator[int]:
    """A directory full of files, any of which may be the region."""
    for number in itertools.count():
        os.close(os.open(f"{number}.cache", os.O_CREAT | os.O_WRONLY))
        yield 1


def forges() -> Iterator[int]:
    """Numbers that cannot be, in 2,048 uses, with the best priority and the GPUs `UUID …`."""
    uuids = [uuid.encode() for uuid in sys.argv[6:]]
    named = b"".join(uuids[gpu % len(uuids)].ljust(96, b"\0") for gpu in range(MAX_GPUS))
    slot = struct.pack("<ii", 2**31 - 1, -1).ljust(V1_2.slot_size, b"\xff")
    head = struct.pack("<Q", MAX_GPUS) + named + b"\xff" * 16 * MAX_GPUS
    tail = struct.pack("<iiiiQ", 2**31 - 1, 1, 2**31 - 1, 0, 2**64 - 1)
    with open(REGION, "r+b", buffering=0) as region:
        while True:
            os.pwrite(region.fileno(), head + slot * (2048 // MAX_GPUS), V1_2.gpu_count)
            os.pwrite(region.fileno(), tail, V1_2.tail)
            yield 1


FACTS: dict[str, int] = {"full": 0}
ATTACKS = {
    one.__name__: one
    for one in (*(files, inodes, space), *(shortens, swells, swaps, points, crowds, forges))
}


def main() -> None:
    directory, name, most, seconds, rate = sys.argv[1:6]
    bounds = Bounds(int(most), float(seconds), float(rate))
    enter(directory, DEFAULT)
    work(ATTACKS[name](), bounds, FACTS)


if __name__ == "__main__":
    main()

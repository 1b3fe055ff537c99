"""`python -m tests.hostile.lab.tenant DIRECTORY ATTACK MOST SECONDS RATE`: root in a container.

It sees DIRECTORY alone. Each attack is a generator: a step, and how many tries it was.
"""

import contextlib
import errno
import fcntl
import itertools
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator

from agent.hami.region import MAX_GPUS, V1_2
from tests.hostile.lab.node import DEFAULT, IMMUTABLE, enter
from tests.hostile.lab.working import NOBODY, Bounds, work

TIB = 2**40
SET_FLAGS = 0x40086602
"""FS_IOC_SETFLAGS."""
IS_IMMUTABLE = 0x10
DEPTH = 5_000
ESCAPES = "\n\x1b[2J\x1b]0;forged\x07{}"


def modes() -> Iterator[int]:
    """Its own directory is closed, given away, made sticky, and all of it again."""
    while True:
        for mode in (0, 0o400, 0o111, 0o755, 0o1777, 0o2777):
            os.chmod(".", mode)
            os.chown(".", NOBODY, NOBODY)
            yield 1
            os.chown(".", 0, 0)


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


def given_away() -> Iterator[int]:
    """Directories of other users, closed, with something in them: no agent can remove those."""
    for number in itertools.count():
        os.makedirs(f"s{number}/in")
        os.chmod(f"s{number}", 0o700)
        os.chown(f"s{number}", NOBODY, NOBODY)
        yield 1


def names() -> Iterator[int]:
    """Names of 255 bytes: newlines, what a terminal obeys, no UTF-8, and the agent's own form."""
    for number in itertools.count():
        forged = (ESCAPES.format(number) * 30)[:255]
        mixed = f"{number}".encode() + b"\xff\xfe\n" * 80
        for name in (forged.encode(), mixed[:255], f"-rf {number}".encode()):
            with contextlib.suppress(FileExistsError):
                os.mkdir(name)
                os.close(os.open(name + b"/" + name, os.O_CREAT | os.O_WRONLY))
            yield 1
        aside = f".removed-{number:032x}-{number:016x}"
        os.symlink("/", aside)
        yield 1


def deep() -> Iterator[int]:
    """Directories in each other, 5,000 and 5,000 again, each of them closed."""
    top = at = os.open(".", os.O_RDONLY)
    for number in itertools.count():
        if number % DEPTH == 0:
            os.mkdir(f"{number}")
            at = os.open(f"{number}", os.O_RDONLY, dir_fd=top)
        os.mkdir("d", dir_fd=at)
        above, at = at, os.open("d", os.O_RDONLY, dir_fd=at)
        os.fchmod(above, 0)
        os.close(above)
        yield 1


def kinds() -> Iterator[int]:
    """FIFOs, sockets, devices, links, sparse files of 10 TiB, hard links, set-uid files."""
    for number in itertools.count():
        made = f"k{number}"
        os.mkdir(made)
        os.mkfifo(f"{made}/fifo")
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as bound:
            bound.bind(f"{made}/socket")
        os.mknod(f"{made}/zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
        handle = os.open(f"{made}/sparse", os.O_CREAT | os.O_RDWR, 0o4777)
        os.ftruncate(handle, 10 * TIB)
        os.pwrite(handle, b"x", 10 * TIB - 1)
        os.close(handle)
        os.link(f"{made}/sparse", f"{made}/again")
        os.symlink("/" * 200, f"{made}/link")
        os.symlink("link", f"{made}/loop")
        yield 8


def links() -> Iterator[int]:
    """A hard link to what it does not own: the paths are named, and lead nowhere from here."""
    for number in itertools.count():
        path = sys.argv[6 + number % len(sys.argv[6:])]
        for way in (path, f"/..{path}", f"/proc/1/root{path}"):
            with contextlib.suppress(OSError):
                os.link(way, f"stolen{number}")
                FACTS["linked"] += 1
            yield 1


def immutable() -> Iterator[int]:
    """Files that even root may not remove before somebody takes the bit away; sticky ones, too."""
    for number in itertools.count():
        made = f"i{number}"
        os.mkdir(made, 0o1777)
        os.chmod(made, 0o1777)
        handle = os.open(f"{made}/file", os.O_CREAT | os.O_RDWR)
        os.fchown(handle, NOBODY, NOBODY)
        try:
            fcntl.ioctl(handle, SET_FLAGS, struct.pack("l", IS_IMMUTABLE))
            FACTS["immutable"] += 1
        except OSError as error:
            if error.errno not in {errno.ENOTTY, errno.EOPNOTSUPP}:
                raise
        os.close(handle)
        yield 1


def renames() -> Iterator[int]:
    """A lot of files; then everything gets another name, place and mode, all the time."""
    at = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    for number in range(60):
        with contextlib.suppress(OSError):
            os.mkdir(f"w{number}")
            for file in range(1_000):
                os.close(os.open(f"w{number}/{file}", os.O_CREAT | os.O_WRONLY))
        yield 1
    for number in itertools.count():
        with contextlib.suppress(OSError):
            for place, name in enumerate(os.listdir(at)):
                os.rename(name, f"x{number}-{place}", src_dir_fd=at, dst_dir_fd=at)
            os.makedirs(f"n{number % 7}/m/o", exist_ok=True)
            os.rename(f"n{number % 7}/m", f"m{number % 5}")
            os.chmod(f"m{number % 5}", 0)
            os.symlink("/", f"m{number % 5}/link")
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


FACTS: dict[str, int] = {"linked": 0, "immutable": 0, "full": 0}
ATTACKS = {
    one.__name__: one
    for one in (
        *(modes, files, given_away, names, deep, kinds),
        *(links, immutable, renames, inodes, space),
        *(shortens, swells, swaps, points, crowds, forges),
    )
}


def main() -> None:
    directory, name, most, seconds, rate = sys.argv[1:6]
    bounds = Bounds(int(most), float(seconds), float(rate))
    enter(directory, (*DEFAULT, IMMUTABLE) if name == "immutable" else DEFAULT)
    work(ATTACKS[name](), bounds, FACTS)


if __name__ == "__main__":
    main()

"""`python -m tests.hostile.lab.programs WHO ATTACK MOST SECONDS RATE WORD…`: one attacker.

WHO is the number of a user of the node; or `root` of a container, which sees the directory of the
first WORD alone. Each attack is a generator: a step, and how many tries it was. It works within its
bounds and says on its output what it did.
"""

import contextlib
import ctypes
import encodings.idna  # noqa: F401 -- names of hosts need it, and later no module can be read
import itertools
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

NICE = 19
"""An attacker that merely uses up this machine's cores would be no attack on the agent."""
FACTS: dict[str, int] = {"answered": 0, "acted": 0, "held": 0}
"""`acted`: answers 2xx to actions; `held`: the most connections at once."""
WORDS = sys.argv[6:]

# Somebody on the pod network, or a user of the node, who comes to the web port: PORT [SOCKET].

HELD, ADDRESSES = 1_000, 400
"""Connections at once: more than the door lets in. And from so many addresses."""
GET = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n"
ACTION = b"POST /api/v1/gpus/0:%s HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"


def slow() -> Iterator[int]:
    """Connections that have sent one byte each; who is closed comes again."""
    yield from _held(lambda _: _connected(), b"G")


def addresses() -> Iterator[int]:
    """The same, from 400 addresses."""
    source = lambda number: f"127.1.{number % ADDRESSES // 200}.{1 + number % 200}"  # noqa: E731
    yield from _held(lambda number: _connected(source(number)), b"G")


def asked() -> Iterator[int]:
    """Connections that have each asked once, and are held open after the answer."""
    yield from _held(lambda _: _connected(), GET % b"livez")


def deaf() -> Iterator[int]:
    """Many requests on each connection, and none of the answers is taken."""

    def connect(_: int) -> socket.socket:
        caller = _connected()
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        return caller

    yield from _held(connect, GET % b"metrics" * 500)


def _held(connect: Callable[[int], socket.socket], said: bytes) -> Iterator[int]:
    """Connections that have each said this and are held, up to so many."""
    held: list[socket.socket] = []
    for number in itertools.count():
        with contextlib.suppress(OSError):
            caller = connect(number)
            caller.setblocking(False)
            held.append(caller)
            caller.send(said)
        FACTS["held"] = max(FACTS["held"], len(held))
        if len(held) > HELD:
            held.pop(0).close()
        yield 1


def actions() -> Iterator[int]:
    """Actions that are root's alone, over the port and over the socket."""
    for word, where in itertools.cycle(
        itertools.product((b"recheck", b"release", b"nothing"), WORDS)
    ):
        answer = b""
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            if where.isdigit():
                caller = opened.enter_context(_connected())
            else:
                caller = opened.enter_context(socket.socket(socket.AF_UNIX))
                caller.connect(where)
            caller.settimeout(0.5)
            caller.sendall(ACTION % word)
            answer = caller.recv(65_536)
        FACTS["answered"] += bool(answer)
        FACTS["acted"] += answer[9:10] == b"2"
        yield 1


def _connected(source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(WORDS[0])), 5, (source, 0))


# Root in a container.


def files() -> Iterator[int]:
    """Empty files, ten thousand in a directory, every other directory closed."""
    for number in itertools.count():
        if number % 10_000 == 0:
            made = f"d{number}"
            os.mkdir(made)
        os.close(os.open(f"{made}/{number}", os.O_CREAT | os.O_WRONLY))
        if number % 20_000 == 19_999:
            os.chmod(made, 0)
        yield 1


# Becoming root in a container: own mounts, one directory, the capabilities of containerd.

DEFAULT = (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31)
"""What containerd leaves a container's root: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID,
SETUID, SETPCAP, NET_BIND_SERVICE, NET_RAW, SYS_CHROOT, MKNOD, AUDIT_WRITE, SETFCAP."""
_NEW_MOUNTS, _BIND, _PRIVATE = 0x00020000, 0x1000, 0x44000
_DROP_FROM_BOUNDS, _NO_NEW_PRIVILEGES = 24, 38
_VERSION = 0x20080522


def enter(directory: str) -> None:
    """From now on this process sees `directory` alone, as /; it is uid 0. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    _done(libc.unshare(_NEW_MOUNTS))
    _done(libc.mount(None, b"/", None, _PRIVATE, None))
    root = tempfile.mkdtemp(prefix="hami-tenant-")
    _done(libc.mount(directory.encode(), root.encode(), None, _BIND, None))
    os.chroot(root)
    os.chdir("/")
    for number in {*range(64)} - {*DEFAULT}:
        libc.prctl(_DROP_FROM_BOUNDS, number, 0, 0, 0)  # those that this kernel lacks fail
    _done(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    bits = sum(1 << number for number in DEFAULT)
    header = (ctypes.c_uint32 * 2)(_VERSION, 0)
    _done(libc.capset(header, (ctypes.c_uint32 * 6)(bits, bits, 0, 0, 0, 0)))


def _done(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def main(who: str, name: str, most: int, seconds: float, rate: float) -> None:
    """Take the steps, no more than `rate` a second; stopped by SIGTERM."""
    stopped = list[int]()
    # No threading.Event: a handler that sets one while it is being waited for never returns.
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    steps: Iterator[int] = globals()[name]()
    if who == "root":
        enter(WORDS[0])
    else:
        _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        os.setgroups([])
        os.setresgid(*3 * [int(who)])
        os.setresuid(*3 * [int(who)])
    os.nice(NICE)
    say({"at": "work"})
    begun, tries = time.monotonic(), 0  # noqa: TID251 -- its own process
    while not stopped and tries < most:
        now = time.monotonic() - begun  # noqa: TID251 -- its own process
        if now > seconds:
            break
        time.sleep(max(tries / rate - now, 0))  # noqa: TID251 -- its own process
        tries += next(steps)
    say({"tries": tries} | FACTS)


def say(what: dict[str, Any]) -> None:
    """One line to the test."""
    os.write(1, json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    user, program, *limits = sys.argv[1:6]
    main(user, program, int(limits[0]), float(limits[1]), float(limits[2]))

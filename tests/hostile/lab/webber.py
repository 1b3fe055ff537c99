"""`python -m tests.hostile.lab.webber UID ATTACK MOST SECONDS RATE PORT [SOCKET]`: a web client.

Somebody on the pod network, or a user of the node. Each attack is a generator: a step, and how many
tries it was.
"""

import contextlib
import itertools
import resource
import socket
import sys
from collections.abc import Callable, Iterator

from tests.hostile.lab.working import attack

PORT = int(sys.argv[6])
SOCKET = sys.argv[7] if len(sys.argv) > 7 else ""
HELD = 1_000
"""Connections at once: more than the door lets in."""
ADDRESSES = 400
GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
FACTS: dict[str, int] = {"answered": 0, "acted": 0, "held": 0}
"""`held`: the most connections at once; `acted`: a 2xx."""
ACTION = b"POST /api/v1/gpus/0:%s HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"


def slow() -> Iterator[int]:
    """Connections that have sent one byte each; who is closed comes again."""
    yield from _held(lambda _: _connected("127.0.0.1"), GET[:1])


def addresses() -> Iterator[int]:
    """The same, from 400 addresses."""
    source = lambda number: f"127.1.{number % ADDRESSES // 200}.{1 + number % 200}"  # noqa: E731
    yield from _held(lambda number: _connected(source(number)), GET[:1])


def asked() -> Iterator[int]:
    """Connections that have each asked once, and are held open after the answer."""
    yield from _held(lambda _: _connected("127.0.0.1"), b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")


def deaf() -> Iterator[int]:
    """Many requests on each connection, and none of the answers is taken."""

    def connect(_: int) -> socket.socket:
        caller = _connected("127.0.0.1")
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        return caller

    yield from _held(connect, GET * 500)


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
    words = (b"recheck", b"release", b"nothing")
    asked: list[tuple[bytes, int | str]] = [(one, at) for one in words for at in (PORT, SOCKET)]
    for word, where in itertools.cycle(asked):
        answer = _told(ACTION % word, where)
        FACTS["answered"] += bool(answer)
        FACTS["acted"] += answer[9:10] == b"2"
        yield 1


def _connected(source: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", PORT), 5, (source, 0))


def _told(said: bytes, where: int | str = PORT) -> bytes:
    """The whole answer, as far as there is one."""
    answer = b""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        if isinstance(where, str):
            caller = stack.enter_context(socket.socket(socket.AF_UNIX))
            caller.settimeout(5)
            caller.connect(where)
        else:
            caller = stack.enter_context(_connected("127.0.0.1"))
        caller.settimeout(0.5)
        caller.sendall(said)
        while part := caller.recv(65_536):
            answer += part
            if b"\r\n0\r\n\r\n" in answer or len(answer) > 1_000_000:
                break
    return answer


if __name__ == "__main__":
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    attack(globals(), FACTS, sys.argv[1:])

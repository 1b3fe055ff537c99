"""`python -m tests.hostile.lab.webber UID ATTACK MOST SECONDS RATE PORT [SOCKET]`: a web client.

Somebody on the pod network, or a user of the node. Each attack is a generator: a step, and how many
tries it was.
"""

import contextlib
import itertools
import random
import resource
import socket
import sys
from collections.abc import Iterator

from tests.hostile.lab.working import attack

PORT = int(sys.argv[6])
SOCKET = sys.argv[7] if len(sys.argv) > 7 else ""
MARK = b"abracadabra"
HELD = 1_000
"""Connections at once: more than the door lets in."""
ADDRESSES = 400
GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
LONGEST = 2_000
"""Bytes of any answer to what is no good request, heads and all."""
MANY_LINES = b"".join(b"X-%d: %s\r\n" % (number, MARK * 700) for number in range(40))
GARBAGE = (
    MARK + b" \x1b[2J\r\n\r\n",
    MARK * 25_000 + b"\r\n\r\n",
    b"GET /" + MARK * 5_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /\r\n\r\n",
    b"GET / HTTP/0.9\r\n\r\n",
    b"GET / HTTP/2.0\r\nHost: x\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\nHost: " + MARK + b"\r\n\r\n",
    b"GET http://[::" + MARK + b"/ HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT " + MARK + b":1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999\r\n\r\n" + MARK,
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + GET,
    b"GET / HTTP/1.1\r\nHost: x\r\n" + MANY_LINES + b"\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + MARK,
)
ACTION = b"POST /api/v1/gpus/0:%s HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
FACTS: dict[str, int] = {"answered": 0, "wrong": 0, "acted": 0, "held": 0}
"""`held`: the most connections at once; `wrong`: answers that are long, repeat what was said or
name their software; `acted`: a 2xx."""


def slow() -> Iterator[int]:
    """Connections that have sent one byte each; who is closed comes again."""
    yield from _held(lambda _: "127.0.0.1", GET[:1])


def addresses() -> Iterator[int]:
    """The same, from 400 addresses."""
    source = lambda number: f"127.1.{number % ADDRESSES // 200}.{1 + number % 200}"  # noqa: E731
    yield from _held(source, GET[:1])


def asked() -> Iterator[int]:
    """Connections that have each asked once, and are held open after the answer."""
    yield from _held(lambda _: "127.0.0.1", b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")


def _held(source, said: bytes) -> Iterator[int]:
    held: list[socket.socket] = []
    for number in itertools.count():
        with contextlib.suppress(OSError):
            caller = _connected(source(number))
            caller.setblocking(False)
            caller.send(said)
            held.append(caller)
        FACTS["held"] = max(FACTS["held"], len(held))
        if len(held) > HELD:
            held.pop(0).close()
        yield 1


def garbage() -> Iterator[int]:
    """What is no request, or a bad one; whatever it is, the answer is short and repeats nothing."""
    chance = random.Random(1)
    for said in itertools.cycle((*GARBAGE, b"")):
        answer = _told(said or chance.randbytes(5_000) + b"\r\n\r\n")
        if answer:
            FACTS["answered"] += 1
            is_ours = b"python" not in answer.lower() and b"aiohttp" not in answer.lower()
            FACTS["wrong"] += not (is_ours and MARK not in answer and len(answer) < LONGEST)
        yield 1


def deaf() -> Iterator[int]:
    """Many requests on each connection, and none of the answers is taken."""
    held: list[socket.socket] = []
    while True:
        with contextlib.suppress(OSError):
            caller = _connected("127.0.0.1")
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            caller.setblocking(False)
            caller.send(GET * 500)
            held.append(caller)
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


def crowds() -> Iterator[int]:
    """The unix socket is filled with connections that say nothing."""
    held: list[socket.socket] = []
    while True:
        with contextlib.suppress(OSError):
            caller = socket.socket(socket.AF_UNIX)
            caller.setblocking(False)
            held.append(caller)
            caller.connect(SOCKET)
            caller.send(GET[:1])
        if len(held) > HELD:
            held.pop(0).close()
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

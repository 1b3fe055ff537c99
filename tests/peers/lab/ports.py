"""Free ports of the loopback interface, which stay free while a server is away."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_EPHEMERAL: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST: Final = 15000
"""Below it, programs of a node have ports of their own."""
_ENOUGH: Final = 1000
_STRIDE: Final = 211
"""Between where one process begins and where the next one does: they run side by side."""


class Ports:
    """Ports of a range, each given at most once. `first` is the place in it where to begin."""

    def __init__(self, among: range, first: int = 0) -> None:
        self._left: Final = _from(among, first)

    def take(self, count: int) -> list[int]:
        """So many different ports on which nobody listens now. Raises RuntimeError: none is left.

        A server that is started again needs its port again. A client must not have got it as its
        source port meanwhile, so the range must not be the one of which the kernel gives those.
        """
        taken: list[int] = []
        for port in self._left:
            if _is_free(port):
                taken.append(port)
            if len(taken) == count:
                return taken
        raise RuntimeError("all ports for servers were used, or others listen on them")


def usable(low: int) -> range:
    """The ports for servers where the kernel gives clients those from `low` on."""
    below = range(_LOWEST, low)
    # Where the kernel gives nearly all to clients, none is safe.
    return below if len(below) >= _ENOUGH else range(_LOWEST, 65536)


def free_ports(count: int) -> list[int]:
    """So many different ports on which nobody listens now; never again the same in this process."""
    return _OURS.take(count)


def _from(among: range, first: int) -> Iterator[int]:
    start = first % len(among)
    yield from among[start:]
    yield from among[:start]


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


_OURS: Final = Ports(usable(int(_EPHEMERAL.read_text().split()[0])), os.getpid() * _STRIDE)

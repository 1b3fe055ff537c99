"""`python -m tests.hostile.lab.stranger UID ATTACK MOST SECONDS RATE PATH...`: a user of the node.

It comes to the agent's files. Each attack is a generator: a step, and
how many tries it was.
"""

import contextlib
import fcntl
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.hostile.lab.working import attack

PATHS = [Path(one) for one in sys.argv[6:]]
FACTS: dict[str, int] = {"got": 0}
"""What a stranger was given or could change."""


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


if __name__ == "__main__":
    attack(globals(), FACTS, sys.argv[1:])

"""The directory of one cluster: where it lies, who holds it, and what a killed run left behind."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tests.peers.lab.space import hierarchies, is_removed

_PREFIX: Final = "hp-"
_HELD: Final = "held"
"""The file that a living run has locked. A directory without it is not complete yet."""


def place() -> Path:
    """Where such directories lie: a disk that runs programs and is no overlay itself."""
    named = os.environ.get("HAMI_PEERS_ROOT")  # noqa: TID251 -- said by who runs tests/peers/run
    return Path(named or "/tmp")  # noqa: S108 -- short; what is made in there is private


@contextlib.contextmanager
def open_root() -> Iterator[Path]:
    """A directory for one cluster, short enough for unix sockets; removed afterwards.

    What runs that were killed have left beside it is removed first.
    """
    where = place()
    remove_leftovers(where, hierarchies())
    root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=where))
    with _holding(root):
        try:
            (root / "logs").mkdir()
            yield root
        finally:
            shutil.rmtree(root)


def remove_leftovers(where: Path, trees: Sequence[Path]) -> None:
    """Remove the directories that nobody holds any more, and their cgroups below `trees`.

    What is still in use stays for the next time: the processes of a run that was killed just now
    may not have ended yet.
    """
    for held in sorted(where.glob(f"{_PREFIX}*/{_HELD}")):
        with contextlib.suppress(OSError), held.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            root = held.parent
            removed = [is_removed(tree / root.name) for tree in trees]
            if all(removed):
                shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def _holding(root: Path) -> Iterator[None]:
    """Hold a directory; the kernel lets go of it when this process ends, however it does."""
    held, early = root / _HELD, root / f".{_HELD}"
    with early.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        early.rename(held)  # nobody sees it without its lock
        yield

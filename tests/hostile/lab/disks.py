"""File systems of a test's own: what a tenant fills is not this machine's disk."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def disk(image: Path, at: Path, *, mib: int, inodes: int) -> Iterator[str]:
    """An ext4 of so many MiB and inodes in the file `image`, mounted at `at`; yields its kind.

    Where this kernel has no loop device it is a tmpfs of the same size. Without the blocks that
    ext4 keeps for root: root in a container could use them, too.
    """
    at.mkdir(parents=True, exist_ok=True)
    with image.open("wb") as file:
        file.truncate(mib * 2**20)
    _run("mkfs.ext4", "-q", "-m", "0", "-N", str(inodes), str(image))
    kind = "ext4"
    if _tried("mount", "-o", "loop", str(image), str(at)) != 0:
        kind = "tmpfs"
        _run("mount", "-t", "tmpfs", "-o", f"size={mib}m,nr_inodes={inodes},mode=755", "none", at)
    try:
        yield kind
    finally:
        _run("umount", "--lazy", at)
        image.unlink()


@contextlib.contextmanager
def mounted(source: Path, at: Path) -> Iterator[None]:
    """`source` is seen at `at`, too, wherever that is renamed to meanwhile."""
    _run("mount", "--bind", source, at)
    opened = os.open(at, os.O_PATH)
    try:
        yield
    finally:
        now = os.readlink(f"/proc/self/fd/{opened}")
        os.close(opened)
        _run("umount", "--recursive", now)


def is_full(at: Path) -> bool:
    """Whether its file system has no block left, or no inode."""
    found = os.statvfs(at)
    return not found.f_bavail or not found.f_ffree


def _run(*words: str | Path) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=60)  # noqa: S603 -- our own words


def _tried(*words: str) -> int:
    return subprocess.run(words, check=False, capture_output=True, timeout=60).returncode  # noqa: S603 -- our own words

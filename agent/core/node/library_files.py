"""Judges the files of HAMi-core that every container loads: their owner, mode and content."""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from agent.core.node.findings import Finding, PreflightCheck

PRELOADED: Final = "/usr/local/vgpu/libvgpu.so"
"""Where containers find the library; ld.so.preload names this path."""


class LibraryFile(msgspec.Struct, frozen=True):
    """A file of HAMi-core on the host.

    - `ours`: its owner is root or the agent's user.
    - `digest`: its SHA-256 in hexadecimal; `text`: its content, for ld.so.preload alone.
    - `failure`: why it cannot be read.
    """

    path: str
    owner: int = 0
    mode: int = 0
    ours: bool = True
    digest: str = ""
    text: str = ""
    failure: str = ""


def judge_library_files(library: LibraryFile, preload: LibraryFile) -> Iterator[Finding]:
    """Judge libvgpu.so and ld.so.preload, which exist."""
    check = PreflightCheck.PRELOAD
    unread = [one for one in (library, preload) if one.failure]
    for file in unread:
        yield Finding.unknown(check, file.path, file.failure, "run this check as root")
    open_ones = [one for one in (library, preload) if not one.failure and _is_open(one)]
    for file in open_ones:
        yield Finding.wrong(
            check,
            file.path,
            f"others than root may write it (uid {file.owner}, mode {file.mode:04o})",
            f"chown root and chmod go-w {file.path}; then put HAMi-core's file there again",
            "who may write this file can run code in every new container with a GPU",
        )
    if not preload.failure and named(preload.text) != (PRELOADED,):
        names = ", ".join(named(preload.text)) or "nothing"
        advice = f"write the one line {PRELOADED} into it"
        said = f"names {names}, and not {PRELOADED}"
        yield Finding.wrong(check, preload.path, said, advice)
    elif not unread and not open_ones:
        said = f"SHA-256 {library.digest}; {preload.path} names it; only its owner may write both"
        yield Finding.ok(check, library.path, said)


def named(text: str) -> Sequence[str]:
    """The libraries that the text of an ld.so.preload names; they are separated as in ld.so(8)."""
    lines = (line.partition("#")[0] for line in text.splitlines())
    return tuple(word for line in lines for word in line.replace(":", " ").split())


def _is_open(file: LibraryFile) -> bool:
    return not file.ours or bool(file.mode & 0o022)

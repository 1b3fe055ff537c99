"""Judges the files of HAMi-core that every container loads: their owner, mode and content."""

from collections.abc import Iterator

import msgspec

from agent.core.containers.container_edits import NOT_LOADABLE, misnamed, mounted_library
from agent.core.containers.edits import HookFacts
from agent.core.node.check_groups import NO_OFFER
from agent.core.node.findings import Finding, PreflightCheck


class LibraryFile(msgspec.Struct, frozen=True):
    """A file of HAMi-core on the host.

    - `ours`: its owner is root or the agent's user.
    - `digest`: its SHA-256 in hexadecimal.
    - `failure`: why it cannot be read.
    """

    path: str
    owner: int = 0
    mode: int = 0
    ours: bool = True
    digest: str = ""
    failure: str = ""


def judge_library_files(
    library: LibraryFile, preload: LibraryFile, facts: HookFacts
) -> tuple[Finding, ...]:
    """Judge libvgpu.so and ld.so.preload, which exist: who may open them, and what containers load.

    `facts`: what check_library() judges, too.
    """
    said = f"SHA-256 {library.digest}; {preload.path} names it; only its owner may write both"
    faults = (*_access(library), *_access(preload), *_content(library, preload, facts))
    return faults or (Finding.ok(PreflightCheck.PRELOAD, library.path, said),)


def _access(file: LibraryFile) -> Iterator[Finding]:
    check, path = PreflightCheck.PRELOAD, file.path
    if file.failure:
        yield Finding.unknown(check, path, file.failure, "run this check as root")
    elif not file.ours or file.mode & 0o022:
        yield Finding.wrong(
            check,
            path,
            f"others than root may write it (uid {file.owner}, mode {file.mode:04o})",
            f"chown root and chmod go-w {path}; then put HAMi-core's file there again",
            "who may write this file can run code in every new container with a GPU",
        )
    elif not file.mode & 0o004:
        said, means = "not everybody may read it", "containers of other users have no limits"
        yield Finding.wrong(check, path, f"{said} (mode {file.mode:04o})", "make it 0644", means)


def _content(library: LibraryFile, preload: LibraryFile, facts: HookFacts) -> Iterator[Finding]:
    check, until = PreflightCheck.PRELOAD, "until then no slice is on offer (HA-5005)"
    if not facts.loadable:
        advice = f"put HAMi-core's file there; {until}"
        yield Finding.wrong(check, library.path, NOT_LOADABLE, advice, NO_OFFER)
    if names := misnamed(facts):
        mounted = mounted_library(facts)
        said, advice = f"names {names} and not {mounted}", f"make {mounted} its only line; {until}"
        yield Finding.wrong(check, preload.path, said, advice, NO_OFFER)

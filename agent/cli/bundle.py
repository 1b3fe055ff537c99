"""`hami-agent bundle`: a support archive of what the running agent knows."""

import argparse
import io
import os
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from agent import __version__
from agent.cli.connections import Unreachable, add_socket, call
from agent.cli.main import INCOMPLETE, OK, UNREACHABLE, UNWRITTEN, Subparsers, fail
from agent.host.process import SystemClock

DEADLINE: Final = 10.0
FOUND: Final = frozenset({200, 503})
"""503 of /readyz is an answer, too."""

PARTS: Final[Mapping[str, str]] = {
    "status.json": "/api/v1/status",
    "settings.json": "/api/v1/settings",
    "version.json": "/version",
    "readyz.txt": "/readyz?verbose",
    "metrics.txt": "/metrics",
}
"""The files of the archive, each with the path that it is read from."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `bundle`."""
    parser = subparsers.add_parser(
        "bundle",
        help="write a support archive of this node",
        description="Writes what the running agent knows into one archive (tar.gz): status with "
        "the refusals and changes of the last 24 hours, settings with their origins, readiness, "
        "metrics and version. `status --from` reads it. It has names of pods, GPUs and files, but "
        "no token, no environment of a container and no log. Exits 3 if no agent answers, and 5 "
        "if a part is missing.",
        epilog="example: hami-agent bundle --file node-1.tgz",
    )
    parser.add_argument(
        "--file",
        type=Path,
        metavar="PATH",
        help="the archive; it must not exist yet (default hami-agent-TIME.tgz)",
    )
    add_socket(parser)


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Write the archive and print its name; return the exit code."""
    del environ
    now = SystemClock().now()
    path = args.file or Path(f"hami-agent-{now:%Y%m%dT%H%M%SZ}.tgz")
    missing: list[str] = []
    try:
        files = dict(_read(args.socket, missing))
    except Unreachable as error:
        return fail("bundle", str(error), UNREACHABLE)
    try:
        with open(path, "xb", opener=_private) as file:  # never over an archive that is there
            _write(file, files, int(now.timestamp()))
    except FileExistsError:
        return fail("bundle", f"{path} exists already: choose another --file", UNWRITTEN)
    except OSError as error:
        return fail("bundle", f"{path} cannot be written: {error.strerror}", UNWRITTEN)
    sys.stdout.write(f"{path}: {', '.join(files)}\n")
    for text in missing:
        sys.stderr.write(f"hami-agent bundle: missing: {text}\n")
    return INCOMPLETE if missing else OK


def _private(path: str, flags: int) -> int:
    """Open the archive for its owner alone: it names pods."""
    return os.open(path, flags, 0o600)


def _read(socket: Path, missing: list[str]) -> Iterator[tuple[str, bytes]]:
    """The files. Adds to `missing` what the agent did not serve. Raises Unreachable."""
    for name, target in PARTS.items():
        status, text = call(socket, "GET", target, DEADLINE)
        if status in FOUND:
            yield name, text.encode()
        else:
            missing.append(f"{name}: {target} answered {status}")
    yield "bundle.txt", f"hami-agent {__version__}\n".encode()


def _write(file: io.BufferedIOBase, files: Mapping[str, bytes], seconds: int) -> None:
    """Write the archive; its files belong to root and are for nobody else to read."""
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"hami-agent/{name}")
            member.size, member.mtime, member.mode = len(content), seconds, 0o600
            archive.addfile(member, io.BytesIO(content))

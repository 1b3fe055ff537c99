"""Writes what the running agent knows into one archive (tar.gz), for support.

It has the status with the refusals and changes of the last 24 hours, settings with their origins,
readiness, metrics and version. `status --from` reads it. It has names of pods, GPUs and files, but
no token, no environment of a container and no log. Exits 3 if no agent answers, and 5 if a part is
missing.
"""

import argparse
import io
import os
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from agent import __version__
from agent.cli.connections import add_socket, call
from agent.cli.main import INCOMPLETE, OK, UNWRITTEN, Subparsers, fail
from agent.kit.timing import SystemClock

DEADLINE: Final = 10.0
"""Seconds for the agent to answer each part."""

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
        "bundle", description=__doc__, epilog="example: hami-agent bundle --file node-1.tgz"
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
    answers = {name: call(args.socket, "GET", target, DEADLINE) for name, target in PARTS.items()}
    # /readyz may answer 503.
    files = {
        name: text.encode() for name, (status, text) in answers.items() if status in {200, 503}
    }
    files["bundle.txt"] = f"hami-agent {__version__}\n".encode()
    try:
        # Never over an archive that is there, and for its owner alone: it names pods.
        with (
            open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file,
            tarfile.open(fileobj=file, mode="w:gz") as archive,
        ):
            for name, content in files.items():
                member = tarfile.TarInfo(f"hami-agent/{name}")
                member.size, member.mtime, member.mode = len(content), int(now.timestamp()), 0o600
                archive.addfile(member, io.BytesIO(content))
    except FileExistsError:
        return fail("bundle", f"{path} exists already: choose another --file", UNWRITTEN)
    except OSError as error:
        return fail("bundle", f"{path} cannot be written: {error.strerror}", UNWRITTEN)

    sys.stdout.write(f"{path}: {', '.join(files)}\n")
    missing = answers.keys() - files.keys()
    for name in (name for name in PARTS if name in missing):
        fail("bundle", f"missing: {name}: {PARTS[name]} answered {answers[name][0]}", INCOMPLETE)

    return INCOMPLETE if missing else OK

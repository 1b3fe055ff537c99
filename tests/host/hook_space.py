"""HAMi-core's directories in a process with mounts of its own, with root's privileges or without.

Without is as the manifests and the unit run the agent.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from agent.hookdirs import Cleared, HostHookDirs

NAME = "6f1c1f0e-8f5a-4a52-9d2e-6b8b8a1d0001_main"
TOP = Path(__file__).parents[2]
SCRIPT = """
import asyncio, os, pathlib, subprocess, sys
from agent.errors import StateError
from agent.allocate.service import AllocateStep, refusal_of
from agent.hookdirs import HostHookDirs, large_directories
from tests.fakes.offload import Inline
from tests.host.hook_space import cleared

NAME = "6f1c1f0e-8f5a-4a52-9d2e-6b8b8a1d0001_main"
hook = pathlib.Path(sys.argv[1])
dirs = HostHookDirs(hook, hook, "", Inline(), Inline())

def sh(*words):
    subprocess.run(words, check=True)

def tried(word, work):
    try:
        asyncio.run(work)
    except StateError as error:
        print(refusal_of(error, AllocateStep.DIRECTORY) if word == "prepared" else error)
    else:
        print(word)

def prepare(wipe=True):
    tried("prepared", dirs.prepare(NAME, wipe=wipe))

def check():
    tried("well", dirs.check())

def remove():
    tried("removed", dirs.remove(NAME))

def clear():
    done = asyncio.run(cleared(dirs))
    print(done.kept, done.why)

def measure():
    print([entries for _, entries, name in large_directories(hook) if name == NAME])
"""
NO_PRIVILEGES = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs")

"""As the DaemonSet runs it."""
AS_UNIT = ("unshare", "--user", "--map-root-user", *NO_PRIVILEGES)
"""As the unit runs it: all users but root are nobody, too."""
IDENTITIES = pytest.mark.parametrize(
    "identity", [NO_PRIVILEGES, AS_UNIT], ids=["DaemonSet", "unit"]
)
OTHER = 65534
"""A user who is neither root nor the agent's."""


def can_mount() -> bool:
    """Whether a process may have mounts, and users, of its own here."""
    found = subprocess.run(
        ["unshare", "--mount", "unshare", "--user", "--map-root-user", "true"],  # noqa: S607 -- Debian's
        capture_output=True,
        check=False,
    )
    return found.returncode == 0


HERE = [
    pytest.mark.process,
    pytest.mark.timeout(60),
    pytest.mark.looptime(False),
    pytest.mark.skipif(os.geteuid() != 0 or not can_mount(), reason="needs root and mounts"),
]
"""Marks of the tests that use it."""


def beside(leaf: Path, number: int) -> list[Path]:
    """The directories of so many other containers, as the agent made them."""
    leaves = [leaf.with_name(f"{leaf.name}-{which}") for which in range(number)]
    for one in leaves:
        one.mkdir()
        one.chmod(leaf.stat().st_mode)
    return leaves


def each(leaves: Iterable[Path], *calls: str) -> str:
    """Lines that make these calls for one directory after the other."""
    return f"for NAME in {[one.name for one in leaves]}:\n    {'; '.join(calls)}\n"


def said(hook: Path, lines: str, *under: str) -> list[str]:
    """What the lines print, run in a namespace of mounts and `under` these words."""
    command = ["unshare", "--mount", *under, sys.executable, "-c", SCRIPT + lines, str(hook)]
    done = subprocess.run(  # noqa: S603 -- our own lines
        command, cwd=TOP, capture_output=True, text=True, timeout=50, check=False
    )
    assert (0, "") == (done.returncode, done.stderr)
    return done.stdout.splitlines()


TENANT = """
import os, sys
at = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)
os.fchdir(at)
print("at work", flush=True)
number = 0
while True:
    number += 1
    try:
        for name in os.listdir(at):
            os.rename(name, f"x{number}-{len(name)}", src_dir_fd=at, dst_dir_fd=at)
        os.makedirs(f"n{number % 7}/m/o", exist_ok=True)
        os.rename(f"n{number % 7}/m", f"m{number % 5}")
        MORE
    except OSError:
        pass
"""


@contextlib.contextmanager
def renaming(leaf: Path, *more: str) -> Iterator[None]:
    """Beside the block a tenant renames all that is in the directory, and does `more`."""
    program = TENANT.replace("MORE", "; ".join(more))
    tenant = [sys.executable, "-c", program, str(leaf)]
    with subprocess.Popen(tenant, stdout=subprocess.PIPE) as running:  # noqa: S603 -- our own
        assert running.stdout is not None
        running.stdout.readline()
        try:
            yield
        finally:
            assert running.poll() is None
            running.kill()


async def cleared(dirs: HostHookDirs) -> Cleared:
    """What the last part of the removal says, when no more can go."""
    done = await dirs.clear()
    while done.more:
        done = await dirs.clear()
    return done

"""The agent as operators have it: installed from its wheel, with compiled bytecode."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.bench.floor import ROOT

PLACE = ROOT / "build" / "bench" / "venv"


def install() -> Path:
    """Install what this checkout is, and the locked packages, as systemd/install does; its command.

    Raises:
        subprocess.CalledProcessError: uv or the compiler refuses, and has said why.
    """
    # Copied: what other environments have mapped, too, could not be dropped from the page cache.
    named = {"UV_PROJECT_ENVIRONMENT": str(PLACE), "UV_LINK_MODE": "copy"}
    environ = os.environ | named  # noqa: TID251 -- handed on
    _run(
        *(str(ROOT / ".venv/bin/uv"), "sync", "--quiet", "--locked", "--no-editable", "--no-dev"),
        "--reinstall-package=hami-agent",
        env=environ,
    )
    compiler = (str(PLACE / "bin/python"), "-I", "-m", "compileall", "-q", "-f")
    _run(*compiler, "--invalidation-mode", "unchecked-hash", str(PLACE / "lib"), env={})
    command = PLACE / "bin" / "hami-agent"
    first, _, rest = command.read_text().partition("\n")
    command.write_text(f"{first} -IXfaulthandler\n{rest}")
    return command


def _run(*command: str, env: Mapping[str, str]) -> None:
    subprocess.run(command, cwd=ROOT, env=env, check=True)  # noqa: S603 -- our own tools


def files() -> list[Path]:
    """All files that a start may read: the installation's, and those of the interpreter."""
    interpreter = (PLACE / "bin" / "python").resolve().parents[1]
    version = next((PLACE / "lib").iterdir()).name
    places = (PLACE, interpreter / "bin", interpreter / "lib" / version)
    found = [path for place in places for path in place.rglob("*") if path.is_file()]
    return [*found, *(interpreter / "lib").glob("*.so*")]


def chill(paths: list[Path]) -> None:
    """Drop these files from the page cache; pages that a running process has mapped stay.

    Raises:
        OSError: one cannot be opened.
    """
    os.sync()  # what is not on disk yet cannot be dropped
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)

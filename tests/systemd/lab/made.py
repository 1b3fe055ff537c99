"""Wheels of the agent: as it is, as a later version, and as one that does not work."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from agent import __version__
from tests.released import released

ROOT: Final = Path(__file__).resolve().parents[3]
LATER: Final = "99.1.0"
BROKEN: Final = "99.2.0"
_SOURCES: Final = ("pyproject.toml", "README.md", "RUNBOOK.md", "LICENSE")


def name(version: str) -> str:
    """The file name of the wheel of that version."""
    return f"hami_agent-{version}-py3-none-any.whl"


def make_wheels(folder: Path) -> None:
    """Put all three into `folder`; the first is that of a release which was built."""
    folder.mkdir(parents=True, exist_ok=True)
    if built := released("*.whl"):
        shutil.copy(built, folder)
    else:
        _build(ROOT, folder)
    for version in (LATER, BROKEN):
        copy = folder.with_name(f"source-{version}")
        shutil.copytree(ROOT / "agent", copy / "agent")
        for source in _SOURCES:
            shutil.copy(ROOT / source, copy)
        _change(copy / "agent/__init__.py", __version__, version)
        if version == BROKEN:
            first = "    origin = sources(args, environ)\n"
            _change(copy / "agent/cli/run.py", first, f"    raise RuntimeError\n{first}")
        _build(copy, folder)
        shutil.rmtree(copy)


def _change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def _build(source: Path, folder: Path) -> None:
    uv = Path(sys.executable).with_name("uv")
    subprocess.run(  # noqa: S603 -- our own tool and arguments
        [uv, "build", "--quiet", "--wheel", "--out-dir", folder, source], check=True
    )

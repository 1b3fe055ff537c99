"""What the shape tests look at: the files of this repository, as git knows them."""

import functools
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = Path("agent/wire")


@functools.cache
def files() -> tuple[Path, ...]:
    """Every file that is tracked or would be, relative to the root."""
    git = shutil.which("git")
    assert git, "the shape tests ask git which files belong to the repository"
    names = subprocess.run(  # noqa: S603 -- fixed arguments
        [git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    return tuple(sorted({Path(name) for name in names if name and (ROOT / name).is_file()}))


def modules(room: str) -> tuple[Path, ...]:
    """The Python files below `room` that people write."""
    return tuple(
        path
        for path in files()
        if path.suffix == ".py" and path.is_relative_to(room) and not path.is_relative_to(GENERATED)
    )


def packages() -> tuple[Path, ...]:
    """The folders of agent/ that are packages and that people write."""
    return tuple(path.parent for path in modules("agent") if path.name == "__init__.py")


def text(path: Path | str) -> str:
    """The whole file."""
    return (ROOT / path).read_text(encoding="utf-8")


@functools.cache
def claims_of(path: str) -> frozenset[str]:
    """The names of its tests."""
    return frozenset(re.findall(r"^(?:async )?def (test_\w+)", text(path), re.MULTILINE))

"""What the shape tests look at: the files of this repository, as git knows them."""

import ast
import functools
import re
import shutil
import subprocess
from collections.abc import Iterator
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


def parsed(path: Path) -> ast.Module:
    """The module's syntax tree."""
    return ast.parse(text(path), filename=str(path))


@functools.cache
def claims_of(path: str) -> frozenset[str]:
    """The names of its tests."""
    return frozenset(re.findall(r"^(?:async )?def (test_\w+)", text(path), re.MULTILINE))


@functools.cache
def defined(path: Path) -> tuple[tuple[str, int], ...]:
    """Each name that the module gives to something of its own, with its line.

    Names that are only read belong to others (the kubelet's messages, NVIDIA's library).
    """
    return tuple(_defined(parsed(path)))


def _defined(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node.lineno
            case ast.ClassDef(name=name) | ast.alias(asname=str(name)):
                yield name, node.lineno
            case ast.arg(arg=name):
                yield name, node.lineno
            case ast.Name(id=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case _:
                pass

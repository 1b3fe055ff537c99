"""Prints how large the repository is, by room: `make size`."""

import ast
import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.shape import tree


@dataclasses.dataclass
class Size:
    """Python files, their lines and statements. `blank`: empty lines, and lines of bare strings."""

    files: int = 0
    lines: int = 0
    statements: int = 0
    blank: int = 0

    @property
    def share(self) -> float:
        """The blank lines in per cent of all lines."""
        return 100 * self.blank / max(self.lines, 1)


def size_of(paths: Iterable[Path]) -> Size:
    """The size of these files. A statement is every `ast.stmt` that is not a bare string."""
    size = Size()
    for path in paths:
        text = tree.text(path)
        lines = text.splitlines()
        blank = {number for number, line in enumerate(lines, 1) if not line.strip()}
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):
                    blank |= set(range(first, last + 1))
                case ast.stmt():
                    size.statements += 1
        size.files += 1
        size.lines += len(lines)
        size.blank += len(blank)
    return size


def rooms() -> dict[str, list[Path]]:
    """The Python files of agent/ by folder; "agent": a file is a room of its own."""
    found: dict[str, list[Path]] = {}
    for path in tree.files():
        if path.suffix == ".py" and path.is_relative_to("agent"):
            found.setdefault("/".join(("agent", *path.parts[1:-1][:1])), []).append(path)
    return found


def words() -> int:
    """The words of all documents."""
    return sum(len(tree.text(path).split()) for path in tree.files() if path.suffix == ".md")


def report() -> list[str]:
    """A line for each room, then the totals."""
    form = "{:<34}{:>6}{:>9}{:>12}{:>9}"
    by_room = rooms()
    own = by_room.keys() - {"agent/sandbox", "agent/wire"}
    totals = {
        "agent without sandbox and wire": [path for room in own for path in by_room[room]],
        "agent": [path for paths in by_room.values() for path in paths],
        "tests": tree.modules("tests"),
    }
    return [
        form.format("room", "files", "lines", "statements", "blank"),
        *(_line(form, room, size_of(paths)) for room, paths in sorted(by_room.items())),
        "",
        *(_line(form, name, size_of(paths)) for name, paths in totals.items()),
        f"{'words of documents':<34}{words():>27,}",
        "",
        "blank: lines that are empty or belong to a bare string, such as a docstring",
    ]


def _line(form: str, name: str, size: Size) -> str:
    figures = (f"{number:,}" for number in (size.files, size.lines, size.statements))
    return form.format(name, *figures, f"{size.share:.1f} %")


if __name__ == "__main__":
    sys.stdout.write("\n".join(report()) + "\n")

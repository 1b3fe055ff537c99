"""What was tried, how often, and how long an Allocate took meanwhile: a table for people."""

import dataclasses
import json
from pathlib import Path
from typing import Final

HEAD: Final = ("attack", "answers", "tries", "within", "usual", "median", "worst", "result")
"""The figures of Allocate are in milliseconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One attack. Times in seconds; `within` is its bound of time, `most` that of tries."""

    name: str
    threats: str
    tries: int
    most: int
    within: float
    usual: float
    median: float
    worst: float
    result: str

    def cells(self) -> tuple[str, ...]:
        """Its texts, one for each column."""
        times = (f"{1000 * one:.0f} ms" for one in (self.usual, self.median, self.worst))
        tries = f"{self.tries}" if self.tries < self.most else f"{self.tries} (all)"
        return (self.name, self.threats, tries, f"{self.within:.0f} s", *times, self.result)


@dataclasses.dataclass(eq=False, slots=True)
class AttackTable:
    """The attacks in their order, and figures that stand below it."""

    lines: list[Line] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def text(self) -> str:
        """A Markdown table whose columns are in line."""
        cells = [HEAD, *(line.cells() for line in self.lines)]
        widths = [max(len(one[column]) for one in cells) for column in range(len(HEAD))]
        head, *rest = (_joined(one, widths) for one in cells)
        ruler = _joined(["-" * width for width in widths], widths)
        return "\n".join((head, ruler, *rest, "", *self.notes)).rstrip() + "\n"

    def write(self, path: Path) -> None:
        """Write it to a file, and as JSON beside that. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.text())
        rows = [dataclasses.asdict(line) for line in self.lines]
        said = {"attacks": rows, "notes": self.notes}
        path.with_suffix(".json").write_text(json.dumps(said, indent=1, ensure_ascii=False) + "\n")


def _joined(cells: "tuple[str, ...] | list[str]", widths: list[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return f"| {' | '.join(padded)} |"

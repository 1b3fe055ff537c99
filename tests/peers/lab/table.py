"""What was measured, beside what was promised: a table for people, and the same for programs."""

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

FAR: Final = 5.0
"""A figure so many times beyond its bound is wrong on any machine."""

FAR_STARTING: Final = 15.0
"""The same where the start of a Python process is in the figure, which a busy machine drags out."""

_HEAD: Final = ("what", "measured", "bound", "")


@dataclass(frozen=True, slots=True)
class FigureRow:
    """One figure. `bound` None: it is told, nothing is promised."""

    what: str
    measured: float
    bound: float | None
    unit: str

    def cells(self) -> tuple[str, str, str, str]:
        """Its texts, one for each column."""
        if self.bound is None:
            return (self.what, _number(self.measured, self.unit), "-", "")
        verdict = "over" if self.measured > self.bound else "ok"
        measured, bound = (_number(value, self.unit) for value in (self.measured, self.bound))
        return (self.what, measured, bound, verdict)


@dataclass(eq=False, slots=True)
class Table:
    """Figures in the order in which they were measured."""

    rows: list[FigureRow] = field(default_factory=list)

    def add(self, what: str, measured: float, bound: float | None = None, unit: str = "s") -> None:
        """One more figure; a figure that is there already keeps the worse of both."""
        if bound is not None and not unit:
            raise ValueError(f"{what}: a count with a bound is held")
        self._put(FigureRow(what, measured, bound, unit))

    def hold(
        self, what: str, measured: float, bound: float, unit: str = "s", *, far: float = FAR
    ) -> None:
        """One more figure, which was promised. One without a unit is a count."""
        self._put(FigureRow(what, measured, bound, unit))
        most = far * bound if unit else bound
        assert measured <= most, f"{what}: {_number(measured, unit)}, not {_number(most, unit)}"

    def told(self) -> list[dict[str, Any]]:
        """All figures, for another process or a file."""
        return [asdict(row) for row in self.rows]

    def take(self, told: Iterable[Mapping[str, Any]]) -> None:
        """Add the figures of another process."""
        for row in told:
            self._put(FigureRow(**row))

    def _put(self, row: FigureRow) -> None:
        for number, other in enumerate(self.rows):
            if other.what == row.what:
                self.rows[number] = max(row, other, key=lambda one: one.measured)
                return
        self.rows.append(row)

    def text(self) -> str:
        """A Markdown table whose columns are in line."""
        cells = [_HEAD, *(row.cells() for row in self.rows)]
        widths = [max(len(one[column]) for one in cells) for column in range(len(_HEAD))]
        head, *rest = (_line(one, widths) for one in cells)
        return "\n".join((head, _line(["-" * width for width in widths], widths), *rest)) + "\n"

    def write(self, path: Path) -> None:
        """Write it to a file, and as JSON beside that. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.text())
        text = json.dumps(self.told(), indent=2, ensure_ascii=False)
        path.with_suffix(".json").write_text(text + "\n")


def _line(cells: Iterable[str], widths: list[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return f"| {' | '.join(padded)} |"


def _number(value: float, unit: str) -> str:
    text = f"{value:.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"
    return f"{text} {unit}".rstrip()


# How long a process lives, by the kernel's own clock.

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_STARTED: Final = 19
"""Place of the start time behind the name of the program, in proc_pid_stat(5)."""


def age_of(pid: int) -> float:
    """Seconds since a process was made, in steps of 10 ms. Raises OSError: it is gone."""
    _, _, text = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")
    started = int(text.split()[_STARTED]) / _TICKS
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started

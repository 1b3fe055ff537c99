"""A measured figure, its budget, and how figures are shown and kept."""

import dataclasses
import json
import math
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

HEAD = ("what", "n", "value", "p99", "budget")


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """What was measured. `how` says where the clock was read; `budget` is at most.

    The value is a percentile of the samples: the median, unless `percent` names another. Without
    samples it was not measured here, and `how` says why.
    """

    id: str
    what: str
    unit: str
    samples: Sequence[float]
    how: str
    budget: float | None = None
    percent: float = 50

    def document(self) -> dict[str, object]:
        """`ratio`: the value over its budget, 1 or less is within."""
        value, high = (percentile(self.samples, one) for one in (self.percent, 99))
        ratio = None if value is None or not self.budget else value / self.budget
        return dataclasses.asdict(self) | {"value": value, "p99": high, "ratio": ratio}

    def cells(self) -> tuple[str, ...]:
        """Its texts, one for each column of HEAD; a value beyond its budget is marked."""
        value, high = (percentile(self.samples, one) for one in (self.percent, 99))
        budget = "-" if self.budget is None else self._text(self.budget)
        if value is None or high is None:
            return (self.what, "0", f"not measured: {self.how}", "-", budget)
        is_over = self.budget is not None and value > self.budget
        count, told = str(len(self.samples)), (self._text(value), self._text(high))
        return (self.what, count, *told, budget + " **over**" * is_over)

    def _text(self, value: float) -> str:
        """Three digits that count, and no zeros behind them."""
        return f"{float(f'{value:.3g}'):,.12g} {self.unit}".rstrip()


def percentile(samples: Sequence[float], percent: float) -> float | None:
    """The nearest-rank percentile; None if there are no samples."""
    rank = max(0, math.ceil(percent / 100 * len(samples)) - 1)
    return sorted(samples)[rank] if samples else None


def table(figures: Sequence[Figure]) -> Iterator[str]:
    """Lines for people, which are Markdown, too."""
    rows = [HEAD, *(one.cells() for one in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    for number, row in enumerate(rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"| {' | '.join(cells)} |"
        if not number:
            yield f"|{'|'.join('-' * (width + 2) for width in widths)}|"


def keep(figures: Sequence[Figure], path: Path) -> None:
    """Write the figures, and what they were measured on, as JSON."""
    machine = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": os.cpu_count(),
    }
    document = {"machine": machine, "figures": [one.document() for one in figures]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")

"""A measured figure, its budget, and how figures are shown and kept."""

import dataclasses
import json
import math
import os
import platform
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HEAD = ("what", "n", "median", "p99", "budget", "HAMi; NVIDIA")


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """What was measured. `how` says where the clock was read; `budget` is at most.

    The value is the median of the samples, unless `value` gives another one (a percentile).
    Without samples it was not measured here, and `how` says why. `peers`: what HAMi's or NVIDIA's
    plugin takes, where that is known. `part`: the part of the bench that measured it.
    """

    id: str
    what: str
    unit: str
    samples: Sequence[float]
    how: str
    budget: float | None = None
    value: float | None = None
    peers: str = ""
    part: str = ""

    @property
    def shown(self) -> float | None:
        if self.value is not None or not self.samples:
            return self.value
        return statistics.median(self.samples)

    @property
    def ratio(self) -> float | None:
        """The value over its budget: 1 or less is within."""
        shown = self.shown
        return None if not self.budget or shown is None else shown / self.budget

    def document(self) -> dict[str, object]:
        return {
            "part": self.part,
            "id": self.id,
            "what": self.what,
            "unit": self.unit,
            "value": _rounded(self.shown),
            "p99": _rounded(percentile(self.samples, 99)) if self.samples else None,
            "n": len(self.samples),
            "budget": self.budget,
            "ratio": _rounded(self.ratio),
            "peers": self.peers,
            "how": self.how,
            "samples": [_rounded(one) for one in self.samples],
        }

    def cells(self) -> tuple[str, ...]:
        """Its texts, one for each column of HEAD; a value beyond its budget is marked."""
        budget = "-" if self.budget is None else _text(self.budget, self.unit)
        if self.ratio is not None and self.ratio > 1:
            budget += " **over**"
        if self.shown is None:
            return (self.what, "0", f"not measured: {self.how}", "-", budget, self.peers or "-")
        value, high = (_text(one, self.unit) for one in (self.shown, percentile(self.samples, 99)))
        return (self.what, str(len(self.samples)), value, high, budget, self.peers or "-")


def percentile(samples: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def table(figures: Iterable[Figure]) -> Iterator[str]:
    """Lines for people, which are Markdown, too; a value that is no median stands for it."""
    rows = [HEAD, *(one.cells() for one in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    for number, row in enumerate(rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"| {' | '.join(cells)} |"
        if not number:
            yield f"|{'|'.join('-' * (width + 2) for width in widths)}|"


def keep(figures: Iterable[Figure], path: Path, *, add: bool = False) -> Mapping[str, Any]:
    """Write the figures, and what they were measured on, as JSON; returns what was written.

    `add`: beside those of other parts that the file has already.
    """
    told = [one.document() for one in figures]
    parts = {one["part"] for one in told}
    present = json.loads(path.read_text())["figures"] if add and path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "machine": {
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()}",
            "cores": os.cpu_count(),
        },
        "figures": [*(one for one in present if one.get("part") not in parts), *told],
    }
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    return document


def _text(value: float, unit: str) -> str:
    """Three digits that count, and no zeros behind them."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.12g} {unit}".rstrip()


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)

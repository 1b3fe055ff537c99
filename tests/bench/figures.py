"""A measured figure, its budget, and how figures are shown and kept."""

import dataclasses
import json
import math
import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """What was measured. `how` says where the clock was read; `budget` is at most.

    The value is the median of the samples, unless `value` gives another one (a percentile).
    """

    id: str
    what: str
    unit: str
    samples: Sequence[float]
    how: str
    budget: float | None = None
    value: float | None = None

    @property
    def shown(self) -> float:
        return statistics.median(self.samples) if self.value is None else self.value

    @property
    def ratio(self) -> float | None:
        """The value over its budget: 1 or less is within."""
        return None if not self.budget else self.shown / self.budget

    def document(self) -> dict[str, object]:
        return {
            "id": self.id,
            "what": self.what,
            "unit": self.unit,
            "value": round(self.shown, 4),
            "min": round(min(self.samples), 4),
            "max": round(max(self.samples), 4),
            "samples": len(self.samples),
            "budget": self.budget,
            "ratio": None if self.ratio is None else round(self.ratio, 3),
            "how": self.how,
        }


def percentile(samples: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def table(figures: Sequence[Figure]) -> Iterator[str]:
    """Lines for people: value, range, budget, ratio."""
    rows = [("WHAT", "VALUE", "MIN..MAX", "BUDGET", "RATIO")]
    for one in figures:
        low, high = min(one.samples), max(one.samples)
        budget = "-" if one.budget is None else f"{one.budget:g} {one.unit}"
        ratio = "-" if one.ratio is None else f"{one.ratio:.2f}"
        value, span = f"{one.shown:.4g} {one.unit}", f"{low:.4g}..{high:.4g}"
        rows.append((one.what, value, span, budget, ratio))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def keep(figures: Sequence[Figure], path: Path) -> None:
    """Write the figures, and what they were measured on, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "machine": {
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()}",
            "cores": os.cpu_count(),
        },
        "figures": [one.document() for one in figures],
    }
    path.write_text(json.dumps(document, indent=2) + "\n")

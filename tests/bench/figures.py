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


# What differs between two runs of the bench beyond noise.

FEWEST = 5
"""Of fewer samples nobody can say how far they scatter."""

RARE = 2.576
"""Standard deviations beyond which a hundredth of a normal distribution lies."""

Document = Mapping[str, Any]
"""What tests.bench.figures.keep has written of a run, or of a figure."""


def verdict(old: Sequence[float], new: Sequence[float]) -> str:
    """How samples differ: `same`, `less`, `more`, or `unsure` where they are too few to say.

    They differ when the middle halves of both have nothing in common, and chance alone would put
    their ranks so far apart once in a hundred times (by the test of Mann and Whitney). Equal values
    are the same, however few they are.
    """
    if {*old} == {*new} and len({*old}) == 1:
        return "same"
    if min(len(old), len(new)) < FEWEST:
        return "unsure"
    (old_low, old_high), (new_low, new_high) = _middle(old), _middle(new)
    if (old_low <= new_high and new_low <= old_high) or abs(_apart(old, new)) < RARE:
        return "same"
    return "more" if new_low > old_high else "less"


def _middle(samples: Sequence[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, high


def _apart(old: Sequence[float], new: Sequence[float]) -> float:
    """Standard deviations between the ranks of both and those of samples that do not differ."""
    wins = sum((after > before) + (after == before) / 2 for before in old for after in new)
    pairs, both = len(old) * len(new), len(old) + len(new)
    return (wins - pairs / 2) / math.sqrt(pairs * (both + 1) / 12)


def changes(old: Document, new: Document) -> Iterator[tuple[str, str]]:
    """A verdict and a line for each figure; those of parts that `new` has not run are left out.

    Besides those of `verdict` there are `new` and `gone`.
    """
    before, after = (
        {(one["id"], one["unit"]): one for one in run["figures"]} for run in (old, new)
    )
    for name, one in after.items():
        if name not in before:
            yield "new", f"{one['what']}: {_shown(one)}"
            continue
        other = before[name]
        found = verdict(other["samples"], one["samples"])
        yield found, f"{one['what']}: {_shown(other)} → {_shown(one)}{_percent(other, one)}"
    parts = {one["part"] for one in after.values()}
    for name, one in before.items():
        if name not in after and one["part"] in parts:
            yield "gone", f"{one['what']}: {_shown(one)}"


def report(old: Document, new: Document) -> Iterator[str]:
    """Lines for people: what changed first, what did not last."""
    if old["machine"] != new["machine"]:
        yield f"another machine: {old['machine']} → {new['machine']}"
    found = list(changes(old, new))
    titles = {
        "more": "more than before",
        "less": "less than before",
        "unsure": f"fewer than {FEWEST} samples, nobody can tell",
        "new": "new",
        "gone": "gone",
        "same": "no change beyond noise",
    }
    for kind, title in titles.items():
        lines = [line for one, line in found if one == kind]
        if lines:
            yield f"{title} ({len(lines)}):"
            yield from (f"  {line}" for line in lines)


def load(path: Path) -> Document:
    """A kept run.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no run, or one that kept no samples.
    """
    run: Document = json.loads(path.read_text())
    if not all(isinstance(one.get("samples"), list) for one in run["figures"]):
        raise ValueError(f"{path} has no samples: measure it again with this bench")
    return run


def _shown(one: Document) -> str:
    value = one["value"]
    return "not measured" if value is None else f"{value:.4g} {one['unit']}".rstrip()


def _percent(old: Document, new: Document) -> str:
    if not old["value"] or new["value"] is None:
        return ""
    return f" ({(new['value'] / old['value'] - 1) * 100:+.0f} %)"

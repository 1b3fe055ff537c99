"""What differs between two runs of the bench beyond noise."""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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

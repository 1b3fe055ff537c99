"""Counters and histograms as plain data. The code that counts owns them; a page renders them."""

import bisect
import itertools
from collections.abc import Iterable

import msgspec


class Tally:
    """A counter with labels. `name` (without prefix) and `help` stand on the metrics page.

    `expected`: label values that the page shows from the start, with 0. Without that, the first
    one that is counted is no increase to who reads the page.
    """

    def __init__(
        self,
        name: str,
        help: str,  # noqa: A002 -- Prometheus' word
        labels: tuple[str, ...] = (),
        expected: Iterable[tuple[str, ...]] = (),
    ) -> None:
        self.expected = tuple(expected)
        for values in self.expected:
            _match(name, labels, values)
        self.name = name
        self.help = help
        self.labels = labels
        self._counts: dict[tuple[str, ...], int] = {}

    def add(self, *label_values: str, amount: int = 1) -> int:
        """Count `amount` more for these label values (one per label). Returns their count.

        Raises ValueError.
        """
        _match(self.name, self.labels, label_values)
        if amount < 0:
            raise ValueError(f"{self.name} counts upwards only, not {amount}")
        count = self._counts[label_values] = self._counts.get(label_values, 0) + amount
        return count

    def items(self) -> tuple[tuple[tuple[str, ...], int], ...]:
        """Label values and count, sorted by label values."""
        return tuple(sorted(self._counts.items()))


class DurationRow(msgspec.Struct, frozen=True):
    """The observations of one set of label values; `total` is their sum in seconds.

    `cumulative[i]` observations took at most `buckets[i]` seconds; the last entry counts all.
    """

    labels: tuple[str, ...]
    cumulative: tuple[int, ...]
    total: float


class Durations:
    """A histogram of seconds with labels. `buckets`: ascending upper bounds, without infinity."""

    def __init__(
        self,
        name: str,
        help: str,  # noqa: A002 -- Prometheus' word
        labels: tuple[str, ...],
        buckets: tuple[float, ...],
    ) -> None:
        if list(buckets) != sorted(set(buckets)):
            raise ValueError(f"{name}: buckets must ascend")
        self.name = name
        self.help = help
        self.labels = labels
        self.buckets = buckets
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._totals: dict[tuple[str, ...], float] = {}

    def observe(self, seconds: float, *label_values: str) -> None:
        """Add one duration for these label values (one per label). Raises ValueError."""
        _match(self.name, self.labels, label_values)
        counts = self._counts.setdefault(label_values, [0] * (len(self.buckets) + 1))
        counts[bisect.bisect_left(self.buckets, seconds)] += 1
        self._totals[label_values] = self._totals.get(label_values, 0.0) + seconds

    def rows(self) -> tuple[DurationRow, ...]:
        """One row per set of label values, sorted by them."""
        return tuple(
            DurationRow(labels, tuple(itertools.accumulate(counts)), self._totals[labels])
            for labels, counts in sorted(self._counts.items())
        )


def _match(name: str, labels: tuple[str, ...], values: tuple[str, ...]) -> None:
    if len(values) != len(labels):
        raise ValueError(f"{name} has the labels {labels}, not {len(values)} of them")

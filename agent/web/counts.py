"""Renders tallies and durations as metric families."""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, TypeVar

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

from agent.kit.tally import DurationRow, Durations, Tally

T = TypeVar("T", Tally, Durations)

GPU: Final = "gpu"
_NOBODY: Final[Mapping[str, str]] = MappingProxyType({})


def counters(
    prefix: str, tallies: Iterable[Tally], gpus: Mapping[str, str] = _NOBODY
) -> Iterator[Metric]:
    """Render one counter per name; tallies of equal name are added up.

    Tallies name a GPU by its UUID; `gpus` maps it to the value of the label `gpu`.
    """
    for name, group in _by_name(tallies).items():
        labels = group[0].labels
        family = CounterMetricFamily(prefix + name, group[0].help, labels=labels)
        counts: dict[tuple[str, ...], int] = {}
        for tally in group:
            for raw, count in (*((values, 0) for values in tally.expected), *tally.items()):
                values = tuple(
                    gpus.get(value, value) if label == GPU else value
                    for label, value in zip(labels, raw, strict=True)
                )
                counts[values] = counts.get(values, 0) + count
        if not labels:
            counts.setdefault((), 0)
        for values, count in sorted(counts.items()):
            family.add_metric(values, count)
        yield family


def counted_gpus(tallies: Iterable[Tally]) -> frozenset[str]:
    """The UUIDs of the GPUs with a count."""
    return frozenset(
        values[tally.labels.index(GPU)]
        for tally in tallies
        if GPU in tally.labels
        for values, _ in tally.items()
    )


def histograms(prefix: str, durations: Iterable[Durations]) -> Iterator[Metric]:
    """Render one histogram per name; those of equal name, with equal buckets, are added up."""
    for name, group in _by_name(durations).items():
        first = group[0]
        family = HistogramMetricFamily(prefix + name, first.help, labels=first.labels)
        rows: dict[tuple[str, ...], DurationRow] = {}
        for row in (row for item in group for row in item.rows()):
            rows[row.labels] = _sum(rows[row.labels], row) if row.labels in rows else row
        bounds = [*map(str, first.buckets), "+Inf"]
        for labels, row in sorted(rows.items()):
            buckets = list(zip(bounds, row.cumulative, strict=True))
            family.add_metric(labels, buckets, sum_value=row.total)
        yield family


def _sum(one: DurationRow, other: DurationRow) -> DurationRow:
    cumulative = tuple(a + b for a, b in zip(one.cumulative, other.cumulative, strict=True))
    return DurationRow(one.labels, cumulative, one.total + other.total)


def _by_name(items: Iterable[T]) -> dict[str, list[T]]:
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(item.name, []).append(item)
    return groups

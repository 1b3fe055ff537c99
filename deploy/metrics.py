#!/usr/bin/env python3
"""Writes METRICS.md, the list of all series, from the code that serves them.

    deploy/metrics.py [FOLDER]

Written to FOLDER (this repository). What the metrics page makes of the facts is asked of the page's
own collector. Counters and gauges of the services are read from the calls that create them, because
the services need a node.
"""

import ast
import datetime as dt
import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry, Metric, PlatformCollector, ProcessCollector

from agent.errors import RefusalReason
from agent.status import NodeStatus, StatusFacts
from agent.web.metrics import PREFIX, AgentCollector

ROOT: Final = Path(__file__).resolve().parents[1]
DOCUMENT: Final = "METRICS.md"
KINDS: Final = {"Tally": "counter", "Histogram": "histogram"}
"""What creates the series of a service; a gauge is a tuple of name, text and what reads it."""
UNITS: Final = {
    "_timestamp_seconds": "seconds since 1970",
    "_seconds": "seconds",
    "_bytes": "bytes",
    "_celsius": "degrees Celsius",
    "_watts": "watts",
    "_ratio": "0 to 1",
    "_info": "always 1",
}
"""By the end of a name without _total; the first that fits counts."""
PERCENT: Final = "percent"

TEXT: Final = """\
# Metrics

All series of `/metrics`. Written by `make metrics` from the code; do not edit.

The page is in Prometheus' text format 0.0.4. Counters start at 0 with the agent. A value that is
not known has no series, or is NaN. [GUIDE.md](GUIDE.md#metrics) says how to scrape the
agents, and has alerts and a dashboard.

- The label `gpu` is the GPU's index, as [RUNBOOK.md](RUNBOOK.md#a-gpu-in-the-metrics) explains.
- Series with the labels `namespace`, `pod` and `container` name the containers that hold slices.
  Scrape them with `honor_labels: true`, or Prometheus renames these labels.
  `metrics.containers: false` leaves the series out, HAMi's about containers too.
- What a container uses is read every 5 s from HAMi-core's shared region in its directory. Processes
  of the container may write there: they can lie about their own container, not about others. A
  container that has not used CUDA yet has no such series.
- Plain mode (`scheduler: none`) has no series about the API server and the scheduler.

## The agent's series

{own}

## HAMi's series

`metrics.hami` chooses: `current` (the default) serves the names that begin with `hami_`, `legacy`
the older ones, `both` all, `none` none. Names, labels and scales are those of the vGPUmonitor of
HAMi after 2.10 (`zone` is always `vGPU`). What a GPU does not support has no series.
[COMPATIBILITY.md](COMPATIBILITY.md#hamis-metrics) says what differs.

{hami}

## Series of the process

{process}

## Reasons of refusals

Values of `reason` with `result="refused"`, and the id that [RUNBOOK.md](RUNBOOK.md) explains.

{reasons}
"""


@dataclass(frozen=True, slots=True)
class Described:
    """One family. `kind`: counter, gauge, histogram."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str

    @property
    def is_hamis(self) -> bool:
        """Whether it is one of HAMi's, which has other scales."""
        return not self.name.startswith((PREFIX, "process_", "python_"))

    @property
    def unit(self) -> str:
        """In what it is counted; empty: things."""
        if self.is_hamis and self.name.endswith("_ratio"):
            return PERCENT
        name = self.name.removesuffix("_total")
        return next((unit for end, unit in UNITS.items() if name.endswith(end)), "")


def main(folder: Path) -> None:
    """Write the document."""
    (folder / DOCUMENT).write_text(document(), encoding="utf-8")


def document() -> str:
    """The whole text."""
    families = described()
    own = [one for one in families if one.name.startswith(PREFIX)]
    hami = [one for one in families if one.is_hamis]
    process = [one for one in families if one not in own and one not in hami]
    reasons = "".join(f"| `{one.name.lower()}` | {one.value} |\n" for one in RefusalReason)
    return TEXT.format(
        own=table(own),
        hami=table(hami),
        process=table(process),
        reasons=f"| reason | id |\n|---|---|\n{reasons}".rstrip(),
    )


def described() -> list[Described]:
    """All families: of the page in its order, of the services by name, then of the process."""
    registry = CollectorRegistry()
    collectors = ProcessCollector(registry=registry), PlatformCollector(registry=registry)
    process = itertools.chain.from_iterable(each.collect() for each in collectors)
    counted = sorted(of_services(ROOT / "agent"), key=lambda one: one.name)
    return [*map(of_family, of_page()), *counted, *map(of_family, process)]


def of_page() -> Iterable[Metric]:
    """The families that are made of the facts of a node, here of none."""
    facts = StatusFacts(dt.datetime.fromtimestamp(0, dt.UTC), NodeStatus(name="node"))
    return AgentCollector(lambda: facts, hami="both").collect()


def of_family(family: Metric) -> Described:
    """A family as the client library has it."""
    labels = tuple(getattr(family, "_labelnames", ())) or labels_of(family)
    end = "_total" if family.type == "counter" else ""
    return Described(family.name + end, family.type, labels, sentence(family.documentation))


def labels_of(family: Metric) -> tuple[str, ...]:
    """The labels of its first series."""
    return tuple(family.samples[0].labels) if family.samples else ()


def of_services(folder: Path) -> Iterator[Described]:
    """The counters, histograms and gauges that the code below `folder` creates.

    Raises ValueError: a name, text or label is no literal.
    """
    for path in sorted(folder.rglob("*.py")):
        if "sandbox" in path.parts or "kit" in path.parts:
            continue
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match call:
                case ast.Call(func=ast.Name(id=kind), args=[name, text, *more]) if kind in KINDS:
                    labels = literal(more[0]) if more else ()
                    yield of_call(KINDS[kind], literal(name), literal(text), labels)
                case ast.Tuple(elts=[ast.Constant(name), ast.Constant(str(text)), ast.Lambda()]):
                    yield of_call("gauge", str(name), text, ())
                case _:
                    pass


def of_call(kind: str, name: str, text: str, labels: tuple[str, ...]) -> Described:
    """A family as a service creates it."""
    whole = PREFIX + (f"{name.removesuffix('_total')}_total" if kind == "counter" else name)
    return Described(whole, kind, labels, sentence(text))


def literal(node: ast.expr) -> Any:  # noqa: ANN401 -- whatever was written
    """The value of a literal. Raises ValueError: it is none."""
    return ast.literal_eval(node)


def sentence(text: str) -> str:
    """With a full stop, and without what ends a cell."""
    return text.rstrip(".").replace("|", "\\|") + "."


def table(families: Iterable[Described]) -> str:
    """A table of Markdown."""
    rows = (
        f"| `{one.name}` | {one.kind} | {', '.join(f'`{label}`' for label in one.labels)} "
        f"| {one.unit} | {one.meaning} |"
        for one in families
    )
    return "\n".join(("| name | type | labels | unit | meaning |", "|---|---|---|---|---|", *rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else ROOT)

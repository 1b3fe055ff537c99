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
import textwrap
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

TEXT: Final = """\
# Metrics

All series of `/metrics`, in Prometheus' text format 0.0.4. Written by `make metrics` from the code;
do not edit. [GUIDE.md](GUIDE.md#metrics) says how to scrape the agents.

Units are those of the names; a ratio of HAMi's is in percent. Counters start at 0 with the agent. A
value that is not known has no series, or is NaN. Plain mode has no series about the API server and
the scheduler.

- The label `gpu` is the GPU's index: [RUNBOOK.md](RUNBOOK.md#a-gpu-in-the-metrics).
- Series with `namespace`, `pod` and `container` name the containers that hold slices. Scrape them
  with `honor_labels: true`, or Prometheus renames these labels. `metrics.containers: false` leaves
  the series out.
- What a container uses is read every 5 s from HAMi-core's shared region. Its processes may write
  there, so they can lie about their own container. One that has not used CUDA yet has no series.

## The agent's series

{own}

## HAMi's series

`metrics.hami` chooses: `current` (the default) serves the names that begin with `hami_`, `legacy`
the older ones, `both` all, `none` none. They are those of the vGPUmonitor of HAMi after 2.10; what
differs is in [COMPATIBILITY.md](COMPATIBILITY.md#hamis-metrics).

{hami}

## Series of the process

Those of the Prometheus client: {process}.

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
        """Whether it is one of HAMi's."""
        return not self.name.startswith((PREFIX, "process_", "python_"))

    @property
    def told_labels(self) -> str:
        """As code; empty: none."""
        return f"`{','.join(self.labels)}`" if self.labels else ""


def main(folder: Path) -> None:
    """Write the document."""
    (folder / DOCUMENT).write_text(document(), encoding="utf-8")


def document() -> str:
    """The whole text."""
    families = described()
    own = [one for one in families if one.name.startswith(PREFIX)]
    hami = [one for one in families if one.is_hamis]
    process = [one for one in families if one not in own and one not in hami]
    reasons = ", ".join(f"`{one.name.lower()}` {one.value}" for one in RefusalReason)
    return TEXT.format(
        own=table(own),
        hami=table(hami),
        process=", ".join(f"`{one.name}`" for one in process),
        reasons="\n".join(textwrap.wrap(f"{reasons}.", 100)),
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
        f"| `{one.name}` | {one.kind} | {one.told_labels} | {one.meaning} |" for one in families
    )
    return "\n".join(("| name | type | labels | meaning |", "|---|---|---|---|", *rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else ROOT)

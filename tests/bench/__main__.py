"""`python -m tests.bench`: measure the budgets; figures go to build/bench.json."""

import argparse
import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

import structlog

from tests.bench import models, real
from tests.bench.beside import lacks
from tests.bench.figures import Figure, keep, table
from tests.bench.lab import ROOT

PARTS: dict[str, Callable[[int], Coroutine[None, None, list[Figure]]]] = {
    "restarts": models.restarts,
    "events": models.events,
    "allocates": models.allocates,
    "regions": models.regions,
    "churn": models.churn,
    "real-starts": real.starts,
    "real-rest": real.rest,
    "real-allocates": real.allocates,
}
USUAL = ("restarts", "events", "allocates", "regions")


def main() -> int:
    """Measure what was asked for, print it and keep it."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    told = f"of {', '.join(PARTS)}, or real for those beside the real peers"
    known = [*PARTS, "real", []]  # the last: none is named
    parser.add_argument("parts", nargs="*", metavar="PART", choices=known, help=told)
    parser.add_argument("--runs", type=int, default=5, help="runs of which the median is told")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench.json")
    args = parser.parse_args()
    asked = {*args.parts} or {*USUAL}
    names = [name for name in PARTS if {name, name.partition("-")[0]} & asked]
    if any(name.startswith("real-") for name in names) and (reason := lacks()):
        parser.error(reason)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    figures: list[Figure] = []
    for name in names:
        sys.stderr.write(f"measuring {name} …\n")
        figures += asyncio.run(PARTS[name](args.runs))
    sys.stdout.write("\n".join(table(figures)) + "\n")
    keep(figures, args.out)
    sys.stdout.write(f"\nkept in {args.out}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m tests.bench`: measure the budgets; figures go to build/bench.json."""

import argparse
import asyncio
import dataclasses
import logging
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import structlog

from tests.bench import lab, real, rest
from tests.bench.beside import lacks
from tests.bench.figures import Figure, keep, table
from tests.bench.lab import ROOT
from tests.bench.real import allocates
from tests.bench.rest import churn, regions


def main() -> int:
    """Measure what was asked for, print it and keep it."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=f"of {', '.join(PARTS)}; the beginning of several names means them all, but not"
        f" {', '.join(LONG)}",
    )
    parser.add_argument("--runs", type=int, default=5, help="runs of which the median is told")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench.json")
    parser.add_argument("--add", action="store_true", help="keep what other parts measured before")
    args = parser.parse_args()
    try:
        names = asked(args.parts)
    except ValueError as error:
        parser.error(str(error))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    figures: list[Figure] = []
    if (beside := [one for one in names if one.startswith(REAL)]) and (reason := lacks()):
        sys.stderr.write(f"{', '.join(beside)}: left out, for {reason}\n")
        names = [one for one in names if one not in beside]
    for name in names:
        sys.stderr.write(f"measuring {name} …\n")
        measured = asyncio.run(PARTS[name](args.runs))
        figures += [dataclasses.replace(one, part=name) for one in measured]
    sys.stdout.write("\n".join(table(figures)) + "\n")
    keep(figures, args.out, add=args.add)
    sys.stdout.write(f"\nkept in {args.out}\n")
    return 0


def asked(words: Sequence[str]) -> list[str]:
    """The parts that are meant, in their order. Raises ValueError: a word means none."""
    usual = [name for name in PARTS if name not in LONG]
    meant = set() if words else {*usual}
    for word in words:
        fits = {word} & PARTS.keys() or {name for name in usual if name.startswith(f"{word}-")}
        if not fits:
            raise ValueError(f"there is no part {word}; there are {', '.join(PARTS)}")
        meant |= fits
    return [name for name in PARTS if name in meant]


PARTS: dict[str, Callable[[int], Coroutine[None, None, list[Figure]]]] = {
    "restarts": lab.restarts,
    "events": rest.events,
    "allocates": lab.allocates,
    "churn": churn,
    "regions": regions,
    "real-starts": real.starts,
    "real-rest": real.rest,
    "real-allocates": allocates,
    "real-ten-minutes": real.ten_minutes,
}
REAL = "real-"
LONG = ("churn", "real-ten-minutes")


if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m tests.bench`: measure the budgets; figures go to build/bench.json."""

import argparse
import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from tests.bench import lab, strikes
from tests.bench.figures import Figure, keep, table
from tests.bench.floor import ROOT, floors


def main() -> int:
    """Measure what was asked for, print it and keep it."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--runs", type=int, default=5, help="runs of which the median is told")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench.json")
    args = parser.parse_args()
    if unknown := set(args.parts) - PARTS.keys():
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    figures: list[Figure] = []
    for name in args.parts or PARTS:
        sys.stderr.write(f"measuring {name} …\n")
        figures += asyncio.run(_measured(name, args.runs))
    figures += _ratios(figures)
    sys.stdout.write("\n".join(table(figures)) + "\n")
    keep(figures, args.out)
    sys.stdout.write(f"\nkept in {args.out}\n")
    return 0


async def _floors(runs: int) -> list[Figure]:
    return floors(runs)


async def _pods(_: int) -> list[Figure]:
    return await lab.pods()


async def _idle(_: int) -> list[Figure]:
    return await lab.idle()


PARTS: dict[str, Callable[[int], Awaitable[list[Figure]]]] = {
    "floors": _floors,
    "starts": lab.starts,
    "restarts": lab.restarts,
    "events": strikes.events,
    "pods": _pods,
    "idle": _idle,
}


async def _measured(name: str, runs: int) -> list[Figure]:
    return await PARTS[name](runs)


def _ratios(figures: list[Figure]) -> list[Figure]:
    """The start against the floors of the same run: what is left when the machine is taken out."""
    found = {one.id: one for one in figures}
    start = found.get("exec_to_register")
    if start is None:
        return []
    return [
        Figure(
            f"start_over_{name}",
            f"exec → Register over {found[name].what}",
            "x",
            [start.shown / found[name].shown],
            "medians of this run",
        )
        for name in ("python_floor", "grpc_floor", "import_floor")
        if name in found
    ]


if __name__ == "__main__":
    raise SystemExit(main())

"""`hami-agent release`: have the running agent let go of a GPU, for work on it."""

import argparse
from collections.abc import Mapping
from typing import Any, Final

from agent.cli.gpu_action import CODES, act, add_gpu
from agent.cli.main import Subparsers

DEADLINE: Final = 15.0


def add_parser(subparsers: Subparsers) -> None:
    """The verb `release`."""
    parser = subparsers.add_parser(
        "release",
        help="let go of a GPU, for a reset, a MIG change or another driver",
        description="Has the running agent let go of a GPU, or of all: nothing new is placed on "
        "it, no handle of it stays open, and it is asked nothing until `hami-agent recheck` takes "
        "it back. Pods that have it go on, and are named: whoever resets it takes it from them. "
        "The exit code is 0 when the agent holds it no more, 1 when it does yet or pods have it, "
        + CODES,
        epilog="example: hami-agent release 3",
    )
    add_gpu(parser, "index or UUID, or `all`")


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Ask, print the answer, and return the exit code: 0, 1, 3 no agent, 4 no such GPU."""
    del environ
    return act(args, "release", DEADLINE, _told)


def _told(data: Mapping[str, Any]) -> tuple[str, bool]:
    gpus = ", ".join(data["gpus"])
    lines = [f"{gpus}: released; `hami-agent recheck` takes it back"]
    if len(data["gpus"]) > 1:
        lines = [f"{gpus}: released; `hami-agent recheck all` takes them back"]
    if data["obstacle"]:
        lines = [
            f"{gpus}: nothing new is placed on it, and the agent holds it open: {data['obstacle']}",
            "release it again later, or stop the agent for the work",
        ]
    lines += [f"held by pod {pod}: delete it first" for pod in data["heldBy"]]
    return "".join(f"{line}\n" for line in lines), data["released"] is True and not data["heldBy"]

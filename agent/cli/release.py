"""`hami-agent release`: makes the running agent release a GPU for work on it."""

import argparse
from collections.abc import Mapping
from typing import Any, Final

from agent.cli.gpu_action import CODES, act, add_gpu
from agent.cli.main import Subparsers

DEADLINE: Final = 15.0


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `release`."""
    parser = subparsers.add_parser(
        "release",
        help="release a GPU for a reset, a MIG change or another driver",
        description="Makes the running agent release a GPU, or all. Until `hami-agent recheck` "
        "takes it back, no new pod gets it and the agent neither opens nor asks it. Pods that have "
        "it go on, and are named: a reset takes the GPU from them. The exit code is 0 if the GPU "
        "is free, 1 if the agent still holds it or pods have it, " + CODES,
        epilog="example: hami-agent release 3",
    )
    add_gpu(parser, "index or UUID, or `all`")


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the verb; return the exit code: 0, 1, 3 no agent, 4 no such GPU."""
    del environ
    return act(args, "release", DEADLINE, _rendered)


def _rendered(data: Mapping[str, Any]) -> tuple[str, bool]:
    gpus = ", ".join(data["gpus"])
    lines = [f"{gpus}: released; `hami-agent recheck` takes it back"]
    if len(data["gpus"]) > 1:
        lines = [f"{gpus}: released; `hami-agent recheck all` takes them back"]
    if data["obstacle"]:
        lines = [
            f"{gpus}: no new pod gets it, but the agent still holds it open: {data['obstacle']}",
            "release it again later, or stop the agent for the work",
        ]
    lines += [f"held by pod {pod}: delete it first" for pod in data["heldBy"]]
    return "".join(f"{line}\n" for line in lines), data["released"] is True and not data["heldBy"]

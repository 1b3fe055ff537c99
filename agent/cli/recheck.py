"""`hami-agent recheck`: makes the running agent probe a GPU now, and prints its health."""

import argparse
from collections.abc import Mapping
from typing import Any, Final

from agent.cli.gpu_action import CODES, act, add_gpu
from agent.cli.main import Subparsers

DEADLINE: Final = 10.0


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `recheck`."""
    parser = subparsers.add_parser(
        "recheck",
        help="probe a GPU now and print its health",
        description="Makes the running agent probe a GPU now, or all, and prints the health of "
        "each, why, and what is needed until it is ok. A released GPU is taken back. The agent "
        "resets nothing and does not shorten the cool-down. With --was-reset you state that you "
        "reset the GPU since its last error, which drivers before 570 do not report. The exit code "
        "is 0 if each GPU is served, 1 if one is not, " + CODES,
        epilog="example: hami-agent recheck 3",
    )
    parser.add_argument(
        "--was-reset",
        action="store_true",
        help="the GPU (with `all`: each GPU) was reset since its last error: begin its cool-down",
    )
    add_gpu(parser, "index or UUID, or `all`")


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the verb; return the exit code: 0, 1, 3 no agent, 4 no such GPU."""
    del environ
    return act(args, "was-reset" if args.was_reset else "recheck", DEADLINE, _rendered)


def _rendered(data: Mapping[str, Any]) -> tuple[str, bool]:
    if "gpus" not in data:
        return _rendered_gpu(data)
    each = [_rendered_gpu(gpu) for gpu in data["gpus"]]
    if not each:
        return "this node has no GPU\n", False
    return "\n".join(text for text, _ in each), all(is_served for _, is_served in each)


def _rendered_gpu(data: Mapping[str, Any]) -> tuple[str, bool]:
    served = "served" if data["serving"] else "not served"
    answer = {
        "passed": "it answered",
        "failed": "it answered with an error",
        "lost": "the driver has lost it",
        "refused": "the driver refuses calls about it",
        "silent": "it did not answer",
    }.get(data["probe"]["outcome"], data["probe"]["outcome"])
    words = f" ({data['probe']['text']})" if data["probe"]["text"] else ""
    index = "of unknown index" if data["gpu"] is None else data["gpu"]
    lines = [
        f"GPU {index} ({data['uuid']}): {answer}{words}",
        f"{data['condition']} since {data['since']}, {served}",
    ]
    if data["text"]:
        lines.append(data["text"])
    lines += [f"needed: {step}" for step in data["missing"]]
    return "".join(f"{line}\n" for line in lines), data["serving"] is True

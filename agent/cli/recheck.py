"""`hami-agent recheck`: have the running agent ask a GPU now, and say how it is."""

import argparse
from collections.abc import Mapping
from typing import Any, Final

from agent.cli.gpu_action import CODES, act, add_gpu
from agent.cli.main import Subparsers

DEADLINE: Final = 10.0


def add_parser(subparsers: Subparsers) -> None:
    """The verb `recheck`."""
    parser = subparsers.add_parser(
        "recheck",
        help="ask a GPU now how it is",
        description="Has the running agent ask a GPU now, or all, and says how each is, why, and "
        "what has to happen until it is ok. One that was released is taken back. Nothing is reset, "
        "and no rest is cut short. With --was-reset you say that you reset it since its last "
        "error, which drivers before 570 do not tell. The exit code is 0 when each GPU that was "
        "asked is served, 1 when one is not, " + CODES,
        epilog="example: hami-agent recheck 3",
    )
    parser.add_argument(
        "--was-reset",
        action="store_true",
        help="it was reset since its last error: let it rest; with `all`: each of them was",
    )
    add_gpu(parser, "index or UUID, or `all`")


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Ask, print the answer, and return the exit code: 0, 1, 3 no agent, 4 no such GPU."""
    del environ
    return act(args, "was-reset" if args.was_reset else "recheck", DEADLINE, _told)


def _told(data: Mapping[str, Any]) -> tuple[str, bool]:
    if "gpus" not in data:
        return _told_of_one(data)
    each = [_told_of_one(one) for one in data["gpus"]]
    if not each:
        return "this node has no GPU\n", False
    return "\n".join(text for text, _ in each), all(is_served for _, is_served in each)


def _told_of_one(data: Mapping[str, Any]) -> tuple[str, bool]:
    served = "served" if data["serving"] else "not served"
    answer = {
        "passed": "it answered",
        "failed": "it answered with an error",
        "lost": "the driver reaches it no longer",
        "refused": "the driver refuses to answer for it",
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
    lines += [f"missing: {one}" for one in data["missing"]]
    return "".join(f"{line}\n" for line in lines), data["serving"] is True

"""`hami-agent recheck`: have the running agent ask a GPU now, and say how it is."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from agent.cli.api_socket import DEFAULT_SOCKET, Unreachable, call
from agent.cli.codes import NOT_FOUND, OK, PROBLEM, UNREACHABLE
from agent.cli.main import Subparsers

DEADLINE: Final = 10.0
FOUND: Final = 200
NONE_SUCH: Final = 404


def add_parser(subparsers: Subparsers) -> None:
    """The verb `recheck`."""
    parser = subparsers.add_parser(
        "recheck",
        help="ask a GPU now how it is",
        description="Has the running agent ask a GPU now, and says how the GPU is, why, and what "
        "has to happen until it is ok. Nothing is reset, and no rest is cut short. The exit code "
        "is 0 when the GPU is served, 1 when it is not.",
        epilog="example: hami-agent recheck 3",
    )
    parser.add_argument("gpu", metavar="GPU", help="index or UUID")
    parser.add_argument(
        "--socket",
        type=Path,
        default=DEFAULT_SOCKET,
        metavar="PATH",
        help=f"the agent's socket (default {DEFAULT_SOCKET})",
    )
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Ask, print the answer, and return the exit code: 0, 1, 3 no agent, 4 no such GPU."""
    del environ
    target = f"/api/v1/gpus/{quote(args.gpu, safe='')}:recheck"
    try:
        status, text = call(args.socket, "POST", target, DEADLINE)
    except Unreachable as error:
        return _fail(str(error), UNREACHABLE)
    if status != FOUND:
        return _fail(text.strip(), NOT_FOUND if status == NONE_SUCH else PROBLEM)
    try:
        document = json.loads(text)
        data = document["data"]
        told = _text(data)
        served = data["serving"] is True
    except (ValueError, LookupError, TypeError):
        return _fail(f"{args.socket} answered something else", UNREACHABLE)
    if args.output == "json":
        told = json.dumps({**document, "source": str(args.socket)}, indent=2) + "\n"
    sys.stdout.write(told)
    return OK if served else PROBLEM


def _text(data: Mapping[str, Any]) -> str:
    served = "served" if data["serving"] else "not served"
    answer = {
        "passed": "it answered",
        "failed": "it answered with an error",
        "lost": "the driver reaches it no longer",
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
    return "".join(f"{line}\n" for line in lines)


def _fail(text: str, code: int) -> int:
    sys.stderr.write(f"hami-agent recheck: {text}\n")
    return code

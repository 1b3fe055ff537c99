"""What the verbs share that have the running agent do something to a GPU."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from agent.cli.api_socket import DEFAULT_SOCKET, Unreachable, call
from agent.cli.arguments import add_output
from agent.cli.codes import NOT_FOUND, OK, PROBLEM, UNREACHABLE

FOUND: Final = 200
NONE_SUCH: Final = 404

NAME: Final = re.compile(r"[^/:]{1,64}")
"""What the agent's door takes for the name of a GPU."""

CODES: Final = "3 without an agent that answers, and 4 without such a GPU."
"""The end of the sentence on exit codes."""

Tell = Callable[[Mapping[str, Any]], tuple[str, bool]]
"""Of the answer's data: what people are told, and whether all is well."""


def add_gpu(parser: argparse.ArgumentParser, names: str) -> None:
    """The GPU, the agent's socket and `-o`. `names` says how a GPU can be named."""
    parser.add_argument("gpu", metavar="GPU", type=_name, help=names)
    parser.add_argument(
        "--socket",
        type=Path,
        default=DEFAULT_SOCKET,
        metavar="PATH",
        help=f"the agent's socket (default {DEFAULT_SOCKET})",
    )
    add_output(parser)


def _name(text: str) -> str:
    if NAME.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(f"{text[:64]!r} is no index, no UUID and not `all`")
    return text


def act(args: argparse.Namespace, action: str, deadline: float, tell: Tell) -> int:
    """Ask for the action, print the answer, and return the exit code.

    That is 0 where all is well and 1 where not, 3 without an agent, 4 without such a GPU.
    """
    target = f"/api/v1/gpus/{quote(args.gpu, safe='')}:{action}"
    try:
        status, text = call(args.socket, "POST", target, deadline)
    except Unreachable as error:
        return _fail(args.verb, str(error), UNREACHABLE)
    if status != FOUND:
        return _fail(args.verb, text.strip(), NOT_FOUND if status == NONE_SUCH else PROBLEM)
    try:
        document = json.loads(text)
        told, is_well = tell(document["data"])
    except (ValueError, LookupError, TypeError):
        return _fail(args.verb, f"{args.socket} answered something else", UNREACHABLE)
    if args.output == "json":
        told = json.dumps({**document, "source": str(args.socket)}, indent=2) + "\n"
    sys.stdout.write(told)
    return OK if is_well else PROBLEM


def _fail(verb: str, text: str, code: int) -> int:
    sys.stderr.write(f"hami-agent {verb}: {text}\n")
    return code

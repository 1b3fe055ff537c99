"""The shared part of the verbs that make the running agent act on a GPU."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import quote

from agent.cli.api_socket import Unreachable, add_socket, call
from agent.cli.arguments import TABLE, add_output
from agent.cli.codes import NOT_FOUND, OK, PROBLEM, UNREACHABLE, fail
from agent.cli.output import document
from agent.host.process import SystemClock

FOUND: Final = 200
NONE_SUCH: Final = 404

NAME: Final = re.compile(r"[^/:]{1,64}")
"""A name of a GPU that the agent's HTTP server accepts."""

CODES: Final = "3 if no agent answers, and 4 if there is no such GPU."
"""The end of the sentence on exit codes."""

Tell = Callable[[Mapping[str, Any]], tuple[str, bool]]
"""Renders the answer's data for people, and returns whether the exit code is 0."""


def add_gpu(parser: argparse.ArgumentParser, names: str) -> None:
    """Add the arguments GPU, `--socket` and `-o`. `names` says how a GPU can be named."""
    parser.add_argument("gpu", metavar="GPU", type=_name, help=names)
    add_socket(parser)
    add_output(parser)


def _name(text: str) -> str:
    if NAME.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(f"{text[:64]!r} is not an index, a UUID or `all`")
    return text


def act(args: argparse.Namespace, action: str, deadline: float, tell: Tell) -> int:
    """Request the action, print the answer, and return the exit code.

    It is 0 or 1 by `tell`, 3 if no agent answers, 4 if there is no such GPU.
    """
    target = f"/api/v1/gpus/{quote(args.gpu, safe='')}:{action}"
    try:
        status, text = call(args.socket, "POST", target, deadline)
    except Unreachable as error:
        return fail(args.verb, str(error), UNREACHABLE)
    if status != FOUND:
        return fail(args.verb, text.strip(), NOT_FOUND if status == NONE_SUCH else PROBLEM)
    try:
        said = json.loads(text)
        answer, is_good = tell(said["data"])
    except (ValueError, LookupError, TypeError):
        return fail(args.verb, f"{args.socket} did not answer as an agent", UNREACHABLE)
    if args.output != TABLE:
        kind, data, at = said["kind"], said["data"], SystemClock().now()
        answer = document(kind, data, args.output, at, str(args.socket))
    sys.stdout.write(answer)
    return OK if is_good else PROBLEM

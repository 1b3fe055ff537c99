"""Acts on the simulated GPUs of an agent that runs with --simulate, or of a sandbox.

A GPU is named by index or UUID.
"""

import argparse
import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from agent.cli.main import (
    NOT_FOUND,
    OK,
    PROBLEM,
    TABLE,
    UNREACHABLE,
    USAGE,
    Subparsers,
    Unreachable,
    add_output,
    fail,
    typed,
)
from agent.cli.output import UNFOLDED, answer, table
from agent.kit.units import Column
from agent.sandbox import hardware_talk as talk
from agent.setting import duration, whole

DEFAULT_SOCKET: Final = Path("/run/hami-agent/simulate.sock")

DEADLINE: Final = 5.0
"""Seconds for the simulation to answer."""

_COLUMNS: Final = [
    Column(title) for title in ("GPU", "UUID", "MODEL", "MEMORY", "PCI", "NUMA", "STATE", "XIDS")
]

_ACTIONS: Final[Mapping[str, tuple[type[talk.HardwareRequest], str]]] = {
    "xid": (talk.XidRequest, "79 --gpu 1"),
    "lose": (talk.LoseRequest, "--gpu 1"),
    "refuse": (talk.RefuseRequest, "--gpu 1"),
    "restore": (talk.RestoreRequest, "--gpu 1"),
    "remove": (talk.RemoveRequest, "--gpu 1"),
    "hang": (talk.HangRequest, "30s"),
    "add": (talk.AddRequest, "--profile a100"),
    "list": (talk.ListRequest, "-o json"),
}
"""The request, whose docstring is the help, and an example. A field of it is an argument."""

_FAILURES: Final = {"unknown-gpu": NOT_FOUND, "malformed": USAGE, "busy": UNREACHABLE}
"""The exit code by the reason of a refusal; else it is 1."""


_ARGUMENTS: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "xid": (
        "xid",
        {
            "type": typed(whole(1, 65535), "an XID (1 to 65535)"),
            "metavar": "number",
            "help": "the XID, 1 to 65535",
        },
    ),
    "gpu": ("--gpu", {"required": True, "metavar": "GPU", "help": "index or UUID"}),
    "seconds": (
        "seconds",
        {
            "type": typed(duration(0.001, 86400), "a duration such as 500ms, 2s or 24h, the most"),
            "metavar": "DURATION",
            "help": "at most 24h; a number alone is seconds",
        },
    ),
    "profile": ("--profile", {"help": "h100, a100, t4 or rtx3090; like GPU 0 if absent"}),
}
"""The argument that gives each field of a request."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `simulate`."""
    parser = subparsers.add_parser(
        "simulate", description=__doc__, epilog="example: hami-agent simulate xid 79 --gpu 1"
    )
    _add_globals(parser, DEFAULT_SOCKET, TABLE)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    for name, (form, words) in _ACTIONS.items():
        text, example = form.__doc__, f"example: hami-agent simulate {name} {words}"
        action = actions.add_parser(name, help=text, description=text, epilog=example)
        _add_globals(action, argparse.SUPPRESS, argparse.SUPPRESS)

        for field in form.__struct_fields__:
            flag, options = _ARGUMENTS[field]
            action.add_argument(flag, **options)


async def ask(args: argparse.Namespace) -> talk.AnyReply:
    """Send the request of the action. Raises Unreachable."""
    form, _ = _ACTIONS[args.action]
    request = form(**{name: vars(args)[name] for name in form.__struct_fields__})
    try:
        async with asyncio.timeout(DEADLINE):
            return await talk.ask(args.socket, request)
    except (talk.HardwareUnreachable, talk.HardwareSilent, TimeoutError) as error:
        silent = f"{args.socket} did not answer within {DEADLINE:g} s"
        raise Unreachable(str(error) or silent) from error


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the action, print the answer, and return the exit code.

    0 done, 1 refused, 2 wrong usage, 3 no answer at the socket, 4 no such GPU.
    """
    del environ
    reply = asyncio.run(ask(args))

    if isinstance(reply, talk.FailedReply):
        return fail("simulate", reply.text, _FAILURES.get(reply.reason, PROBLEM))

    if not isinstance(reply, talk.DoneReply):
        return fail("simulate", f"{args.socket} did not answer as a simulation", UNREACHABLE)

    lines: Iterable[str] = [reply.text]
    if args.action == "list":
        rows = [
            (
                *(str(gpu.index), gpu.uuid, gpu.name),
                "unknown" if gpu.memory_mib is None else f"{gpu.memory_mib} MiB",
                gpu.pci,
                "-" if gpu.numa is None else str(gpu.numa),
                gpu.state,
                ",".join(str(xid) for xid in gpu.xids) or "-",
            )
            for gpu in reply.gpus
        ]

        lines = table(_COLUMNS, rows, UNFOLDED)

    data = {"action": args.action, "text": reply.text, "gpus": reply.gpus}
    answer(args.output, "Simulation", data, lines, source=str(args.socket))
    return OK


def _add_globals(parser: argparse.ArgumentParser, socket: object, output: str) -> None:
    """Add the options that stand before or after the name of an action."""
    parser.add_argument(
        "--socket",
        type=Path,
        default=socket,
        metavar="PATH",
        help=f"control socket of the simulation (default {DEFAULT_SOCKET})",
    )

    add_output(parser, output)

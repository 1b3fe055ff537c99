"""Runs the verb of a command line. Only that verb's module is imported: `run` must start fast."""

import argparse
import errno
import gc
import importlib
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

from agent.cli.arguments import Parser, nearest
from agent.cli.codes import INTERRUPTED, OK, UNWRITTEN, USAGE
from agent.cli.inherited import Unwritten, drop_output
from agent.errors import cap

VERBS: Mapping[str, tuple[str, str]] = {
    "run": ("agent.cli.run", "run the agent on this node"),
    "sandbox": ("agent.cli.sandbox", "run the agent against simulated peers, on any machine"),
    "simulate": (
        "agent.cli.simulate",
        "act on simulated GPUs: xid, lose, refuse, restore, hang, add, remove",
    ),
    "status": ("agent.cli.status", "show a node: GPUs, their health, who holds them, what changed"),
    "top": ("agent.cli.top", "show this node live: GPUs and who holds them"),
    "recheck": ("agent.cli.recheck", "probe a GPU now and print its health"),
    "release": ("agent.cli.release", "release a GPU for work on it"),
    "explain": ("agent.cli.explain", "explain why a pod is pending or refused, gate by gate"),
    "cordon": ("agent.cli.cordon", "place no new pods on a GPU"),
    "uncordon": ("agent.cli.uncordon", "let new pods be placed on a cordoned GPU again"),
    "config": ("agent.cli.config", "show or check settings"),
    "doctor": (
        "agent.cli.doctor",
        "check how this node is set up, and what the scheduler reads of it",
    ),
    "bundle": ("agent.cli.bundle", "write a support archive of this node"),
    "uninstall": ("agent.cli.uninstall", "remove what the agent wrote on the Node"),
    "decode": ("agent.cli.decode", "decode a HAMi annotation to JSON"),
    "completion": ("agent.cli.completion", "print a script that completes command lines"),
    "version": ("agent.cli.version", "print the version"),
}

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001 -- argparse names no public type


class Verb(Protocol):
    """The module of a verb."""

    def add_parser(self, subparsers: Subparsers) -> None:
        """Add the verb's parser; its `--help` has an example."""
        ...

    def main(self, args: argparse.Namespace, environ: Mapping[str, str]) -> int:
        """Run the verb and return the exit code."""
        ...


def dispatch(argv: Sequence[str], environ: Mapping[str, str], program: str = "hami-agent") -> int:
    """Parse `argv`, run its verb and return the exit code (2 for a usage error).

    `program`: how help names the command.
    """
    code = OK
    try:
        code = _dispatch(["version"] if list(argv) == ["--version"] else argv, environ, program)
        sys.stdout.flush()
    except* KeyboardInterrupt:
        code = INTERRUPTED
    except* Unwritten as group:  # a group, because a verb may have tasks
        code = _unwritten(group)
    return code


def _unwritten(group: BaseExceptionGroup[Unwritten]) -> int:
    """Print why the answer cannot be written; nothing if its reader, such as `head`, ended."""
    drop_output()
    while isinstance(error := group.exceptions[0], BaseExceptionGroup):
        group = error
    if error.errno == errno.EPIPE:
        return 128 + signal.SIGPIPE
    sys.stderr.write(f"hami-agent: standard output cannot be written: {error.strerror}\n")
    return UNWRITTEN


def _dispatch(argv: Sequence[str], environ: Mapping[str, str], program: str) -> int:
    parser, subparsers = _parser(program)
    verb = next((word for word in argv if not word.startswith("-")), None)
    if verb is not None and verb not in VERBS:
        known = "`hami-agent --help` lists all"
        text = f"there is no verb {cap(verb, 64)}{nearest(verb, VERBS)}; {known}"
        sys.stderr.write(f"hami-agent: {text}\n")
        return USAGE
    module: Verb | None = None
    leads = bool(argv) and argv[0] == verb
    for name, (path, text) in VERBS.items():
        if name == verb:
            module = importlib.import_module(path)
            module.add_parser(subparsers)
            if not gc.isenabled():
                gc.freeze()  # loaded modules stay: collecting them would take 30 ms
                gc.enable()
        elif not leads:  # nobody will see the list of all verbs
            subparsers.add_parser(name, help=text)
    try:
        args = parser.parse_args(argv)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else USAGE
    if module is None:
        parser.print_help()
        return USAGE
    return module.main(args, environ)


def whole_parser(program: str = "hami-agent") -> argparse.ArgumentParser:
    """The parser with the options of every verb; it imports all of them."""
    parser, subparsers = _parser(program)
    for path, _ in VERBS.values():
        module: Verb = importlib.import_module(path)
        module.add_parser(subparsers)
    return parser


def _parser(program: str) -> tuple[argparse.ArgumentParser, Subparsers]:
    parser: argparse.ArgumentParser = Parser(
        prog=program,
        description="Shares the NVIDIA GPUs of one node among Kubernetes pods, beside HAMi's "
        "scheduler.",
        epilog="example: hami-agent sandbox --gpus 8 --profile h100",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    return parser, parser.add_subparsers(dest="verb", metavar="VERB")

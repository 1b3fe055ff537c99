"""The verbs. Only the module of the one in use is imported, for `run` must start fast."""

import argparse
import gc
import importlib
import signal
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

from agent.cli.codes import INTERRUPTED

VERBS: Mapping[str, tuple[str, str]] = {
    "run": ("agent.cli.run", "run the agent on this node"),
    "sandbox": ("agent.cli.sandbox", "run the agent against simulated peers, on any machine"),
    "simulate": (
        "agent.cli.simulate",
        "act on simulated GPUs: xid, lose, refuse, restore, hang, add, remove",
    ),
    "recheck": ("agent.cli.recheck", "ask a GPU now how it is"),
    "config": ("agent.cli.config", "show or check settings"),
    "doctor": ("agent.cli.doctor", "look at this node before the agent starts on it"),
    "uninstall": ("agent.cli.uninstall", "take what the agent wrote off the Node"),
    "decode": ("agent.cli.decode", "decode a HAMi annotation to JSON"),
    "version": ("agent.cli.version", "print the version"),
}

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001 -- argparse names no public type


class Verb(Protocol):
    """What a verb's module offers."""

    def add_parser(self, subparsers: Subparsers) -> None:
        """Add the verb's own parser, `--help` with an example included."""
        ...

    def main(self, args: argparse.Namespace, environ: Mapping[str, str]) -> int:
        """Do it and return the exit code."""
        ...


def dispatch(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Parse `argv`, run its verb and return the exit code (2 for a usage error)."""
    verb = next((word for word in argv if word in VERBS), None)
    parser, subparsers = _parser()
    module: Verb | None = None
    for name, (path, text) in VERBS.items():
        if name == verb:
            module = importlib.import_module(path)
            module.add_parser(subparsers)
            if not gc.isenabled():
                gc.freeze()  # what was loaded stays: to go through it takes 30 ms, for nothing
                gc.enable()
        else:
            subparsers.add_parser(name, help=text)
    try:
        args = parser.parse_args(argv)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 2
    if module is None:
        parser.print_help()
        return 2
    try:
        return module.main(args, environ)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        return 0


def _parser() -> tuple[argparse.ArgumentParser, Subparsers]:
    parser = argparse.ArgumentParser(
        prog="hami-agent",
        description="Shares the NVIDIA GPUs of one node among Kubernetes pods, beside HAMi's "
        "scheduler.",
        epilog="example: hami-agent sandbox --gpus 8 --profile h100",
        allow_abbrev=False,
    )
    return parser, parser.add_subparsers(dest="verb", metavar="VERB")

"""Runs the verb of a command line: its parser, its exit codes, and `hami-agent version`.

Only the module of that verb is imported: `run` must start fast.
"""

import argparse
import enum
import gc
import importlib
import platform
import signal
import sys
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeAlias

from typing_extensions import override

from agent import __version__
from agent.cli.output import Unwritten, answer, drop_output
from agent.errors import AgentError, ApiError, ApiNotFound, SettingsError, cap
from agent.setting import ValueType, WrongValue


class Exit(enum.IntEnum):
    """How a verb ends. The exit codes of `run` are in agent.errors.

    - `PROBLEM`: the command ran, and its answer is that something is wrong.
    - `UNREACHABLE`: the agent or the API server did not answer.
    - `NOT_FOUND`: there is no such Node, GPU, pod or entry.
    - `INCOMPLETE`: the answer was given, but a part of the data could not be read.
    - `WARNED`: there are only warnings, and `--strict` was given.
    - `UNWRITTEN`: the answer could not be written.
    - `INTERRUPTED`: 128 and the number of SIGINT, as shells have it.
    """

    OK = 0
    PROBLEM = 1
    USAGE = 2
    UNREACHABLE = 3
    NOT_FOUND = 4
    INCOMPLETE = 5
    WARNED = 6
    UNWRITTEN = 74
    INTERRUPTED = 130


class Unreachable(AgentError):  # noqa: N818 -- the state, not the call, is the error
    """What the verb reads does not answer."""


class NotThere(AgentError):  # noqa: N818 -- names what was found
    """There is no such Node or GPU."""


def code_of(error: AgentError) -> Exit:
    """The exit code of a verb that ends with this error."""
    if isinstance(error, NotThere | ApiNotFound):
        return Exit.NOT_FOUND

    # Without a status the API server did not answer. Settings: those of the way to it.
    if isinstance(error, Unreachable | SettingsError):
        return Exit.UNREACHABLE
    is_silent = isinstance(error, ApiError) and not error.status
    return Exit.UNREACHABLE if is_silent else Exit.PROBLEM


def fail(verb: str, text: str, code: int) -> int:
    """Say on standard error why the verb fails, safe to show; return the exit code."""
    sys.stderr.write(f"hami-agent {verb}: {cap(text, 4096)}\n")
    return code


# The verbs, and the choice among them.

VERBS: Mapping[str, str] = {
    "run": "run the agent on this node",
    "sandbox": "run the agent against simulated peers, on any machine",
    "simulate": "act on simulated GPUs: xid, lose, refuse, restore, hang, add, remove",
    "status": "show a node: GPUs, their health, who holds them, what changed",
    "top": "show this node live: GPUs and who holds them",
    "explain": "explain why a pod is pending or refused, gate by gate",
    "recheck": "probe a GPU now and print its health",
    "release": "release a GPU for work on it",
    "cordon": "place no new pods on a GPU",
    "uncordon": "let new pods be placed on a cordoned GPU again",
    "config": "show or check settings",
    "doctor": "check how this node is set up, and what the scheduler reads of it",
    "runbook": "print what an id in a message means and what to do",
    "bundle": "write a support archive of this node",
    "uninstall": "remove what the agent wrote on the Node",
    "decode": "decode a HAMi annotation to JSON",
    "completion": "print a script that completes command lines",
    "version": "print the version",
}
"""What each verb does, in the order of the help."""

_MODULES = {
    "version": "main",
    "top": "status",
    **dict.fromkeys(("recheck", "release", "cordon", "uncordon", "uninstall"), "node"),
    "simulate": "sandbox",
    **dict.fromkeys(("runbook", "bundle", "completion"), "support"),
}
"""The module in `agent.cli` of a verb that is not named like its module."""

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001 -- argparse names no public type


def dispatch(argv: Sequence[str], environ: Mapping[str, str], program: str = "hami-agent") -> int:
    """Parse `argv`, run its verb and return the exit code (2 for a usage error).

    `program`: how help names the command.
    """
    code: int = Exit.OK
    try:
        code = _dispatch(["version"] if list(argv) == ["--version"] else argv, environ, program)
        sys.stdout.flush()
    except* KeyboardInterrupt:
        code = Exit.INTERRUPTED
    except* Unwritten as group:  # a group, because a verb may have tasks
        code = _unwritten(group)

    return code


def _unwritten(group: BaseExceptionGroup[Unwritten]) -> int:
    """Print why the answer cannot be written; nothing if its reader, such as `head`, ended."""
    drop_output()
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]

    why = error.__cause__
    if isinstance(why, BrokenPipeError):
        return 128 + signal.SIGPIPE

    said = f"standard output cannot be written: {getattr(why, 'strerror', why)}"
    sys.stderr.write(f"hami-agent: {said}\n")
    return Exit.UNWRITTEN


def _dispatch(argv: Sequence[str], environ: Mapping[str, str], program: str) -> int:
    """Load the module of the verb, parse the rest of the line and run it."""
    parser, subparsers = _parser(program)
    verb = argv[0] if argv else "-"

    # A module of verbs has `add_parser(subparsers)` and `main(args, environ) -> exit code`. The
    # docstring of the module, or of a verb's function, is what its help says.
    module: types.ModuleType | None = None
    if verb in VERBS:
        module = _module_of(verb)
        module.add_parser(subparsers)
        if not gc.isenabled():
            gc.freeze()  # loaded modules stay: collecting them would take 30 ms
            gc.enable()
    elif verb.startswith("-"):  # the help lists all verbs
        for name, text in VERBS.items():
            subparsers.add_parser(name, help=text)
    else:
        text = f"there is no verb {cap(verb, 64)}; `hami-agent --help` lists all"
        sys.stderr.write(f"hami-agent: {text}\n")
        return Exit.USAGE

    try:
        args, unknown = parser.parse_known_args(argv)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else Exit.USAGE
    if module is None:
        parser.print_help()
        return Exit.USAGE
    if unknown:
        text = f"unknown argument {cap(' '.join(unknown))}; see `hami-agent {verb} --help`"
        return fail(verb, text, Exit.USAGE)

    try:
        code: int = module.main(args, environ)
    except AgentError as error:
        return fail(verb, str(error), code_of(error))

    return code


def _module_of(verb: str) -> types.ModuleType:
    return importlib.import_module(f"agent.cli.{_MODULES.get(verb, verb)}")


def parser_of(verb: str) -> argparse.ArgumentParser:
    """The parser with the options of this verb."""
    parser, subparsers = _parser()
    _module_of(verb).add_parser(subparsers)
    return parser


def _parser(program: str = "hami-agent") -> tuple[argparse.ArgumentParser, Subparsers]:
    parser: argparse.ArgumentParser = Parser(
        prog=program,
        description="Shares the NVIDIA GPUs of one node among Kubernetes pods, beside HAMi's "
        "scheduler.",
        epilog="example: hami-agent sandbox --gpus 8 --profile h100",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    return parser, parser.add_subparsers(dest="verb", metavar="VERB")


# Parses command lines; a mistake gets one sentence that names the verb.

TABLE: Final = "table"
FORMS: Final = (TABLE, "json", "yaml")

_FORM_WORDS: Final = {
    TABLE: "for people",
    "wide": "with all columns",
    "json": "everything, for programs",
    "yaml": "the same as YAML",
    "name": "names alone",
}
"""What each form of the output is, in the help."""


class _WholeWords(argparse.HelpFormatter):
    """argparse's form of help, without breaks inside a path or an option that has hyphens."""

    @override
    def _split_lines(self, text: str, width: int) -> list[str]:
        words = " ".join(text.split())
        # Whoever typed `kubectl hami` can paste the example as it is printed.
        if self._prog.startswith("kubectl hami"):
            words = words.replace("hami-agent ", "kubectl hami ")

        return textwrap.wrap(words, width, break_on_hyphens=False, break_long_words=False)

    @override
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = self._split_lines(text, width - len(indent))
        return "\n".join(f"{indent}{line}" for line in lines)


class Parser(argparse.ArgumentParser):
    """argparse's parser without the usage before each error: `run` has sixty options."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 -- argparse types them
        super().__init__(*args, **{"formatter_class": _WholeWords, **kwargs})

    @override
    def error(self, message: str) -> NoReturn:
        self.exit(Exit.USAGE, f"{self.prog}: {message}; see `{self.prog} --help`\n")


def typed(kind: ValueType, what: str) -> Callable[[str], Any]:
    """The `type` of an argument: a text that `kind` refuses is reported as not `what`."""

    def read(text: str) -> object:
        try:
            return kind(text)
        except WrongValue as error:
            raise argparse.ArgumentTypeError(f"{cap(text, 64)!r} is not {what}") from error

    return read


def add_output(
    parser: argparse.ArgumentParser, default: str = TABLE, forms: Sequence[str] = FORMS
) -> None:
    """Add `-o table|json|yaml`. `forms`: those of the verb."""
    words = "; ".join(f"{form}: {_FORM_WORDS[form]}" for form in forms)
    parser.add_argument("-o", "--output", choices=forms, default=default, help=words)


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `version`."""
    parser = subparsers.add_parser("version", epilog="example: hami-agent version -o json")
    add_output(parser)


def main(args: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    """Run the verb `version`: print the agent's and Python's versions."""
    python = platform.python_version()
    answer(
        args.output,
        "Version",
        {"version": __version__, "python": python, "registerProfile": "json", "stateVersion": 1},
        [f"hami-agent {__version__} (Python {python}, register annotation json, state version 1)"],
    )
    return Exit.OK

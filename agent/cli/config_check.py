"""`hami-agent config check`: checks settings files and prints what each node would get."""

import argparse
import asyncio
import dataclasses
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from agent.cli.arguments import TABLE, add_output
from agent.cli.codes import OK, PROBLEM
from agent.cli.documents import document
from agent.cli.main import Subparsers
from agent.cli.settings_args import add_settings, flags, looked, sources
from agent.cli.settings_view import plain, table
from agent.cli.terminal import UNFOLDED, terminal_width
from agent.codec.gojson import fold
from agent.codec.places import read_json, read_yaml
from agent.core.errors import SettingsError, cap
from agent.core.state.last_good import SourceFile
from agent.host.clock import SystemClock
from agent.host.identity import host_name
from agent.host.worker import Worker
from agent.settings.fields import DEFAULT
from agent.settings.hami import NODES, SECTION
from agent.settings.own_file import refuse_object
from agent.settings.reading import is_json, read_text
from agent.settings.sections import build, check_shares
from agent.settings.sources import Faults, NodeFacts, Sources, first_of
from agent.settings.table import SECTIONS
from agent.settings.values import NodeValues, make_plan

INDENT: Final = "  "
OTHERS: Final = "other nodes"

DEVICE_CONFIG: Final = "HAMi's device-config.yaml"
NODE_CONFIG: Final = "HAMi's config.json"
STDIN: Final = Path("/dev/stdin")
OWN: Final = "the agent's own file"


class _NodeSettings(msgspec.Struct, frozen=True):
    """The settings of one node that differ from their defaults."""

    title: str
    profiles: tuple[str, ...]
    settings: tuple[dict[str, object], ...]
    lines: tuple[str, ...]


def add_check(verbs: Subparsers) -> None:
    """Add the verb `config check`."""
    parser = verbs.add_parser(
        "check",
        help="check settings files and print what each node would get",
        description="Checks files without starting anything: the agent's own config.yaml and "
        "HAMi's device-config.yaml and config.json, recognised by their content. Without FILE: "
        "the files and variables that `run` would use here.",
        epilog="example: hami-agent config check config.yaml device-config.yaml config.json "
        "--node gpu-1 --label zone=a --gpu 'NVIDIA H100 80GB HBM3'",
    )
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="a file to check; - is standard input"
    )
    parser.add_argument(
        "--node",
        action="append",
        default=[],
        metavar="NAME",
        help="a node to print, may be repeated; without it: all nodes that the files name",
    )
    parser.add_argument(
        "--label",
        action="append",
        type=_label,
        default=[],
        metavar="KEY=VALUE",
        help="a label of the nodes",
    )
    parser.add_argument(
        "--gpu",
        action="append",
        metavar="MODEL",
        help="a GPU of the nodes; repeat it: their number limits the slices",
    )
    add_output(parser)
    add_settings(parser, "[FILE ...]")


def check(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print what each node gets, or every fault in one sentence; return the exit code."""
    try:
        plan = _plan(args, environ)
        nodes = _nodes(args, plan, terminal_width(environ, UNFOLDED) - len(INDENT))
    except SettingsError as error:
        sys.stderr.writelines(f"hami-agent: {text}\n" for text in error.every)
        if args.output != TABLE:
            _write({"ok": False, "error": str(error), "errors": list(error.every)}, args.output)
        return PROBLEM
    notes = list(_notes(args, plan))
    if args.output != TABLE:
        each = [_plain(node) for node in nodes]
        said = {"ok": True, "warnings": list(plan.warnings), "notes": notes, "nodes": each}
        _write(said, args.output)
        return OK
    sys.stderr.writelines(f"hami-agent: warning: {text}\n" for text in plan.warnings)
    sys.stderr.writelines(f"hami-agent: note: {text}\n" for text in notes)
    sys.stdout.writelines(line for node in nodes for line in node.lines)
    sys.stdout.write("ok\n")
    return OK


def _plan(args: argparse.Namespace, environ: Mapping[str, str]) -> NodeValues:
    """Read the sources. Raises one SettingsError with the faults of all of them."""
    if not args.files:
        return asyncio.run(looked(sources(args, environ))).taken()
    faults = Faults()
    given = asyncio.run(_given(args, faults))
    with faults.kept():
        plan = make_plan(given)
    faults.refuse()
    texts = (given.device_config, given.own, given.node_config)
    empty = [text.name for text in texts if text is not None and not text.content.strip()]
    warnings = [f"{name}: is empty; nothing is taken" for name in empty]
    return dataclasses.replace(plan, warnings=(*warnings, *plan.warnings))


def _nodes(args: argparse.Namespace, plan: NodeValues, columns: int) -> Sequence[_NodeSettings]:
    """The settings of each node. Raises SettingsError."""
    faults = Faults()
    nodes: list[_NodeSettings] = []
    asked = list(_facts(args, plan, _labels(args)))
    applied = (one for _, facts in asked for one in plan.applied(facts))
    for profile in applied if args.node else plan.profiles:
        with faults.kept():
            profile.faults.refuse()
    for title, facts in asked:
        with faults.kept():
            nodes.append(_node(plan, title, facts, columns))
    faults.refuse()
    return nodes


def _notes(args: argparse.Namespace, plan: NodeValues) -> Sequence[str]:
    """Name the profiles that are left out because the command line lacks what they need."""
    left_out: list[str] = []
    for profile in plan.profiles:
        if profile.match.labels is not None and plan.labelled and not args.label:
            name = cap(profile.name, 64) or f"at {profile.where}"
            left_out.append(f"the profile {name} is left out: it needs labels: --label KEY=VALUE")
    return first_of(left_out, "profiles")


def _write(data: dict[str, object], form: str) -> None:
    sys.stdout.write(document("ConfigCheck", data, form, SystemClock().now()))


def _plain(node: _NodeSettings) -> dict[str, object]:
    return {
        "name": node.title,
        "profiles": list(node.profiles),
        "settings": list(node.settings),
    }


def _labels(args: argparse.Namespace) -> Mapping[str, str] | None:
    """The labels of the nodes; None when the command line gives none."""
    return dict(args.label) if args.label else None


def _label(text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise argparse.ArgumentTypeError(f"{text}: expected KEY=VALUE")
    return key, value


async def _given(args: argparse.Namespace, faults: Faults) -> Sources:
    """Read the named files by their kind, without the variables of this environment."""
    files: dict[str, SourceFile] = {}
    async with Worker("settings", 1) as worker:
        for path in (*args.files, *([args.config] if args.config else [])):
            with faults.kept():
                text = await read_text(STDIN if path == Path("-") else path, worker)
                kind = _kind(text)
                if kind in files:
                    fault = f"is {kind}, and so is {files[kind].name}; name only one"
                    raise SettingsError(f"{path}: {fault}")
                files[kind] = text
    return Sources(
        flags=flags(args),
        device_config=files.get(DEVICE_CONFIG),
        own=files.get(OWN),
        node_config=files.get(NODE_CONFIG),
    )


def _kind(text: SourceFile) -> str:
    """Which of the three files it is."""
    if is_json(text):
        try:
            keys = [key for key, _, _ in read_json(text.content, text.name).pairs(fold)]
        except SettingsError:  # raised again when the file is read by its kind
            if text.name.endswith(".json") or NODES.encode() in text.content.lower():
                return NODE_CONFIG
        else:
            return _kind_by(keys, NODE_CONFIG)
    document = read_yaml(text.content, text.name)
    if document is None or document.null:
        return OWN
    refuse_object(document)
    return _kind_by([key for key, _, _ in document.pairs()], OWN)


def _kind_by(keys: Collection[str], otherwise: str) -> str:
    """By the keys at the top; those of JSON are in lower case."""
    if NODES in keys:
        return NODE_CONFIG if otherwise == NODE_CONFIG else OWN
    if SECTION in keys:
        return DEVICE_CONFIG
    return OWN if SECTIONS & set(keys) else otherwise


def _facts(
    args: argparse.Namespace, plan: NodeValues, labels: Mapping[str, str] | None
) -> Iterator[tuple[str, NodeFacts]]:
    gpus = None if args.gpu is None else frozenset(map(str, range(len(args.gpu))))
    for name in args.node or plan.names():
        yield name, NodeFacts(name, labels, gpus)
    if not args.node:
        yield OTHERS, NodeFacts("", labels, gpus)


def _node(plan: NodeValues, title: str, facts: NodeFacts, columns: int) -> _NodeSettings:
    values = plan.resolve(facts)
    gpus = max(1, len(facts.gpus or ()))
    build(values, host_name=facts.name or host_name(), gpus=gpus)
    check_shares(values)
    changed = [setting for setting in values.values() if setting.origin != DEFAULT]
    heads: Sequence[str] = (title, *(f"profile {name}" for name in values.profiles))
    lines = [", ".join(heads) + ("\n" if changed else ": all defaults\n")]
    if changed:
        rows = table(changed, origin=True, columns=columns)
        lines += [f"{INDENT}{row}" for row in list(rows)[1:]]
    return _NodeSettings(title, values.profiles, tuple(map(plain, changed)), tuple(lines))

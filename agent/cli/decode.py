"""`hami-agent decode`: any HAMi annotation value, from an argument or stdin, as JSON."""

import argparse
import dataclasses
import datetime as dt
import json
import sys
from collections.abc import Callable, Mapping

from agent.cli.codes import OK, PROBLEM, USAGE
from agent.cli.main import Subparsers
from agent.codec.nodelock import decode_node_lock
from agent.codec.pod import decode_pod_devices
from agent.codec.register import decode_register
from agent.core.errors import MalformedText

MAX_CHARS = 4 * 1024 * 1024


def add_parser(subparsers: Subparsers) -> None:
    """The verb `decode`."""
    parser = subparsers.add_parser(
        "decode",
        help="decode a HAMi annotation to JSON",
        description="Decodes a register annotation, a pod's devices or a node lock.",
        epilog="example: kubectl get node n1 -o jsonpath="
        "'{.metadata.annotations.hami\\.io/node-nvidia-register}' | hami-agent decode",
    )
    parser.add_argument(
        "value", nargs="?", help="the annotation's value; read from stdin if absent"
    )
    parser.add_argument(
        "--kind", choices=tuple(DECODERS), help="what it is; found out by itself if absent"
    )


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the decoded value, or one sentence that says where it is malformed."""
    del environ
    text = args.value if args.value is not None else sys.stdin.read(MAX_CHARS).strip()
    if not text:
        sys.stderr.write("hami-agent: nothing to decode: give a value or pipe one in\n")
        return USAGE
    kind = args.kind or _kind(text)
    try:
        data = DECODERS[kind](text)
    except MalformedText as error:
        sys.stderr.write(f"hami-agent: not a valid {kind} value: {error}\n")
        return PROBLEM
    document = {"apiVersion": "hami-agent/v1", "kind": kind, "data": data}
    sys.stdout.write(json.dumps(document, indent=2, default=_plain) + "\n")
    return OK


def _kind(text: str) -> str:
    """What a value most likely is, by its first characters."""
    if text.startswith(("[", "null")):
        return "register"
    return "lock" if text[:4].isdigit() and text[4:5] == "-" else "devices"


def _register(text: str) -> object:
    return [dataclasses.asdict(gpu) for gpu in decode_register(text)]


def _devices(text: str) -> object:
    return [[dataclasses.asdict(share) for share in group] for group in decode_pod_devices(text)]


def _lock(text: str) -> object:
    lock = decode_node_lock(text)
    return {"since": lock.stamp, "namespace": lock.namespace, "pod": lock.name}


DECODERS: Mapping[str, Callable[[str], object]] = {
    "register": _register,
    "devices": _devices,
    "lock": _lock,
}


def _plain(value: object) -> object:
    return value.isoformat() if isinstance(value, dt.datetime) else str(value)

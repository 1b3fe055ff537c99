"""`hami-agent decode`: any HAMi annotation value, from an argument or stdin, as JSON."""

import argparse
import dataclasses
import datetime as dt
import json
import re
import sys
from collections.abc import Callable, Mapping

from agent.cli.codes import OK, PROBLEM, USAGE
from agent.cli.main import Subparsers
from agent.codec.handshake import HandshakeWord, decode_handshake
from agent.codec.nodeconfig import decode_nodeconfig
from agent.codec.nodelock import decode_node_lock
from agent.codec.pod import decode_pod_devices
from agent.codec.register import decode_register
from agent.codec.register_colon import decode_register_colon
from agent.core.errors import MalformedText

MAX_CHARS = 4 * 1024 * 1024

FORMS = (
    "a register annotation (a JSON array, or records of 7 or 9 fields that end in `:`), "
    "a pod's devices (UUID,type,MiB,percent: and ;), a node lock (time,namespace,pod), "
    "a handshake (Reported, Requesting or Deleted and a time) or a nodeconfig"
)


def add_parser(subparsers: Subparsers) -> None:
    """The verb `decode`."""
    parser = subparsers.add_parser(
        "decode",
        help="decode a HAMi annotation to JSON",
        description=f"Decodes {FORMS}.",
        epilog="example: kubectl get node n1 -o jsonpath="
        "'{.metadata.annotations.hami\\.io/node-nvidia-register}' | hami-agent decode",
    )
    parser.add_argument(
        "value", nargs="?", help="the annotation's value; read from stdin if absent"
    )
    parser.add_argument(
        "--kind", choices=tuple(DECODERS), help="what it is; found out by its form if absent"
    )


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the decoded value, or one sentence that says where it is malformed."""
    del environ
    text = args.value if args.value is not None else sys.stdin.read(MAX_CHARS).strip()
    if not text:
        sys.stderr.write("hami-agent: nothing to decode: give a value or pipe one in\n")
        return USAGE
    kind = args.kind or _kind(text)
    if kind is None:
        sys.stderr.write(f"hami-agent: this is no value of HAMi's: expected {FORMS}\n")
        return PROBLEM
    try:
        data = DECODERS[kind](text)
    except MalformedText as error:
        sys.stderr.write(f"hami-agent: not a valid {kind} value: {error}\n")
        return PROBLEM
    document = {"apiVersion": "hami-agent/v1", "kind": kind, "data": data}
    sys.stdout.write(json.dumps(document, indent=2, default=_plain) + "\n")
    return OK


def _kind(text: str) -> str | None:
    """What a value is by its form, well-formed or not; None: it has no form of HAMi's."""
    return next((kind for kind, has_form in _FORMS if has_form(text)), None)


def _is_nodeconfig(text: str) -> bool:
    return text.startswith("{") and '"nodeconfig"' in text.lower()


def _is_handshake(text: str) -> bool:
    return text.startswith(tuple(word.value for word in HandshakeWord))


def _is_lock(text: str) -> bool:
    return re.match("[0-9]{4}-[0-9]{2}-[0-9]{2}T", text) is not None


def _is_register(text: str) -> bool:
    """A JSON array, or a first record with more fields than a share and a number for its second."""
    if _is_json(text):
        return True
    fields = text.lstrip(":").split(":")[0].split(",")
    return ";" not in text and len(fields) > 4 and not fields[1].isalpha()


def _is_devices(text: str) -> bool:
    """A share, whole or with `;` behind it, or the separators that are left of consumed groups."""
    pieces = [piece for piece in re.split("[:;]", text) if piece]
    fields = max((piece.count(",") for piece in pieces), default=0) + 1
    return fields >= 4 or (";" in text and (fields > 1 or not pieces))


def _is_json(text: str) -> bool:
    return text.startswith("[") or text == "null"


_FORMS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("nodeconfig", _is_nodeconfig),
    ("handshake", _is_handshake),
    ("lock", _is_lock),
    ("register", _is_register),
    ("devices", _is_devices),
)


def _register(text: str) -> object:
    gpus = decode_register(text) if _is_json(text) else decode_register_colon(text)
    for place, gpu in enumerate(gpus):
        if not gpu.uuid:
            raise MalformedText(f"register annotation, GPU {place} has no id")
    return [dataclasses.asdict(gpu) for gpu in gpus]


def _devices(text: str) -> object:
    groups = decode_pod_devices(text)
    if not any(groups):
        raise MalformedText("devices text names no GPU: it is foreign, or all of it is consumed")
    return [[dataclasses.asdict(share) for share in group] for group in groups]


def _lock(text: str) -> object:
    lock = decode_node_lock(text)
    return {"since": lock.stamp, "namespace": lock.namespace, "pod": lock.name}


def _handshake(text: str) -> object:
    found = decode_handshake(text)
    return {"word": found.word.value, "time": found.stamp}


DECODERS: Mapping[str, Callable[[str], object]] = {
    "register": _register,
    "devices": _devices,
    "lock": _lock,
    "handshake": _handshake,
    "nodeconfig": decode_nodeconfig,
}


def _plain(value: object) -> object:
    return value.isoformat() if isinstance(value, dt.datetime) else str(value)

"""`hami-agent decode`: prints any HAMi annotation value as JSON."""

import argparse
import contextlib
import datetime as dt
import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from agent.cli.main import OK, PROBLEM, USAGE, Subparsers, add_output, fail
from agent.cli.output import answer
from agent.cluster import PHASE_ALLOCATING, PHASE_FAILED, PHASE_SUCCESS
from agent.errors import MalformedText, SettingsError, cap
from agent.hami.annotations import (
    HandshakeWord,
    decode_handshake,
    decode_node_lock,
    decode_pod_devices,
    is_json_form,
    vendor_words,
)
from agent.sandbox.scheduler.registry import decode_either, decode_scores
from agent.settings.files import decode_nodeconfig

MAX_CHARS = 4 * 1024 * 1024
"""Characters of a value: far more than the 256 KiB that all annotations of an object may have."""

STDIN: Final = "-"

FORMS = (
    "a register annotation (a JSON array, or records of 7 or 9 fields that end in `:`), "
    "a pod's devices (UUID,type,MiB,percent: and ;), a node lock (time,namespace,pod), "
    "a handshake (Reported, Requesting or Deleted and a time), a score annotation, "
    "a bind-phase, a time in Unix seconds, a cordon (UUIDs and commas) or a nodeconfig"
)
"""What can be decoded, for help and refusals."""

_CONSUMED: Final = re.compile("(?:(?:,,0,0:)*;)+")
"""Consumed groups, and what a scheduler writes for containers without GPUs."""

_OBJECT: Final = re.compile(r'\s*(\{.*"apiVersion"|apiVersion:|---|items:)', re.DOTALL)
"""The beginning of a whole object in JSON or YAML."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `decode`."""
    parser = subparsers.add_parser(
        "decode",
        description=f"Decodes {FORMS}.",
        epilog="example: hami-agent decode 'GPU-1,NVIDIA,4096,30:;'",
    )
    parser.add_argument(
        "value", nargs="?", help="the annotation's value; read from stdin if absent or -"
    )

    parser.add_argument(
        "--kind",
        choices=tuple(DECODERS),
        metavar="KIND",
        help=f"{', '.join(DECODERS)}; recognised by the value's form if absent",
    )

    add_output(parser, "json", ("json", "yaml"))


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the decoded value, or where it is malformed; return the exit code."""
    del environ
    text = args.value or ""
    # Nobody waits for input that was not asked.
    if args.value == STDIN or (args.value is None and not sys.stdin.isatty()):
        try:
            text = sys.stdin.read(MAX_CHARS + 1)
        except OSError as error:
            return fail("decode", f"standard input cannot be read: {error.strerror}", PROBLEM)

    if not (text := bare(text)):
        return fail("decode", "nothing to decode: give a value or pipe one in", USAGE)

    kind = args.kind or _kind(text)
    try:
        answer(args.output, kind, DECODERS[kind](text), ())
    except (MalformedText, SettingsError) as error:
        raise MalformedText(f"not a valid {kind} value: {error}") from error

    return OK


def _kind(text: str) -> str:
    """The kind of a value by its form. Raises MalformedText, which says what to give instead."""
    if len(text) > MAX_CHARS:
        raise MalformedText(f"the value has more than {MAX_CHARS} characters; no annotation does")

    if kind := kind_of(text):
        return kind

    if _OBJECT.match(text):
        raise MalformedText(
            "this is a whole object: give the value of one annotation, as kubectl prints it with "
            "-o jsonpath='{.metadata.annotations.hami\\.io/node-nvidia-register}'"
        )

    raise MalformedText(
        f"this is not a value of HAMi's: expected {FORMS}; for a file: hami-agent decode < FILE"
    )


def _register(text: str) -> object:
    if is_json_form(text) and MIG_KEY in keys_of_first(text):
        raise MalformedText("this is hami.io/vgpu-mig-allocations, which is JSON: read it as it is")

    gpus = decode_either(text)
    for place, gpu in enumerate(gpus):
        if not gpu.uuid:
            raise MalformedText(f"register annotation, GPU {place} has no id")

    return [msgspec.structs.asdict(gpu) for gpu in gpus]


def _devices(text: str) -> object:
    """The groups; a consumed one, and one of a container without GPUs, is empty."""
    groups, words = decode_pod_devices(text), vendor_words(text)
    if not any(groups) and not _CONSUMED.fullmatch(text):
        raise MalformedText("devices text names no GPU")

    last = -1 if text.endswith(";") else None  # the last group is only the end of the text
    return [
        [
            {"uuid": share.uuid, "type": word, **msgspec.structs.asdict(share)}
            for share, word in zip(group, types, strict=True)
        ]
        for group, types in zip(groups[:last], words, strict=False)
    ]


def _lock(text: str) -> object:
    lock = decode_node_lock(text)
    return {"since": lock.stamp, "namespace": lock.namespace, "pod": lock.name}


def _time(text: str) -> object:
    try:
        return dt.datetime.fromtimestamp(int(text), dt.UTC)
    except (ValueError, OverflowError) as error:
        raise MalformedText(f"{cap(text)!r} is not a time in Unix seconds") from error


def _phase(text: str) -> object:
    if text not in PHASES:
        raise MalformedText(f"bind-phase {cap(text)!r} is none of {', '.join(PHASES)}")

    return text


DECODERS: Mapping[str, Callable[[str], object]] = {
    "register": _register,
    "devices": _devices,
    "lock": _lock,
    "handshake": lambda text: {
        "word": decode_handshake(text).word.value,
        "time": decode_handshake(text).stamp,
    },
    "score": lambda text: [
        {"uuid": uuid, "score": scores} for uuid, scores in decode_scores(text).items()
    ],
    "phase": _phase,
    "time": _time,
    # As HAMi reads it: trimmed, without empty ones.
    "cordon": lambda text: [uuid.strip() for uuid in text.split(",") if uuid.strip()],
    "nodeconfig": decode_nodeconfig,
}
"""What decodes each kind. Raises MalformedText, and of a nodeconfig SettingsError."""


# Recognises by its form alone which of HAMi's annotations a value belongs to.
#
# A text may have a form and still be malformed: the decoder of that form then says where.

PHASES: Final = (PHASE_ALLOCATING, PHASE_SUCCESS, PHASE_FAILED)
MIG_KEY: Final = "containerindex"
"""A key of `hami.io/vgpu-mig-allocations`, which is JSON."""

_KEYED: Final = re.compile(r"[\"']?hami\.io/[A-Za-z0-9._-]+[\"']?\s*[:=]\s*(.*?),?", re.DOTALL)
_LOCK: Final = re.compile("[0-9]{4}-[0-9]{2}-[0-9]{2}T")
_SECONDS: Final = re.compile("[0-9]{10,11}")
"""Unix seconds from 2001 on."""
_UUID: Final = re.compile(r"\s*(GPU|MIG)-[^,:;\s]+\s*")


def bare(text: str) -> str:
    """Strip the key and the quotes from a value that was copied from kubectl's output.

    No value of HAMi's begins with a quote or a key.
    """
    match = _KEYED.fullmatch(text.strip())
    value = (match[1] if match else text).strip()
    if len(value) < 2 or value[0] != value[-1] or value[0] not in "'\"":
        return value

    inner = value[1:-1]
    if value[0] == '"':
        with contextlib.suppress(ValueError):
            inner = str(json.loads(value))
    return inner.strip()


def kind_of(text: str) -> str | None:
    """The kind of a value by its form, well-formed or not; None: it has no form of HAMi's."""
    return next((kind for kind, has_form in _FORMS.items() if has_form(text)), None)


def keys_of_first(text: str) -> frozenset[str]:
    """The keys of the first object of a JSON array, in lower case; none for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return frozenset()
    first = value[0] if isinstance(value, list) and value else None
    return frozenset(map(str.lower, first)) if isinstance(first, dict) else frozenset()


def _is_register(text: str) -> bool:
    """A JSON array, or a first record with more than four fields and a number as its second."""
    if text.startswith("[") or text == "null":
        return True
    fields = text.lstrip(":").split(":")[0].split(",")
    return ";" not in text and len(fields) > 4 and not fields[1].isalpha()


def _is_cordon(text: str) -> bool:
    uuids = [part for part in text.split(",") if part.strip()]
    return bool(uuids) and all(map(_UUID.fullmatch, uuids))


def _is_devices(text: str) -> bool:
    """A share of four fields, a shorter one before `;`, or only separators (consumed groups)."""
    pieces = [piece for piece in re.split("[:;]", text) if piece]
    fields = max((piece.count(",") for piece in pieces), default=0) + 1
    return fields >= 4 or (";" in text and (fields > 1 or not pieces))


_FORMS: Mapping[str, Callable[[str], bool]] = {
    "nodeconfig": lambda text: text.startswith("{") and '"nodeconfig"' in text.lower(),
    "handshake": lambda text: text.startswith(tuple(word.value for word in HandshakeWord)),
    "lock": lambda text: _LOCK.match(text) is not None,
    "time": lambda text: _SECONDS.fullmatch(text) is not None,
    "phase": lambda text: text in PHASES,
    "score": lambda text: text.startswith("[") and "score" in keys_of_first(text),
    "cordon": _is_cordon,
    "register": _is_register,
    "devices": _is_devices,
}

"""`hami-agent decode`: prints any HAMi annotation value as JSON."""

import argparse
import datetime as dt
import re
import sys
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from agent.cli.main import OK, PROBLEM, USAGE, Subparsers, add_output, fail
from agent.cli.output import answer
from agent.errors import MalformedText, cap
from agent.hami.pod import (
    MIG_KEY,
    PHASES,
    bare,
    decode_node_lock,
    decode_pod_devices,
    keys_of_first,
    kind_of,
    vendor_words,
)
from agent.hami.register import decode_handshake, is_json_form
from agent.sandbox.scheduler.registry import decode_either, decode_scores
from agent.settings.hami import decode_nodeconfig

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
    except MalformedText as error:
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
"""What decodes each kind. Raises MalformedText."""

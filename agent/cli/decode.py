"""`hami-agent decode`: prints HAMi's annotation values as JSON."""

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from agent.cli.main import Exit, Subparsers, add_output, fail
from agent.cli.output import answer
from agent.errors import MalformedText
from agent.hami.annotations import decode_either, decode_node_lock, decode_pod_devices, vendor_words
from agent.sandbox.scheduler.registry import decode_handshake

MAX_CHARS: Final = 4 * 1024 * 1024
"""Characters that are read: far more than the 256 KiB of all annotations of an object."""

FORMS: Final = (
    "a register annotation (a JSON array, or records of 7 or 9 fields that end in `:`), "
    "a pod's devices (UUID,type,MiB,percent: and ;), a node lock (time,namespace,pod) "
    "or a handshake (Reported, Requesting or Deleted and a time)"
)
"""What can be decoded, for help and refusals."""

_KEYED: Final = re.compile(r"[\"']?hami\.io/[A-Za-z0-9._-]+[\"']?\s*[:=]\s*(.*?),?", re.DOTALL)


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `decode`."""
    parser = subparsers.add_parser(
        "decode",
        description=f"Decodes {FORMS}.",
        epilog="example: hami-agent decode 'GPU-1,NVIDIA,4096,30:;'",
    )
    told = "the annotation's value; read from stdin if absent or -"
    parser.add_argument("value", nargs="?", help=told)
    add_output(parser, "json", ("json", "yaml"))


def main(args: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    """Print the decoded value, or where it is malformed; return the exit code."""
    text = args.value or ""
    # Nobody waits for input that was not asked.
    if text == "-" or (args.value is None and not sys.stdin.isatty()):
        try:
            text = sys.stdin.read(MAX_CHARS)
        except OSError as error:
            return fail("decode", f"standard input cannot be read: {error.strerror}", Exit.PROBLEM)

    if not (text := bare(text)):
        return fail("decode", "nothing to decode: give a value or pipe one in", Exit.USAGE)

    # A text may have a form and still be malformed: the decoder of that form then says where.
    kind = next((kind for kind, (has_form, _) in KINDS.items() if has_form(text)), "")
    if not kind:
        said = "this is not the value of one of HAMi's annotations: expected"
        raise MalformedText(f"{said} {FORMS}; for a file: hami-agent decode < FILE")

    try:
        answer(args.output, kind, KINDS[kind][1](text), ())
    except MalformedText as error:
        raise MalformedText(f"not a valid {kind} value: {error}") from error

    return Exit.OK


def bare(text: str) -> str:
    """Strip the key and the quotes from a value that was copied from kubectl's output.

    No value of HAMi's begins with a quote or a key.
    """
    match = _KEYED.fullmatch(text.strip())
    value = (match[1] if match else text).strip()
    if value.startswith('"'):
        with contextlib.suppress(ValueError):
            value = str(json.loads(value))
    return value.strip("' \n")


# The kinds: what their values look like, and what is in one.


def _is_register(text: str) -> bool:
    """A JSON array, or a first record with more than four fields and a number as its second."""
    fields = text.lstrip(":").split(":")[0].split(",")
    is_colon = ";" not in text and len(fields) > 4 and not fields[1].isalpha()
    return text.startswith("[") or text == "null" or is_colon


def _register(text: str) -> object:
    gpus = decode_either(text)
    if not all(gpu.uuid for gpu in gpus):
        raise MalformedText("a GPU has no id")
    return [msgspec.structs.asdict(gpu) for gpu in gpus]


def _is_devices(text: str) -> bool:
    """A share of four fields, a shorter one before `;`, or only separators (consumed groups)."""
    pieces = [piece for piece in re.split("[:;]", text) if piece]
    fields = max((piece.count(",") for piece in pieces), default=0) + 1
    return fields >= 4 or (";" in text and (fields > 1 or not pieces))


def _devices(text: str) -> object:
    """The groups; a consumed one, and one of a container without GPUs, is empty."""
    last = -1 if text.endswith(";") else None  # the last group is only the end of the text
    return [
        [
            {"uuid": share.uuid, "type": word, **msgspec.structs.asdict(share)}
            for share, word in zip(group, types, strict=True)
        ]
        for group, types in zip(decode_pod_devices(text)[:last], vendor_words(text), strict=False)
    ]


def _lock(text: str) -> object:
    lock = decode_node_lock(text)
    return {"since": lock.stamp, "namespace": lock.namespace, "pod": lock.name}


KINDS: Final[Mapping[str, tuple[Callable[[str], object], Callable[[str], object]]]] = {
    "handshake": (
        re.compile("Reported|Requesting|Deleted").match,
        lambda text: dict(zip(("word", "time"), decode_handshake(text), strict=True)),
    ),
    "lock": (re.compile("[0-9]{4}-[0-9]{2}-[0-9]{2}T").match, _lock),
    "register": (_is_register, _register),
    "devices": (_is_devices, _devices),
}
"""By kind, whether a text has the form of its values, and what decodes one.

The first form that a text has is its kind. Decoders raise MalformedText.
"""

"""The same messages twice: ours from agent.wire, and Google's, built from protos/ at test time.

A value of either kind is described by plain data: a dict from field numbers to values, in which a
message is a dict again, a map a dict of strings and a repeated field a list.
"""

import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parents[2] / "protos"
ROOMS = ("v1beta1", "v1")
Plain = Mapping[int, Any]


def descriptors(folder: Path) -> descriptor_pool.DescriptorPool:
    """All of protos/, compiled by Google's compiler into a pool of its own."""
    compiled = folder / "protos.bin"
    names = sorted(path.name for path in PROTOS.glob("*.proto"))
    assert 0 == protoc.main(["protoc", f"-I{PROTOS}", f"--descriptor_set_out={compiled}", *names])

    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes()).file:
        pool.Add(file)
    return pool


def message_names() -> list[str]:
    """Full names of all messages of protos/, read without compiling anything."""
    names = []
    for path in sorted(PROTOS.glob("*.proto")):
        package = ""
        for line in path.read_text().splitlines():
            if line.startswith("package "):
                package = line.removeprefix("package ").rstrip(";")
            if line.startswith("message "):
                names.append(f"{package}.{line.split()[1]}")
    return names


def our_class(name: str) -> Any:
    """The generated class of the message `name`."""
    for room in ROOMS:
        importlib.import_module(f"agent.wire.{room}")
    pool = importlib.import_module("agent.wire.message_pool").default_message_pool
    return pool.url_to_type[f"type.googleapis.com/{name}"]


def is_message(field: FieldDescriptor) -> bool:
    return field.type == FieldDescriptor.TYPE_MESSAGE


def is_map(field: FieldDescriptor) -> bool:
    return is_message(field) and field.message_type.GetOptions().map_entry


def theirs(kind: Descriptor, plain: Plain) -> Message:
    """Google's message with these values."""
    message = message_factory.GetMessageClass(kind)()
    for number, value in plain.items():
        field = kind.fields_by_number[number]
        if is_map(field):
            getattr(message, field.name).update(value)
        elif is_message(field) and field.is_repeated:
            target = getattr(message, field.name)
            target.extend(theirs(field.message_type, item) for item in value)
        elif is_message(field):
            getattr(message, field.name).CopyFrom(theirs(field.message_type, value))
            getattr(message, field.name).SetInParent()
        elif field.is_repeated:
            getattr(message, field.name).extend(value)
        else:
            setattr(message, field.name, value)
    return message


def ours(kind: Descriptor, plain: Plain) -> Any:
    """Our message with these values."""
    made = our_class(kind.full_name)
    names = {f.metadata["betterproto"].number: f.name for f in dataclasses.fields(made)}
    values = {}
    for number, value in plain.items():
        field = kind.fields_by_number[number]
        if is_message(field) and not is_map(field):
            inner = field.message_type
            many = field.is_repeated
            values[names[number]] = (
                [ours(inner, item) for item in value] if many else ours(inner, value)
            )
        else:
            values[names[number]] = value
    return made(**values)


SCALARS: Mapping[int, tuple[Any, ...]] = {
    FieldDescriptor.TYPE_STRING: ("", "a", "\x00 é\U0001f600" * 40),
    FieldDescriptor.TYPE_BOOL: (False, True),
    FieldDescriptor.TYPE_INT32: (0, 1, -1, 2**31 - 1, -(2**31)),
    FieldDescriptor.TYPE_INT64: (0, 1, -1, 2**63 - 1, -(2**63)),
    FieldDescriptor.TYPE_UINT64: (0, 1, 127, 128, 2**64 - 1),
}
"""The default, the least and the greatest values of each type."""


def values(field: FieldDescriptor) -> Iterator[Any]:
    """Values of the field. Entries of a map have no order on the wire: a map of one at most."""
    if is_map(field):
        yield from ({}, {"": ""}, {"a": "b"})
        return
    ones = [*plain_values(field.message_type)] if is_message(field) else SCALARS[field.type]
    yield from ([], [ones[0]], [*ones]) if field.is_repeated else ones


def plain_values(kind: Descriptor) -> Iterator[dict[int, Any]]:
    """Values of the message: nothing, each field alone with each of its values, and all at once."""
    given = {field.number: [*values(field)] for field in kind.fields}
    yield {}
    yield from ({number: value} for number, all_of in given.items() for value in all_of)
    yield {number: all_of[-1] for number, all_of in given.items()}

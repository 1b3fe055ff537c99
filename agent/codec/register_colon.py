"""The register annotation in the form for schedulers up to and including 2.7.1: records, no JSON.

    text = { record ":" }    record = UUID "," slices "," MiB "," percent "," type "," NUMA ","
                                      health [ "," index "," mode ]

Source: HAMi v2.10 pkg/device/devices.go, DecodeNodeDevices (7 fields were HAMi v2.4's).
"""

import collections
import re
from collections.abc import Iterable

import msgspec

from agent.codec.gojson import INT32, INT64
from agent.codec.meaning import same
from agent.codec.register import RegisteredGpu, decode_register, registered, told
from agent.core.cluster.annotations import TEXT_LIMIT
from agent.core.errors import MalformedText, cap
from agent.core.inventory.gpu import GpuUuid
from agent.core.inventory.inventory import Inventory

WHAT = "register annotation"
SHORT = 7
LENGTHS = (SHORT, 9)
"""Fields of a record. Only HAMi v2.4 wrote and read 7."""
DEFAULT_MODE = "hami-core"
"""The mode of a record with 7 fields."""

_NUMBER = re.compile(r"([+-]?)0*([0-9]{1,19})")
"""Go's ParseInt in base 10: a sign and digits, no space, no underscore; leading zeros apart."""
_TRUE = frozenset({"1", "t", "T", "TRUE", "true", "True"})
_FALSE = frozenset({"0", "f", "F", "FALSE", "false", "False"})

_SEPARATORS = re.compile("[,:]")


def is_json_form(text: str) -> bool:
    """Whether a register annotation has the JSON form, and not that of records."""
    return text.lstrip().startswith("[") or text == "null"


def decode_either(text: str) -> tuple[RegisteredGpu, ...]:
    """Decode a register annotation of either form. Raises MalformedText."""
    return decode_register(text) if is_json_form(text) else decode_register_colon(text)


def registered_colon(inventory: Inventory) -> tuple[RegisteredGpu, ...]:
    """The elements for the inventory; these schedulers expect `NVIDIA-` before every name.

    Source: HAMi v2.7.1 pkg/device-plugin/nvidiadevice/nvinternal/plugin/register.go.
    """
    return tuple(
        msgspec.structs.replace(gpu, type_name=f"NVIDIA-{shared.gpu.name}")
        for gpu, shared in zip(registered(inventory), told(inventory), strict=True)
    )


def encode_register_colon(gpus: Iterable[RegisteredGpu]) -> str:
    """Encode the GPUs in the given order, in records of 9 fields.

    A separator inside a name, which would break the text, becomes a space.
    Source: HAMi v2.10 pkg/device/devices.go, EncodeNodeDevices.
    """
    return "".join(",".join(_record(gpu)) + ":" for gpu in gpus)


def _record(gpu: RegisteredGpu) -> tuple[str, ...]:
    values = (
        gpu.uuid,
        gpu.split_count,
        gpu.registered_mib,
        gpu.core_percent,
        gpu.type_name,
        gpu.numa,
        "true" if gpu.healthy else "false",
        gpu.index,
        gpu.mode,
    )
    return tuple(_SEPARATORS.sub(" ", str(value)) for value in values)


def decode_register_colon(text: str) -> tuple[RegisteredGpu, ...]:
    """Decode the GPUs in the text's order; empty records are skipped.

    Raises:
        MalformedText: no `:`, a record without 7 or 9 fields, a number or boolean that Go does not
            read, a negative index, or no GPU.
    """
    if len(text) > TEXT_LIMIT:
        raise MalformedText(f"{WHAT} is over {TEXT_LIMIT} characters")
    if ":" not in text:
        raise MalformedText(f"{WHAT} has no `:`, which ends each record")
    records = [record for record in text.split(":") if record]
    if not records:
        raise MalformedText(f"{WHAT} names no GPU")
    return tuple(_gpu(record, f"{WHAT}, GPU {place}") for place, record in enumerate(records))


def same_meaning_colon(one: str | None, other: str | None) -> bool:
    """True when such a scheduler reads the same GPUs from both; see agent.codec.meaning.same.

    Records of 7 and of 9 fields differ: v2.4 reads only 7.
    """
    return same(one, other, _meaning)


def _meaning(text: str) -> tuple[collections.Counter[int], collections.Counter[RegisteredGpu]]:
    lengths = collections.Counter(record.count(",") for record in text.split(":") if record)
    return lengths, collections.Counter(decode_register_colon(text))


def _gpu(record: str, where: str) -> RegisteredGpu:
    fields = record.split(",")
    if len(fields) not in LENGTHS:
        raise MalformedText(f"{where}: {cap(record)!r} has {len(fields)} fields; expected 7 or 9")
    uuid, count, memory, cores, type_name, numa, health = fields[:7]
    index, mode = fields[7:] or ("0", DEFAULT_MODE)
    return RegisteredGpu(
        uuid=GpuUuid(uuid),
        index=_number(index, (0, INT64[1]), f"{where}, index"),
        split_count=_number(count, INT32, f"{where}, count"),
        registered_mib=_number(memory, INT32, f"{where}, memory"),
        core_percent=_number(cores, INT32, f"{where}, cores"),
        type_name=type_name,
        numa=_number(numa, INT64, f"{where}, NUMA node"),
        mode=mode,
        healthy=_truth(health, f"{where}, health"),
    )


def _number(text: str, bounds: tuple[int, int], where: str) -> int:
    match = _NUMBER.fullmatch(text)
    value = int(match[1] + match[2]) if match else None
    low, high = bounds
    if value is None or not low <= value <= high:
        raise MalformedText(f"{where} is {cap(text)!r}, not an integer from {low} to {high}")
    return value


def _truth(text: str, where: str) -> bool:
    if text not in _TRUE | _FALSE:
        raise MalformedText(f"{where} is {cap(text)!r}, neither true nor false")
    return text in _TRUE

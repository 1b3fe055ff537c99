"""HAMi-core's shared region: what is refused, clamped, torn and written.

HAMi-core's shared region against 24 files that HAMi-core wrote, and HAMi's own reader.
"""

import datetime as dt
import struct
from typing import Any

import pytest

from agent.hami.region import (
    HEAD_SIZE,
    LAYOUTS,
    MAGIC,
    MemoryUse,
    Region,
    RegionGpu,
    RegionOffsets,
    RegionProcess,
    RegionState,
)
from tests.fakes.regions import RegionReading
from tests.hami_regions import document, file_ids, mutate, read_bytes, region_file

EACH = pytest.mark.parametrize("offsets", LAYOUTS, ids=lambda offsets: offsets.layout)
TWO = {"v0": "v0-two", "v1.1": "v11-two", "v1.1s": "v11s-two", "v1.2": "v12-two"}


def two(offsets: RegionOffsets) -> bytearray:
    """A real file of the layout, with two GPUs and two processes."""
    return bytearray(region_file(TWO[offsets.layout]).content)


def crowd(offsets: RegionOffsets, processes: int, gpus: int) -> bytearray:
    """A file with so many processes, copies of the first one."""
    content = two(offsets)
    slot = content[offsets.slots :][: offsets.slot_size]
    content[offsets.slots : offsets.slots + processes * offsets.slot_size] = slot * processes
    struct.pack_into("<Q", content, offsets.gpu_count, gpus)
    struct.pack_into("<i", content, offsets.tail, processes)
    return content


@EACH
def test_the_size_with_and_without_the_last_byte_is_right_and_no_other(offsets):
    content = two(offsets) + bytes(2)
    states = [read_bytes(content[: offsets.size + more]).state for more in (-1, 0, 1, 2)]
    refused, readable = RegionState.UNREADABLE, RegionState.READABLE
    assert [refused, readable, readable, refused] == states


@EACH
@pytest.mark.parametrize("left", [0, HEAD_SIZE - 1, HEAD_SIZE, 1_000_000, 1_197_896, 2_008_900])
def test_a_file_that_is_shortened_while_it_is_read_is_refused(offsets, left):
    content = two(offsets)[: min(left, offsets.tail)]
    reading = read_bytes(content, size=offsets.size)
    assert "it became shorter while it was read" == reading.reason


@EACH
@pytest.mark.parametrize(
    "uuid",
    [b"GPU-" + b"a" * 92, b"G" * 96, b"\x80", b"GPU-\xff", b"gpu-1", b"GPU-", b"GPU-a b", b"MIG"],
    ids=["without end", "no UUID", "no text", "not ASCII", "case", "no number", "a space", "cut"],
)
@pytest.mark.parametrize("index", [0, 15])
def test_a_uuid_that_is_none_is_refused_wherever_it_is(offsets, uuid, index):
    content = two(offsets)
    at = offsets.uuids + 96 * index
    content[at : at + 96] = uuid.ljust(96, b"\0")
    reason = f"no layout of HAMi-core has its size of {len(content)} bytes and its first fields"
    assert reason == read_bytes(content).reason


@EACH
@pytest.mark.parametrize(
    ("raw", "count"), [(-(2**31), 0), (-1, 0), (0, 0), (2, 2), (1024, 1024), (2**31 - 1, 1024)]
)
def test_the_process_count_is_clamped(offsets, raw, count):
    content = crowd(offsets, 1024, 2)
    struct.pack_into("<i", content, offsets.tail, raw)
    assert count == len(read_bytes(content).region.processes)


@EACH
def test_more_processes_and_gpus_than_any_work_has_are_not_read(offsets):
    reading = read_bytes(crowd(offsets, 1024, 16))
    assert "1024 processes on 16 GPUs are more than are read" == reading.reason


@EACH
@pytest.mark.parametrize(("pid", "status"), [(0, 1), (-5, 1), (5, 0), (0, 0)])
def test_a_slot_without_a_process_is_left_out(offsets, pid, status):
    content = two(offsets)
    struct.pack_into("<i", content, offsets.slots, pid)
    struct.pack_into("<i", content, offsets.slots + offsets.status, status)
    assert 1 == len(read_bytes(content).region.processes)


def expected(layout: str, fields: dict[str, Any]) -> Region:
    """The region of these fields; HAMi-core's text for them is the vectors'."""
    count = fields["device_num"]
    last = fields.get("last_kernel_time")
    return Region(
        layout=layout,
        gpus=tuple(RegionGpu(fields["uuids"][i], fields["limit"][i]) for i in range(count)),
        processes=tuple(
            process_of(slot, count)
            for slot in fields["procs_nonzero"]
            if slot["counted"] and slot["pid"] and slot["status"]
        ),
        is_limiting=fields["utilization_switch"] != 0,
        recent_kernel=fields["recent_kernel"],
        priority=fields["priority"],
        last_kernel=dt.datetime.fromtimestamp(last, dt.UTC) if last else None,
    )


def process_of(slot: dict[str, Any], count: int) -> RegionProcess:
    used = [slot["used"].get(str(i), {}) for i in range(count)]
    words = ("context", "module", "data", "total")
    return RegionProcess(
        pid=slot["pid"],
        memory=tuple(MemoryUse(*(part.get(word, 0) for word in words)) for part in used),
        sm_percent=tuple(slot["device_util"].get(str(i), {}).get("sm", 0) for i in range(count)),
    )


@pytest.mark.parametrize("name", file_ids())
def test_each_field_is_read_as_hami_core_wrote_it(name):
    file = region_file(name)
    assert RegionReading(RegionState.READABLE, expected(file.layout, file.fields)) == read_bytes(
        file.content
    )


@EACH
def test_the_offsets_are_those_of_the_compiled_struct(offsets: RegionOffsets):
    known = document()["layouts"][offsets.layout]
    at = {name: place for name, (_, place, *_) in known["region"].items()}
    slot, tail = known["slot"], offsets.tail

    assert document()["magic"] == MAGIC
    assert {
        "device_num": offsets.gpu_count,
        "uuids": offsets.uuids,
        "limit": offsets.memory_limits,
        "sm_limit": offsets.memory_limits + 8 * 16,
        "procs": offsets.slots,
        "proc_num": tail,
        "utilization_switch": tail + 4,
        "recent_kernel": tail + 8,
        "priority": tail + 12,
    }.items() <= at.items()
    assert (known["struct_size"], known["version"]) == (
        offsets.size,
        list(offsets.version) if offsets.version else None,
    )
    assert (slot["size"], slot["used"][1], slot["device_util"][1], slot["status"][1]) == (
        offsets.slot_size,
        offsets.used,
        offsets.utilisation,
        offsets.status,
    )
    sizes = known["memory"]["size"], known["util"]["size"]
    assert sizes == (offsets.memory_size, offsets.utilisation_size)


@pytest.mark.parametrize("mutation", document()["derived"], ids=lambda one: one["id"])
def test_a_damaged_file_is_judged_by_what_is_wrong_with_it(mutation):
    reading = read_bytes(mutate(mutation))

    match mutation["expect"]:
        case "initialising":
            assert RegionReading(RegionState.INITIALISING) == reading
        case "ok" | "ok_unstable_slot":
            base = region_file(mutation["base"]).content
            assert read_bytes(base) == reading
        case "clamp_or_refuse":
            assert RegionState.READABLE == reading.state
            assert 16 >= len(reading.region.gpus)
            assert 1024 >= len(reading.region.processes)
        case refusal:
            assert refusal.startswith("refuse_")
            assert RegionState.UNREADABLE == reading.state
            assert reading.reason.startswith("no layout of HAMi-core has its size of ")

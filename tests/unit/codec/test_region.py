"""HAMi-core's shared region: what is refused, clamped, torn and written."""

import struct

import pytest

from agent.hami.region import HEAD_SIZE, LAYOUTS, RegionOffsets, RegionState
from tests.hami_regions import read_bytes, region_file

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

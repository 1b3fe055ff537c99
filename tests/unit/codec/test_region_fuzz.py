"""Whatever a tenant writes, and whenever: a reading comes back, and what it costs is bounded."""

import random
import struct

import pytest

from agent.hami.region import (
    HEAD_SIZE,
    LAYOUTS,
    MAX_GPUS,
    MAX_PROCESSES,
    MAX_USES,
    NoRegion,
    RegionOffsets,
    read_region,
)
from agent.usage import use_of
from tests.hami_regions import region_file
from tests.unit.codec.test_region import TWO
from tests.unit.core.usage.test_usage import NOW, reading

WORDS = (*(0, 1, 2, 3, 15, 16, 17, 1023, 1024, 2**31 - 1, 2**31, 2**32 - 1), 19920718)
SIZES = (0, 1, 4, 11, 12, HEAD_SIZE, 804680, 804681, 10 << 30, 2**63 - 1)
BOUND = HEAD_SIZE + 24 + MAX_PROCESSES * 1960
FILES = [(one, region_file(TWO[one.layout]).content) for one in LAYOUTS]


def change(chance: random.Random, offsets: RegionOffsets) -> tuple[int, bytes]:
    """Where to write what: mostly into the fields that decide how the rest is read."""
    places = (
        range(0, offsets.memory_limits, 4),
        range(offsets.tail, offsets.tail + 16, 4),
        range(offsets.slots, offsets.slots + 3 * offsets.slot_size, 4),
    )
    at = chance.choice(chance.choice(places))
    new = chance.choice(
        (struct.pack("<I", chance.choice(WORDS)), struct.pack("<Q", 2**63), chance.randbytes(96))
    )
    return at, new[: offsets.size - at]


def attack(chance: random.Random) -> int:
    """Let a file be read that is changed before, and sometimes meanwhile; the bytes asked for."""
    (offsets, whole), asked = chance.choice(FILES), 0
    content = bytearray(whole)
    size = chance.choice(SIZES) if chance.random() < 0.2 else len(whole)
    left = chance.randrange(len(whole)) if chance.random() < 0.1 else len(whole)
    changes = [change(chance, offsets) for _ in range(chance.randrange(1, 5))]
    late = chance.randrange(len(changes) + 1)

    def write(them: list[tuple[int, bytes]]) -> None:
        for at, new in them:
            content[at : at + len(new)] = new

    def pread(length: int, offset: int) -> bytes:
        nonlocal asked
        asked += length
        window = bytes(content[offset : min(offset + length, left)])
        write(changes[late:])
        return window

    write(changes[:late])
    try:
        region = read_region(size, pread)
    except NoRegion as error:
        assert len(error.sums.reason) < 100  # noqa: PT017 -- either outcome is one
    else:
        assert len(region.gpus) <= MAX_GPUS
        assert len(region.processes) * len(region.gpus) <= MAX_USES
        use_of(reading(*region.processes, gpus=region.gpus), NOW)
    return asked


@pytest.mark.parametrize(
    ("seed", "times"),
    [(1, 1000), *(pytest.param(100 + n, 250_000, marks=pytest.mark.slow) for n in range(4))],
)
@pytest.mark.timeout(1200)
def test_every_attack_ends_in_a_reading(seed: int, times: int):
    chance = random.Random(seed)  # noqa: S311 -- repeatable
    assert BOUND >= max(attack(chance) for _ in range(times))

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
WIDE = (2**63, 2**64 - 1)
SIZES = (0, 1, 4, 11, 12, HEAD_SIZE, 804680, 804681, 10 << 30, 2**63 - 1)


class RegionTenant:
    """A file that is changed before it is read, and sometimes while it is."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 -- repeatable
        whole = {one: region_file(TWO[one.layout]).content for one in LAYOUTS}
        self.files = [(one, content, bytearray(content)) for one, content in whole.items()]

    def attack(self) -> int:
        """Change a file and let it be read; return how many bytes were asked for."""
        offsets, whole, content = self.random.choice(self.files)
        size, asked, view = len(whole), 0, memoryview(content)
        if self.random.random() < 0.2:
            size = self.random.choice((*SIZES, *(one.size for one in LAYOUTS)))
        left = self.random.randrange(size) if size and self.random.random() < 0.1 else len(content)
        changes = [self.change(offsets) for _ in range(self.random.randrange(1, 5))]
        late = [changes.pop()] if self.random.random() < 0.3 else []

        def change(them: list[tuple[int, bytes]]) -> None:
            for at, new in them:
                view[at : at + len(new)] = new

        def pread(length: int, offset: int) -> bytes:
            nonlocal asked
            asked += length
            window = bytes(view[offset : min(offset + length, left)])
            change(late)
            return window

        change(changes)
        try:
            region = read_region(size, pread)
        except NoRegion as error:
            assert len(error.sums.reason) < 100  # noqa: PT017 -- either outcome is one
        else:
            assert len(region.gpus) <= MAX_GPUS
            assert len(region.processes) * len(region.gpus) <= MAX_USES
            use_of(reading(*region.processes, gpus=region.gpus), NOW)
        change([(at, whole[at : at + len(new)]) for at, new in (*changes, *late)])
        return asked

    def change(self, offsets: RegionOffsets) -> tuple[int, bytes]:
        """Where to write what: mostly into the fields that decide how the rest is read."""
        chance = self.random.random()
        if chance < 0.3:
            at = self.random.randrange(0, offsets.memory_limits, 4)
        elif chance < 0.305:
            at = offsets.tail
        elif chance < 0.5:
            at = offsets.tail + self.random.randrange(4, 16, 4)
        else:
            at = offsets.slots + self.random.randrange(0, 3 * offsets.slot_size, 4)
        known = self.random.choice(
            (
                struct.pack("<I", self.random.choice(WORDS)),
                struct.pack("<Q", self.random.choice(WIDE)),
            )
        )
        noise = self.random.randbytes(self.random.choice((1, 4, 8, 96)))
        return at, self.random.choice((known, noise))[: offsets.size - at]


BOUND = HEAD_SIZE + 24 + MAX_PROCESSES * 1960


def test_thousands_of_changes_end_in_a_reading():
    tenant = RegionTenant(1)

    assert BOUND >= max(tenant.attack() for _ in range(3000))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(4))
def test_a_million_changes_end_in_a_reading(seed):
    tenant = RegionTenant(100 + seed)

    assert BOUND >= max(tenant.attack() for _ in range(250_000))

"""The model of libvgpu.so against the files that HAMi-core's own code wrote."""

import datetime as dt
import re

import pytest

from agent.hami.region import read_region
from agent.sandbox.hami_core import HamiCoreRegion, limit_of
from tests.hami_regions import document, file_ids, region_file

FILES = [
    name
    for name in file_ids()
    if region_file(name).layout == HamiCoreRegion.offsets.layout and "exit" not in name
]
"""Those of the model's layout in which no process has ended by itself."""


def states(name):
    """The variables in the text that describes the file."""
    (state,) = (one["state"] for one in document()["files"] if one["id"] == name)
    return dict(re.findall(r"([A-Z_0-9]+)=([^ ,]+)", state.partition(";")[0]))


def play(path, name):
    """Let the model do what the real code did for this file."""
    fields = region_file(name).fields
    now = dt.datetime.fromtimestamp(fields.get("last_kernel_time", 0), dt.UTC)
    region = HamiCoreRegion(path)
    for slot in fields["procs_nonzero"]:
        process = region.start(slot["pid"], states(name), now)
        use(process, slot)
        region.put(process.slot + region.offsets.status, "i", slot["status"])
    region.name_gpus(fields["uuids"])
    if "blocked" in name:
        region.put(region.offsets.tail + 8, "i", -1)
    return region


def read(content):
    return read_region(len(content), lambda size, offset: content[offset : offset + size])


def use(process, slot):
    for gpu, used in slot["used"].items():
        for purpose in ("context", "module", "data"):
            if used[purpose]:
                process.allocate(int(gpu), used[purpose], purpose)
    for gpu, found in slot["device_util"].items():
        process.watch(int(gpu), found["sm"])


@pytest.mark.parametrize("name", FILES)
def test_its_region_is_read_as_that_of_hami_core(tmp_path, name):
    region = play(tmp_path / "u.cache", name)

    expected, written = region_file(name).content, region.path.read_bytes()
    assert len(expected) == len(written)
    assert read(expected) == read(written)


def test_a_limit_is_read_as_hami_core_reads_it():
    plain = re.compile(r"0|[1-9]\d{0,9}[kmgKMG]?")
    cases = [case for case in document()["limit_values"]["cases"] if plain.fullmatch(case[0])]

    assert len(cases) >= 8
    assert cases == [[text, limit_of(text)] for text, _ in cases]

"""The model of libvgpu.so against the files that HAMi-core's own code wrote."""

import datetime as dt
import re

import pytest

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
        region.put(process.slot + 4, "i", slot["hostpid"])
        use(process, slot)
        region.put(process.slot + region.offsets.status, "i", slot["status"])
    region.name_gpus(fields["uuids"])
    if "lockheld" in name:
        region.put(16, "Q", fields["owner_pid"])
        region.put(24, "I", 0)
    if "blocked" in name:
        region.put(region.offsets.tail + 8, "i", -1)
    return region


def use(process, slot):
    for gpu, used in slot["used"].items():
        for purpose in ("context", "module", "data"):
            if used[purpose]:
                process.allocate(int(gpu), used[purpose], purpose)
    for gpu in slot["monitorused"].keys() | slot["device_util"].keys():
        sm = slot["device_util"].get(gpu, {}).get("sm", 0)
        process.watch(int(gpu), sm, slot["monitorused"].get(gpu, 0))


@pytest.mark.parametrize("name", FILES)
def test_its_bytes_are_those_of_hami_core(tmp_path, name):
    region = play(tmp_path / "u.cache", name)

    expected, written = region_file(name).content, region.path.read_bytes()
    differing = [
        at for at in range(0, len(expected), 4) if expected[at : at + 4] != written[at : at + 4]
    ]
    assert (len(expected), []) == (len(written), differing)


def test_a_limit_is_read_as_hami_core_reads_it():
    plain = re.compile(r"0|[1-9]\d{0,9}[kmgKMG]?")
    cases = [case for case in document()["limit_values"]["cases"] if plain.fullmatch(case[0])]

    assert len(cases) >= 8
    assert cases == [[text, limit_of(text)] for text, _ in cases]

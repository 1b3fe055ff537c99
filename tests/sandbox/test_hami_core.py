"""The model of libvgpu.so against the files that HAMi-core's own code wrote."""

import datetime as dt
import re

import pytest

from agent.sandbox.hami_core import CORE_LIMIT, POLICY, HamiCoreRegion, limit_of
from tests.hami_regions import document, file_ids, read_bytes, region_file

NOW = dt.datetime(2026, 11, 26, tzinfo=dt.UTC)
FILES = [name for name in file_ids() if region_file(name).layout == HamiCoreRegion.offsets.layout]
COMMITS = {"5091a2fb", "8f3a89c6"}
"""Of HAMi-core, as HAMi 2.9.0 and later have it."""
LAUNCHES = [case for case in document()["rate_limiter"]["cases"] if case[0] in COMMITS]


def states(name):
    """The variables in the text that describes the file."""
    (state,) = (one["state"] for one in document()["files"] if one["id"] == name)
    return dict(re.findall(r"([A-Z_0-9]+)=([^ ,]+)", state.partition(";")[0]))


def play(path, name):
    """Let the model do what the real code did for this file."""
    file = region_file(name)
    fields = file.fields
    now = dt.datetime.fromtimestamp(fields.get("last_kernel_time", 0), dt.UTC)
    environment = states(name)
    region = HamiCoreRegion(path)
    for slot in fields["procs_nonzero"]:
        # The description does not give the PID of a process that has ended.
        process = region.start(slot["pid"] or 99, environment, now)
        process.find_host_pid(slot["hostpid"])
        use(process, slot)
    if "childexit" in name:
        process.exit()
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
    if slot["status"] == 2:
        process.suspend()


@pytest.mark.parametrize("name", FILES)
def test_its_bytes_are_those_of_hami_core(tmp_path, name):
    region = play(tmp_path / "u.cache", name)

    expected, written = region_file(name).content, region.path.read_bytes()
    differing = [
        at for at in range(0, len(expected), 4) if expected[at : at + 4] != written[at : at + 4]
    ]
    assert (len(expected), []) == (len(written), differing)


@pytest.mark.parametrize(("text", "limit"), document()["limit_values"]["cases"])
def test_a_limit_is_read_as_hami_core_reads_it(text, limit):
    assert limit == limit_of(text)


@pytest.mark.parametrize(
    "case", document()["region_init"]["cases"], ids=lambda case: str(case["env"])
)
def test_a_fresh_region_has_the_values_of_the_environment(tmp_path, case):
    region = HamiCoreRegion(tmp_path / "u.cache")
    region.create(case["env"])

    offsets = region.offsets
    assert case["priority"] == region.get(offsets.tail + 12, "i")
    assert case.get("limit0", 0) == region.get(offsets.memory_limits, "Q")
    for index, percent in enumerate(case.get("sm_limit", ())):
        assert percent == region.get(offsets.memory_limits + 8 * (16 + index), "Q")
    assert (1, 2) == (region.get(offsets.tail + 4, "i"), region.get(offsets.tail + 8, "i"))


@pytest.mark.parametrize("case", LAUNCHES, ids=str)
def test_a_launch_waits_and_marks_as_hami_cores_does(tmp_path, case):
    _commit, sm_limit, policy, switch, when, before, result, after = case
    region = HamiCoreRegion(tmp_path / "u.cache")
    environment = {CORE_LIMIT: str(sm_limit), POLICY: policy}
    region.create(environment)
    tail = region.offsets.tail
    if when == "before_start":
        region.put(tail + 4, "i", switch)
    process = region.start(7, environment, NOW)
    region.put(tail + 4, "ii", switch, before)

    assert (result == "passes") == process.launch(NOW)
    if after is not None:
        assert after == region.get(tail + 8, "i")


def test_there_are_all_runs_of_all_releases():
    assert 72 == len(LAUNCHES)
    assert COMMITS == {case[0] for case in LAUNCHES}
    assert 3 < len(FILES)


def test_a_killed_process_keeps_its_slot_until_another_one_starts(tmp_path):
    region = HamiCoreRegion(tmp_path / "u.cache")
    region.start(7, {}, NOW).allocate(0, 100)
    assert [7] == region.pids()

    region.start(8, {}, NOW, dead={7}).allocate(0, 5)

    assert [8] == region.pids()
    region.name_gpus(["GPU-1"])
    (process,) = read_bytes(region.path.read_bytes()).region.processes
    assert (8, 5) == (process.pid, process.memory[0].total)


def test_it_does_not_notice_that_another_moved_its_slot(tmp_path):
    region = HamiCoreRegion(tmp_path / "u.cache")
    ended = [region.start(pid, {}, NOW) for pid in (1, 2)]
    moved = region.start(3, {}, NOW)
    moved.allocate(0, 5)
    for process in ended:
        process.exit()

    region.start(4, {}, NOW)
    moved.allocate(0, 100)

    region.name_gpus(["GPU-1"])
    used = {
        one.pid: one.memory[0].total
        for one in read_bytes(region.path.read_bytes()).region.processes
    }
    assert {4: 0, 3: 5} == used


def test_one_start_removes_ten_dead_slots_at_most(tmp_path):
    region = HamiCoreRegion(tmp_path / "u.cache")
    for pid in range(1, 13):
        region.start(pid, {}, NOW)

    region.start(99, {}, NOW, dead=range(1, 13))

    assert 3 == len(region.pids())


def test_one_that_is_killed_while_it_writes_leaves_half_of_its_change(tmp_path):
    region = HamiCoreRegion(tmp_path / "u.cache")
    region.start(7, {}, NOW).die_while_writing(0, 100)
    region.name_gpus(["GPU-1"])

    (process,) = read_bytes(region.path.read_bytes()).region.processes

    assert (100, 0) == (process.memory[0].buffer, process.memory[0].total)

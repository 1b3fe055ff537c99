"""The regions of containers on the disk: found, read, written; and what a tenant may do to them."""

import asyncio
import os
import signal
import stat
import struct
import subprocess
import sys
import tracemalloc

import msgspec
import pytest

from agent.errors import StateError
from agent.hami.region import MAGIC, V0, V1_2, RegionChange, RegionState, RegionSums
from agent.usage import ENTRIES, HostRegions
from tests.fakes.offload import Inline
from tests.hami_regions import file_ids, read_bytes, region_file
from tests.host.hook_space import IDENTITIES, TOP, can_mount
from tests.host.proc_node import ProcNode
from tests.host.region_dirs import COUNT, FILE, NAME, OTHER, container_dir, poke, with_region

SIZE = V1_2.size + 1
ABSENT = RegionSums(RegionState.ABSENT)
TWO = read_bytes(region_file("v12-two").content)
SUMS = TWO.sums()


@pytest.fixture
def regions(hook):
    return HostRegions(hook, Inline())


async def one(regions, name=NAME):
    """The reading of one container."""
    (reading,) = (await regions.read([name])).values()
    return reading


async def reason(regions):
    """Why the region is neither read nor written; both say the same."""
    reading = await one(regions)
    assert (RegionState.UNREADABLE, None) == (reading.state, reading.region)
    assert {NAME: reading.reason} == await regions.write({NAME: RegionChange(recent_kernel=-1)})
    return reading.reason


@pytest.mark.parametrize("file", file_ids())
async def test_each_file_that_hami_core_wrote_is_read(hook, regions, file):
    with_region(hook, file=file)

    assert read_bytes(region_file(file).content).sums() == await one(regions)


@pytest.mark.parametrize("file", ["v12-two", "v12-created"])
async def test_processes_that_exist_are_told_where_that_is_known(hook, tmp_path, file):
    with_region(hook, file=file)
    with_region(hook, OTHER, file)
    node, found = ProcNode(tmp_path), read_bytes(region_file(file).content)
    pids = [process.pid for process in found.region.processes]
    node.container(pids[:1], pod=f"pod{NAME.partition('_')[0]}", mounted=NAME)

    regions = HostRegions(hook, Inline(), node.processes)
    for _ in range(2):
        readings = await regions.read([NAME, OTHER, "0_gone"])

    assert [(1, True), (len(pids), False)] == [
        (readings[name].processes, readings[name].knows_living) for name in (NAME, OTHER)
    ]
    assert msgspec.structs.replace(found, alive=frozenset(pids[:1])).sums() == readings[NAME]


async def test_where_there_is_nothing_there_is_no_region_and_a_hook_path_that_is_a_file_is_an_error(
    hook, regions
):
    assert ABSENT == await one(regions) == await one(HostRegions(hook / "away", Inline()))
    assert {NAME: "it is absent"} == await regions.write({NAME: RegionChange()})
    (hook / "file").touch()
    with pytest.raises(StateError, match="HAMi-core's directories below"):
        await HostRegions(hook / "file", Inline()).read([NAME])


@pytest.mark.parametrize("place", ["vgpu", "vgpu/containers"])
async def test_a_link_above_the_directories_is_an_error(hook, regions, place):
    with_region(hook)
    (hook / place).rename(hook / "away")
    (hook / place).symlink_to(hook / "away")

    with pytest.raises(StateError, match="without links in it"):
        await regions.read([NAME])


@pytest.mark.parametrize(
    "others", [("libvgpu.so", "lock", "cache", "x.cache.d"), ("libvgpu.so", "y.cache", "z.cache")]
)
async def test_the_region_is_the_first_cache_file_by_name_as_for_hamis_monitor(
    hook, regions, others
):
    directory = with_region(hook).parent
    for name in others:
        (directory / name).touch()

    assert SUMS == await one(regions)


@pytest.mark.parametrize("name", ["..", "../..", "x", "a/b_c", "_c", NAME * 9, f"{NAME}\0"])
async def test_a_name_that_is_no_container_directory_is_not_opened(hook, regions, name):
    with_region(hook)

    assert RegionState.UNREADABLE == (await one(regions, name)).state


@pytest.mark.parametrize("size", [0, SIZE])
async def test_a_region_that_begins_is_told_from_none(hook, regions, size):
    region = container_dir(hook) / FILE
    region.touch()
    os.truncate(region, size)

    assert RegionSums(RegionState.INITIALISING) == await one(regions)
    assert {NAME: "it is initialising"} == await regions.write({NAME: RegionChange()})


NOT_REGULAR = "it is not a regular file with one name"
UNUSABLE = "it or its directory cannot be used: "


def with_many_names(region):
    """More entries than are searched."""
    for name in (FILE, *map(str, range(ENTRIES))):
        (region.parent / name).touch()


def huge(region):
    region.touch()
    os.truncate(region, 10 << 30)


def linked_directory(region):
    """A link in the place of the directory."""
    region.parent.rmdir()
    region.parent.symlink_to(others(region).parent)


def others(region):
    """Another tenant's."""
    return with_region(region.parents[3], OTHER)


def node(kind, device=0):
    return lambda region: os.mknod(region, kind | 0o600, device)


IN_ITS_PLACE = {
    "fifo": (os.mkfifo, NOT_REGULAR),
    "socket": (node(stat.S_IFSOCK), NOT_REGULAR),
    "directory": (lambda region: region.mkdir(), NOT_REGULAR),
    "link": (lambda region: region.symlink_to(others(region)), NOT_REGULAR),
    "nothing": (lambda region: region.symlink_to("nothing"), NOT_REGULAR),
    "hard-link": (lambda region: region.hardlink_to(others(region)), NOT_REGULAR),
    "linked": (linked_directory, UNUSABLE + "Not a directory"),
    "names": (with_many_names, f"its directory has more than {ENTRIES} entries"),
    "huge": (huge, f"no layout of HAMi-core has its size of {10 << 30} bytes and its first fields"),
    "device": pytest.param(
        *(node(stat.S_IFCHR, os.makedev(1, 3)), NOT_REGULAR),
        marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    ),
}


@pytest.mark.parametrize(("make", "why"), IN_ITS_PLACE.values(), ids=IN_ITS_PLACE)
async def test_what_is_no_region_of_its_own_is_neither_read_nor_written(hook, regions, make, why):
    """Also not the region of another tenant."""
    make(container_dir(hook) / FILE)
    theirs = list((hook / "vgpu" / "containers" / OTHER).glob(FILE))
    before = [file.read_bytes() for file in theirs]

    assert why == await reason(regions)
    assert before == [file.read_bytes() for file in theirs]


async def test_a_change_is_in_the_file_and_no_other_byte(hook, regions):
    region = with_region(hook)
    before = bytearray(region.read_bytes())
    change = RegionChange(is_limiting=False, recent_kernel=-1)

    assert {} == await regions.write({NAME: change})

    struct.pack_into("<ii", before, V1_2.tail + 4, 0, -1)
    assert before == region.read_bytes()


@pytest.mark.parametrize("file", file_ids())
@pytest.mark.parametrize("number", [-(2**31), -1, 0, 2])
async def test_who_is_held_back_is_found_in_each_layout(hook, regions, file, number):
    with_region(hook, file=file)
    container_dir(hook, OTHER)

    assert {} == await regions.write({NAME: RegionChange(recent_kernel=number)})

    assert [NAME] * (number < 0) == await regions.held()
    assert number == (await one(regions)).region.recent_kernel


RIGHTS = """
import asyncio, pathlib, sys
from agent.hami.region import RegionChange
from agent.usage import HostRegions
from tests.fakes.offload import Inline
from tests.host.region_dirs import NAME

regions = HostRegions(pathlib.Path(sys.argv[1]), Inline())
print(asyncio.run(regions.read([NAME]))[NAME].reason)
print(asyncio.run(regions.write({NAME: RegionChange(recent_kernel=-1)})).get(NAME, ""))
"""


@pytest.mark.process
@pytest.mark.timeout(60)
@pytest.mark.skipif(os.geteuid() != 0 or not can_mount(), reason="needs root, which it gives up")
@pytest.mark.parametrize("closed", ["", FILE, "."], ids=["nothing", "the region", "its directory"])
@IDENTITIES
def test_another_users_region_is_used_without_roots_privileges_unless_a_tenant_closes_it(
    hook, identity, closed
):
    region = with_region(hook)
    os.chown(region, 1000, 1000)
    region.chmod(0o666)
    if closed:
        (region.parent / closed).chmod(0)

    words = [*identity, sys.executable, "-c", RIGHTS, str(hook)]
    done = subprocess.run(words, cwd=TOP, capture_output=True, text=True, check=True)  # noqa: S603 -- our own

    why = "it or its directory cannot be used: Permission denied" if closed else ""
    assert [why, why] == done.stdout.splitlines()
    held = read_bytes(region.read_bytes()).region.recent_kernel
    assert closed or held == -1


LEASE = """
import fcntl, signal, sys, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
with open(sys.argv[1], "r+b") as opened:
    fcntl.fcntl(opened, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.process
@pytest.mark.timeout(30)
@pytest.mark.looptime(False)
async def test_an_owners_lease_on_its_file_holds_nobody_up(hook, regions):
    region = with_region(hook)
    words = [sys.executable, "-c", LEASE, str(region)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as tenant:  # noqa: S603, ASYNC220 -- our own
        try:
            assert b"held\n" == tenant.stdout.readline()
            async with asyncio.timeout(10):
                said = await reason(regions)
        finally:
            tenant.send_signal(signal.SIGKILL)

    assert "it or its directory cannot be used: Resource temporarily unavailable" == said


SWAPS = """
import itertools, os, sys
file, theirs = sys.argv[1:]
whole = open(file, "rb").read()
print("at work", flush=True)
for number in itertools.count():
    kind = number % 6
    if kind == 0:
        os.symlink(theirs, "next")
    elif kind == 1:
        os.mkfifo("next")
    elif kind == 2:
        os.link(theirs, "next")
    else:
        with open("next", "wb") as made:
            made.write(whole)
            made.truncate((0, 1887, len(whole))[kind - 3])
    os.rename("next", file)
"""
"""In the region's place is another's, a pipe, a shorter one."""


@pytest.mark.process
@pytest.mark.timeout(60)
@pytest.mark.looptime(False)
async def test_a_region_that_is_swapped_while_it_is_read_leads_to_no_other_and_holds_nobody_up(
    hook, regions
):
    region, theirs = with_region(hook), with_region(hook, OTHER)
    before, seen = theirs.read_bytes(), {(await regions.read([NAME]))[NAME].state}
    words = [sys.executable, "-c", SWAPS, str(region), str(theirs)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, cwd=region.parent) as tenant:  # noqa: S603, ASYNC220 -- our own
        try:
            assert b"at work\n" == tenant.stdout.readline()
            for _ in range(500):
                readings = await regions.read([NAME])
                seen.add(readings[NAME].state)
                await regions.write({NAME: RegionChange(recent_kernel=-1)})
            assert tenant.poll() is None
        finally:
            tenant.kill()

    assert {RegionState.READABLE, RegionState.UNREADABLE} <= seen
    assert before == theirs.read_bytes()


class MeteredThread:
    """An Offload on which each byte that is read costs `rate` seconds of CPU, and as much time."""

    def __init__(self, monkeypatch, rate=1e-9):
        self.rate, self.now, self.spent, self.noise = rate, 0.0, 0.0, 0.0
        pread = os.pread

        def metered(file, length, offset):
            read = pread(file, length, offset)
            self.spent += len(read) * self.rate + self.noise
            self.noise = 0.0
            return read

        monkeypatch.setattr(os, "pread", metered)

    async def call(self, work, *args):
        return work(*args[:-1], lambda: self.now + self.spent)

    def cpu(self):
        return self.spent


def names_of(count):
    return [f"6f1c1f0e-8f5a-4a52-9d2e-{number:012x}_bad" for number in range(count)]


@pytest.fixture
def thread(monkeypatch):
    return MeteredThread(monkeypatch)


async def test_many_crowded_regions_cost_a_small_part_of_a_core_and_hide_no_other(hook, thread):
    with_region(hook)
    bad = names_of(192)
    for name in bad:  # regions that say that so many slots are in use
        poke(with_region(hook, name), COUNT, "<i", 700)
    regions = HostRegions(hook, thread, cpu=thread.cpu)
    hours, states = 0.15, set()

    for _ in range(round(hours * 720)):
        readings = await regions.read([*bad, NAME])
        assert SUMS == readings[NAME]
        states |= {(readings[name].state, bool(readings[name].reason)) for name in bad}
        thread.now += 5

    assert thread.spent < hours * 3600 * 0.005
    assert {(RegionState.UNREADABLE, True), (RegionState.READABLE, False)} == states


async def test_what_a_round_did_not_reach_says_so_and_comes_first_in_the_next(hook, thread):
    names = names_of(4)
    for name in names:
        with_region(hook, name)
    regions = HostRegions(hook, thread, cpu=thread.cpu)
    await regions.read(names)
    thread.rate, thread.now = 2e-4, 5.0

    first = await regions.read(names)
    thread.rate, thread.now = 1e-9, 10.0
    second = await regions.read(names)

    late = [name for name in names if first[name].state is RegionState.UNREADABLE]
    assert 0 < len(late) < 4
    assert {"this round had no time for it"} == {first[name].reason for name in late}
    assert {SUMS} == {second[name] for name in late}


@pytest.mark.parametrize(
    ("offsets", "gpus", "processes"), [(V1_2, 16, 64), (V0, 2, 1024)], ids=["wide", "long"]
)
async def test_one_region_is_in_memory_at_a_time(hook, offsets, gpus, processes):
    names = names_of(16)
    for name in names:
        (container_dir(hook, name) / FILE).write_bytes(full_region(offsets, gpus, processes))
    regions = HostRegions(hook, Inline(), cpu=lambda: 0.0)
    await regions.read(names)
    tracemalloc.start()
    try:
        readings = await regions.read(names)
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert held < 2**20
    assert most < 12 * 2**20
    assert {gpus} == {len(each.region.gpus) for each in readings.values() if each.region}


def full_region(offsets, gpus, processes):
    """A region with large numbers in each slot."""
    raw = bytearray(offsets.size + 1)
    struct.pack_into("<iII", raw, 0, MAGIC, *(offsets.version or (0, 0)))
    struct.pack_into("<Q", raw, offsets.gpu_count, gpus)
    struct.pack_into("<i", raw, offsets.tail, processes)
    for slot in range(processes):
        at = offsets.slots + slot * offsets.slot_size
        struct.pack_into("<i", raw, at, 100_000 + slot)
        struct.pack_into("<i", raw, at + offsets.status, 1)
        for use in range(gpus):
            where = at + offsets.used + use * offsets.memory_size
            struct.pack_into("<qqqqq", raw, where, *(2**50 + slot + word for word in range(5)))
    return bytes(raw)

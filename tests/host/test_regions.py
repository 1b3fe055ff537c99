"""The regions of containers on the disk: found, read, written; and what a tenant may do to them."""

import asyncio
import os
import signal
import stat
import struct
import subprocess
import sys

import msgspec
import pytest

from agent.codec.region import V1_2
from agent.core.errors import StateError
from agent.core.usage.region import RegionChange, RegionReading, RegionState
from agent.host.hook.regions import ENTRIES, HostRegions
from tests.fakes.offload import Inline
from tests.hami_regions import file_ids, read_bytes, region_file
from tests.host.hook_space import IDENTITIES, NO_PRIVILEGES, TOP, can_mount
from tests.host.proc_node import ProcNode
from tests.host.region_dirs import COUNT, FILE, NAME, OTHER, container_dir, poke, with_region

SIZE = V1_2.size + 1
ABSENT = RegionReading(RegionState.ABSENT)
TWO = read_bytes(region_file("v12-two").content)


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

    assert read_bytes(region_file(file).content) == await one(regions)


async def test_all_that_are_asked_for_are_answered_for_in_one_go(hook, regions):
    with_region(hook)
    container_dir(hook, OTHER)

    readings = await regions.read([NAME, OTHER, "0_gone"])

    assert {NAME: TWO, OTHER: ABSENT, "0_gone": ABSENT} == readings


async def test_processes_that_exist_are_told_where_that_is_known(hook, tmp_path):
    with_region(hook)
    with_region(hook, OTHER)
    node = ProcNode(tmp_path)
    pids = [process.pid for process in TWO.region.processes]
    node.container(pids[:1], pod=f"pod{NAME.partition('_')[0]}", mounted=NAME)

    readings = await HostRegions(hook, Inline(), node.processes).read([NAME, OTHER, "0_gone"])

    assert [pids[:1], None] == [
        found and list(found) for found in (readings[NAME].alive, readings[OTHER].alive)
    ]
    assert msgspec.structs.replace(TWO, alive=frozenset(pids[:1])) == readings[NAME]


async def test_before_the_first_container_there_is_no_region(hook, regions):
    assert ABSENT == await one(regions)
    assert {NAME: "it is absent"} == await regions.write({NAME: RegionChange()})


async def test_a_hook_path_that_is_missing_or_a_file_is_an_error_that_says_so(hook):
    (hook / "file").touch()
    for path in (hook / "away", hook / "file"):
        with pytest.raises(StateError, match="HAMi-core's directories below"):
            await HostRegions(path, Inline()).read([NAME])
        with pytest.raises(StateError, match="HAMi-core's directories below"):
            await HostRegions(path, Inline()).write({NAME: RegionChange()})


@pytest.mark.parametrize("place", ["vgpu", "vgpu/containers"])
async def test_a_link_above_the_directories_is_an_error(hook, regions, place):
    with_region(hook)
    (hook / place).rename(hook / "away")
    (hook / place).symlink_to(hook / "away")

    with pytest.raises(StateError, match="remove the link or file in its place"):
        await regions.read([NAME])


async def test_the_region_is_the_one_cache_file_beside_the_library_and_the_lock(hook, regions):
    directory = with_region(hook).parent
    for name in ("libvgpu.so", "lock", "cache", "x.cache.d"):
        (directory / name).touch()

    assert TWO == await one(regions)


async def test_of_two_regions_the_first_by_name_is_read_as_hamis_monitor_does(hook, regions):
    directory = with_region(hook).parent
    (directory / "z.cache").touch()

    assert TWO == await one(regions)


async def test_a_name_of_the_library_is_no_region(hook, regions):
    directory = container_dir(hook)
    (directory / "libvgpu.so.cache").touch()

    assert ABSENT == await one(regions)


async def test_a_third_candidate_makes_the_region_unreadable(hook, regions):
    directory = with_region(hook).parent
    for name in ("libvgpu.so", "z.cache"):
        (directory / name).touch()

    assert "its directory has more than one file that may be it" == await reason(regions)


async def test_a_directory_full_of_names_is_not_searched_to_its_end(hook, regions):
    directory = with_region(hook).parent
    for number in range(ENTRIES):
        (directory / f"{number}").touch()

    assert f"its directory has more than {ENTRIES} entries" == await reason(regions)


@pytest.mark.parametrize("name", ["..", "../..", "x", "a/b_c", "_c", "0_" + "c" * 300, "0_c\0"])
async def test_a_name_that_is_no_container_directory_is_not_opened(hook, regions, name):
    with_region(hook)

    reading = await one(regions, name)

    assert RegionState.UNREADABLE == reading.state


async def test_a_region_that_begins_is_told_from_none(hook, regions):
    region = container_dir(hook) / FILE
    for size in (0, SIZE):
        region.touch()
        os.truncate(region, size)

        assert RegionReading(RegionState.INITIALISING) == await one(regions)
        assert {NAME: "it is initialising"} == await regions.write({NAME: RegionChange()})


def a_fifo(path):
    os.mkfifo(path)


def a_socket(path):
    os.mknod(path, stat.S_IFSOCK | 0o600)


def a_directory(path):
    path.mkdir()


def a_link(path):
    target = with_region(path.parents[3], OTHER)
    path.symlink_to(target)


def a_link_into_nothing(path):
    path.symlink_to("nothing")


@pytest.mark.parametrize("make", [a_fifo, a_socket, a_directory, a_link, a_link_into_nothing])
async def test_what_is_no_regular_file_is_never_opened(hook, regions, make):
    make(container_dir(hook) / FILE)

    assert "it is not a regular file" == await reason(regions)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
async def test_a_device_file_is_never_opened(hook, regions):
    os.mknod(container_dir(hook) / FILE, stat.S_IFCHR | 0o600, os.makedev(1, 3))

    assert "it is not a regular file" == await reason(regions)


async def test_a_hard_link_to_another_tenants_region_is_neither_read_nor_written(hook, regions):
    region = with_region(hook, OTHER)
    (container_dir(hook) / FILE).hardlink_to(region)
    before = region.read_bytes()

    assert "it has 2 names instead of one" == await reason(regions)
    assert before == region.read_bytes()


async def test_a_link_in_the_place_of_the_directory_is_not_followed(hook, regions):
    directory = with_region(hook).parent
    directory.rename(hook / "away")
    directory.symlink_to(hook / "away")

    assert "it or its directory cannot be used: Not a directory" == await reason(regions)


async def test_ten_gibibytes_of_nothing_are_refused_by_their_size(hook, regions):
    os.truncate(with_region(hook), 10 << 30)

    assert f"no layout of HAMi-core has its size of {10 << 30} bytes" == await reason(regions)


async def test_a_process_count_of_two_thousand_millions_reads_1024_slots(hook, regions):
    poke(with_region(hook), COUNT, "<i", 2**31 - 1)

    assert TWO.region.processes == (await one(regions)).region.processes


async def test_a_change_is_in_the_file_and_no_other_byte(hook, regions):
    region = with_region(hook)
    before = bytearray(region.read_bytes())
    change = RegionChange(is_limiting=False, recent_kernel=-1)

    assert {} == await regions.write({NAME: change})

    struct.pack_into("<ii", before, V1_2.tail + 4, 0, -1)
    assert before == region.read_bytes()


async def test_one_that_cannot_be_written_stops_no_other(hook, regions):
    region = with_region(hook, OTHER)
    change = RegionChange(recent_kernel=-1)

    refused = await regions.write({NAME: change, OTHER: change})

    assert {NAME: "it is absent"} == refused
    assert -1 == read_bytes(region.read_bytes()).region.recent_kernel


RIGHTS = """
import asyncio, pathlib, sys
from agent.core.usage.region import RegionChange
from agent.host.hook.regions import HostRegions
from tests.fakes.offload import Inline
from tests.host.hook_space import IDENTITIES, NO_PRIVILEGES, TOP, can_mount
from tests.host.proc_node import ProcNode
from tests.host.region_dirs import NAME

regions = HostRegions(pathlib.Path(sys.argv[1]), Inline())
print(asyncio.run(regions.read([NAME]))[NAME].reason)
print(asyncio.run(regions.write({NAME: RegionChange(recent_kernel=-1)})).get(NAME, ""))
"""


@pytest.mark.process
@pytest.mark.timeout(60)
@pytest.mark.looptime(False)
@pytest.mark.skipif(os.geteuid() != 0 or not can_mount(), reason="needs root, which it gives up")
@IDENTITIES
def test_another_users_region_is_read_and_written_without_roots_privileges(hook, identity):
    region = with_region(hook)
    os.chown(region, 1000, 1000)
    region.chmod(0o666)

    words = [*identity, sys.executable, "-c", RIGHTS, str(hook)]
    done = subprocess.run(words, cwd=TOP, capture_output=True, text=True, check=True)  # noqa: S603 -- our own

    assert "\n\n" == done.stdout
    assert -1 == read_bytes(region.read_bytes()).region.recent_kernel


@pytest.mark.process
@pytest.mark.timeout(60)
@pytest.mark.looptime(False)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, which it gives up")
@pytest.mark.parametrize("closed", [FILE, "."], ids=["the region", "its directory"])
def test_what_a_tenant_closes_to_the_agent_is_unreadable(hook, closed):
    region = with_region(hook)
    (region.parent / closed).chmod(0)

    words = [*NO_PRIVILEGES, sys.executable, "-c", RIGHTS, str(hook)]
    done = subprocess.run(words, cwd=TOP, capture_output=True, text=True, check=True)  # noqa: S603 -- our own

    assert ["it or its directory cannot be used: Permission denied"] * 2 == done.stdout.splitlines()


# No link to another's file: link(2) refuses one across mounts, and a container sees its own
# directory alone. Where root linked one and it is removed in the moment between opening and looking
# at the number of names, the kernel shows one name, before and after.
SWAPPING = """
import itertools, os, sys
region, secret = sys.argv[1:]
content = open(region, "rb").read()

def file(size):
    with open(region + "-", "wb") as made:
        made.write(content)
        made.truncate(size)

acts = [
    lambda: file(len(content)),
    lambda: os.symlink(secret, region + "-"),
    lambda: os.mkfifo(region + "-"),
    lambda: file(len(content)),
    lambda: os.mkdir(region + "-"),
    lambda: file(10 << 30),
]
print("at work", flush=True)
for act in itertools.cycle(acts):
    act()
    if os.path.isdir(region + "-"):
        os.unlink(region)
        os.rmdir(region + "-")
        continue
    os.replace(region + "-", region)
    if os.path.isfile(region) and not os.path.islink(region) and os.stat(region).st_nlink == 1:
        os.truncate(region, 1000000)
        os.truncate(region, len(content))
"""


@pytest.mark.process
@pytest.mark.timeout(60)
@pytest.mark.looptime(False)
async def test_a_tenant_that_swaps_its_region_meanwhile_gains_nothing(hook, regions):
    region, secret = with_region(hook), with_region(hook, OTHER)
    before = secret.read_bytes()
    words = [sys.executable, "-c", SWAPPING, str(region), str(secret)]
    states = set()
    with subprocess.Popen(words, stdout=subprocess.PIPE) as tenant:  # noqa: S603, ASYNC220 -- our own
        assert b"at work\n" == tenant.stdout.readline()
        for _ in range(500):
            states.add((await one(regions)).state)
            await regions.write({NAME: RegionChange(recent_kernel=-77)})
        assert None is tenant.poll()
        tenant.kill()

    assert states <= set(RegionState)
    assert before == secret.read_bytes()


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

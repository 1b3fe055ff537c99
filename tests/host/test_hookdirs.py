"""HAMi-core's directories: open to containers, closed above them, and never through a link."""

import asyncio
import errno
import itertools
import os
import stat
import threading
from pathlib import Path

import msgspec
import pytest

from agent import hookdirs
from agent.allocate.edits import mounted_library
from agent.errors import StateError
from agent.hookdirs import PASS, STEPS, HostHookDirs, large_directories
from agent.host.system import Worker
from agent.ledger import HookFacts
from agent.sandbox.lab.cluster import stand_in
from tests.fakes.offload import Inline
from tests.host.hook_space import NAME, cleared


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def set_umask():
    before = os.umask(0)
    yield os.umask
    os.umask(before)


@pytest.fixture
def place(hook):
    """Where a container's directory is to be."""
    return hook / "vgpu" / "containers" / NAME


@pytest.fixture
def victim(tmp_path):
    """What no link may lead to; it must be as it was."""
    victim = tmp_path / "victim"
    (victim / "containers" / NAME).mkdir(parents=True)
    (victim / NAME).mkdir()
    (victim / "file").write_text("mine")
    victim.chmod(0o700)
    before = sorted(victim.rglob("*"))
    yield victim
    assert (0o700, before) == (mode(victim), sorted(victim.rglob("*")))
    assert "mine" == (victim / "file").read_text()


@pytest.mark.parametrize(("mask", "above"), [(0o077, 0o755), (0, 0o2775)])
async def test_leaves_are_open_to_all_without_sticky_and_parents_are_not(
    dirs, hook, place, set_umask, mask, above
):
    """Also with the bits of a parent that hands its group down, as /usr/local on Debian."""
    hook.chmod(above)
    set_umask(mask)
    for wipe in (True, False):
        await dirs.prepare(NAME, wipe=wipe)

        found = {path: mode(path) for path in hook.rglob("*")}
        assert [(place, 0o777)] == [(one, bits) for one, bits in found.items() if bits & 0o022]
        assert {0o755} == {bits & 0o777 for path, bits in found.items() if path != place}
        # What is too open or too closed is put right.
        place.parent.chmod(0o777)
        place.chmod(0o1700)


async def test_container_directories_are_found_and_nothing_else(dirs, place):
    assert [] == await dirs.found()
    await dirs.prepare(NAME, wipe=True)
    place.with_name(NAME.replace("main", "link")).symlink_to(place)
    place.with_name(NAME.replace("main", "file")).touch()
    for other in ("backup", "a_b", NAME.upper(), f"{NAME}_", f"x{NAME}", "6f1c1f0e_main"):
        place.with_name(other).mkdir()

    assert [NAME] == await dirs.found()


@pytest.mark.parametrize("step", ["vgpu", "vgpu/containers"])
async def test_a_link_in_the_way_is_refused_and_not_followed(dirs, hook, victim, step):
    (hook / step).parent.mkdir(parents=True, exist_ok=True)
    (hook / step).symlink_to(victim)

    for act in (dirs.prepare(NAME, wipe=True), dirs.remove(NAME), dirs.found()):
        with pytest.raises(StateError, match="cannot be used"):
            await act


IN_ITS_PLACE = {
    "link": lambda place: place.symlink_to(place.parents[3] / "victim"),
    "file": lambda place: place.touch(),
    "fifo": os.mkfifo,
    "socket": lambda place: os.mknod(place, stat.S_IFSOCK | 0o600),
}


@pytest.mark.parametrize("wipe", [True, False])
@pytest.mark.parametrize("make", IN_ITS_PLACE.values(), ids=IN_ITS_PLACE)
@pytest.mark.usefixtures("victim")
async def test_what_is_in_a_containers_place_is_replaced_and_not_followed(dirs, place, make, wipe):
    place.parent.mkdir(parents=True)
    make(place)

    await dirs.prepare(NAME, wipe=wipe)

    assert 0 == (await cleared(dirs)).kept
    assert ([place], 0o777) == (list(place.parent.iterdir()), mode(place))


NO_NAMES = ("", "..", "a_..", "a_b/c", "../a_b", "a_B", "a_-b", "a_b-", "_b", "a_", "a_b\n")


@pytest.mark.parametrize("name", [*NO_NAMES, f"{'a' * 65}_b"])
async def test_a_name_that_is_no_pod_and_container_makes_nothing(dirs, hook, name):
    for act in (dirs.prepare(name, wipe=True), dirs.remove(name)):
        with pytest.raises(StateError, match="not of the form <pod UID>_<container>"):
            await act

    assert [] == list(hook.iterdir())


# A look without a write finds what would have every new pod refused.


async def refusals(dirs):
    """What a look says, and what a preparation says."""
    said = []
    for act in (dirs.check(), dirs.prepare(NAME, wipe=True)):
        try:
            said.append(await act)
        except StateError as error:
            said.append(str(error))
    return said


GIVEN = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")


@pytest.mark.parametrize(
    ("trouble", "step", "said"),
    [
        ("none", "", ""),
        ("open", "", "writable by everybody"),
        ("missing", "", "No such file or directory; {} must be"),
        ("link", "vgpu", "must be a directory of root's, "),
        ("link", "vgpu/containers", "must be a directory of root's, "),
        pytest.param("given", "", "hook belongs to uid 65534", marks=GIVEN),
        pytest.param("given", "vgpu", "vgpu belongs to uid 65534", marks=GIVEN),
    ],
)
async def test_a_look_and_a_preparation_find_the_same_wrong(dirs, hook, trouble, step, said):
    if step:
        await dirs.prepare(NAME, wipe=True)
    match trouble:
        case "open":
            hook.chmod(0o777)
        case "missing":
            hook.rmdir()
        case "link":
            (hook / step).rename(hook / "away")
            (hook / step).symlink_to(hook / "away")
        case "given":
            os.chown(hook / step, 65534, 65534)

    found = await refusals(dirs)

    if trouble == "none":
        assert [None, None, None] == [*found, await dirs.check()]
    else:
        assert [True, True] == [said.format(hook) in str(one) for one in found]
    if trouble == "missing":
        assert [] == await dirs.found()
        await dirs.remove(NAME)


PLAIN, VERSIONED, PRELOAD = "libvgpu.so", "libvgpu.so.2.10.0", "ld.so.preload"


def installed(hook, *names):
    (hook / "vgpu").mkdir(exist_ok=True)
    for name in names:
        (hook / "vgpu" / name).write_bytes(stand_in() if name.startswith("lib") else b"text\n")


async def test_facts_name_the_versioned_library_if_there_is_one(dirs, hook, tmp_path):
    installed(hook, PLAIN, PRELOAD)
    found = HookFacts(f"{hook}/vgpu/libvgpu.so", preload="text\n", hook_path=str(hook))
    assert found == await dirs.facts()

    installed(hook, VERSIONED, "license")
    (tmp_path / "dev").mkdir()
    for node in ("nvidia-uvm", "nvidiactl", "nvidia0"):
        (tmp_path / "dev" / node).touch()
    nodes = tuple(f"{tmp_path}/dev/{name}" for name in ("nvidiactl", "nvidia-uvm"))
    more = {"library": f"{found.library}.2.10.0", "has_license": True, "device_nodes": nodes}
    assert msgspec.structs.replace(found, **more) == await dirs.facts()


async def test_below_the_root_no_path_begins_with_two_slashes():
    facts = await HostHookDirs(Path("/"), Path("/dev"), "", Inline(), Inline()).facts()

    assert "/vgpu/libvgpu.so" == mounted_library(facts)


OTHER_MACHINE = stand_in()[:18] + bytes([stand_in()[18] ^ 0xFF]) + stand_in()[19:]
BAD = (b"", b"\x7fELF", b"<html>Not found</html>", stand_in()[:19], OTHER_MACHINE)
"""No loader takes them."""


@pytest.mark.parametrize(
    ("files", "missing", "loadable"),
    [
        ({}, (PLAIN, PRELOAD), True),
        ({PLAIN: stand_in()}, (PRELOAD,), True),
        ({PRELOAD: b""}, (PLAIN,), True),
        ({PRELOAD: b"", VERSIONED: stand_in()}, (), True),
        # As a runtime makes directories in their place.
        ({PRELOAD: b"", PLAIN: None, VERSIONED: None}, (PLAIN,), True),
        *(({PRELOAD: b"", PLAIN: bad}, (), False) for bad in BAD),
        ({PRELOAD: b"", PLAIN: b"", VERSIONED: stand_in()}, (), True),  # it is the one mounted
    ],
)
async def test_facts_tell_what_is_missing_of_hami_core_and_a_library_that_no_loader_takes(
    dirs, hook, files, missing, loadable
):
    (hook / "vgpu").mkdir()
    for name, content in files.items():
        path = hook / "vgpu" / name
        path.mkdir() if content is None else path.write_bytes(content)

    facts = await dirs.facts()

    assert tuple(f"{hook}/vgpu/{name}" for name in missing) == facts.missing
    assert loadable is facts.loadable


async def test_facts_have_the_text_of_the_preload_file_as_it_is_mounted(dirs, hook, tmp_path):
    installed(hook, PLAIN)
    (hook / "vgpu" / PRELOAD).symlink_to(tmp_path / "text")
    for content, text in ((b"/a\r\n", "/a\r\n"), (b"\xff", "\udcff"), (b"/" * 99_999, "/" * 65536)):
        (tmp_path / "text").write_bytes(content)
        assert text == (await dirs.facts()).preload


async def test_the_hook_path_may_be_a_link_of_the_operators(hook, tmp_path):
    (tmp_path / "link").symlink_to(hook)

    await HostHookDirs(tmp_path / "link", tmp_path, "", Inline(), Inline()).prepare(NAME, wipe=True)

    assert 0o777 == mode(hook / "vgpu" / "containers" / NAME)


# What was in container directories goes part by part, on a thread of its own.


async def test_a_wipe_removes_links_and_not_what_they_name(dirs, place, victim):
    """And whatever else is there, under whatever name."""
    await dirs.prepare(NAME, wipe=True)
    (place / "to-directory").symlink_to(victim)
    (place / "to-file").symlink_to(victim / "file")
    for name in ("nested", "\n\x1b[2Jforged" * 20, "a" * 255, "-rf", " ", ".removed-x"):
        (place / name[:255]).mkdir()
        (place / name[:255] / "deeper").symlink_to(victim)
    (place / os.fsdecode(b"\xff\xfe")).mkdir(mode=0)
    os.mkfifo(place / "pipe")
    os.mknod(place / "socket", stat.S_IFSOCK | 0o600)
    with (place / "sparse").open("wb") as sparse:
        sparse.truncate(10 * 2**40)

    await dirs.prepare(NAME, wipe=True)
    await cleared(dirs)

    assert ([place], []) == (list(place.parent.iterdir()), list(place.iterdir()))


async def removed(dirs, *names):
    """Directories of containers that were, set aside."""
    for name in names:
        await dirs.prepare(NAME.replace("main", name), wipe=True)
        await dirs.remove(NAME.replace("main", name))


async def test_what_cannot_be_removed_is_tried_again_after_an_hour(dirs, place, monkeypatch):
    tried = []

    def refuse(name, above):
        tried.append(name)
        raise PermissionError(errno.EPERM, "Operation not permitted")
        yield

    await removed(dirs, "main", "other")
    with monkeypatch.context() as patch:
        patch.setattr("agent.hookdirs.remove_stepwise", refuse)
        rounds = [await cleared(dirs) for _ in range(3)]
        place.with_name(tried[0]).rmdir()
        rounds.append(await cleared(dirs))

    assert 2 == len(tried)
    assert [2, 2, 2, 1] == [one.kept for one in rounds]
    assert {"Operation not permitted"} == {one.why for one in rounds}
    monkeypatch.setattr(hookdirs, "AGAIN", 0.0)
    assert 0 == (await cleared(dirs)).kept


async def test_a_container_that_goes_on_writing_holds_up_nobody_elses_removal(
    dirs, place, monkeypatch
):
    monkeypatch.setattr("agent.hookdirs.STEPS", 20)
    await removed(dirs, *map(str, range(5)))
    for one in place.parent.iterdir():
        (one / "a").touch()
    busy = min(place.parent.iterdir())

    for number in range(100):
        for more in range(20):
            (busy / f"{number}-{more}").touch()
        assert (await dirs.clear()).more

    assert [busy] == list(place.parent.iterdir())


async def test_no_removal_is_waited_for_by_what_is_made_beside_it(hook, place, tmp_path):
    """One file can take the disk seconds."""
    held, begun = threading.Event(), threading.Event()

    def hang():
        begun.set()
        held.wait()

    async with Worker("disk") as disk, Worker("clearing") as clearing:
        dirs = HostHookDirs(hook, tmp_path, "", disk, clearing)
        await removed(dirs, "main")
        async with asyncio.TaskGroup() as group:
            group.create_task(clearing.call(hang))
            part = group.create_task(dirs.clear())
            try:
                await asyncio.to_thread(begun.wait)
                for wipe in (True, False):
                    await dirs.prepare(NAME, wipe=wipe)
                await dirs.remove(NAME)
                assert [] == await dirs.found()
                assert not part.done()
            finally:
                held.set()
    assert not place.exists()


# What containers keep in their directories is counted and not changed, and the room is known.


def handles():
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_what_has_too_many_entries_or_bytes_is_named_and_nothing_else_is_looked_at(
    dirs, hook, place, monkeypatch
):
    before = handles()
    await dirs.prepare(NAME, wipe=True)
    (place / "a").write_bytes(bytes(100_000))
    for number in range(20):  # a file of several names is one
        os.link(place / "a", place / f"a{number}")
    os.mkfifo(place / "fifo")
    (place / "loop").symlink_to("loop")
    (place / os.fsdecode(b"\xff\xfe\n" * 80)).touch()
    for name in (NAME.replace("main", "other"), ".removed-0"):
        place.with_name(name).mkdir()
    for number in range(150):
        (place.with_name(".removed-0") / f"{number}").touch()

    for bytes_, entries, least in ((200_000, 100, []), (90_000, 100, [1]), (200_000, 20, [21])):
        monkeypatch.setattr(hookdirs, "BYTES", bytes_)
        monkeypatch.setattr(hookdirs, "ENTRIES", entries)
        found = [(count, name) for _, count, name in large_directories(hook)]
        assert [NAME] * len(least) == [name for _, name in found]
        assert all(count >= one for (count, _), one in zip(found, least, strict=True))
    assert before == handles()
    monkeypatch.setattr(hookdirs, "names_in", lambda _: [NAME.replace("main", "removed-since")])
    assert [] == large_directories(hook)


async def test_a_pass_ends_after_a_while_and_the_next_one_begins_behind_it(dirs, monkeypatch):
    tried, loop = [], asyncio.get_running_loop()
    now = loop.time()
    await removed(dirs, *map(str, range(5)))

    def slow(name, above):
        nonlocal now
        tried.append(name)
        now += 0.75 * PASS
        return itertools.repeat(None, STEPS)

    with monkeypatch.context() as patch:
        patch.setattr("agent.hookdirs.remove_stepwise", slow)
        patch.setattr(loop, "time", lambda: now)
        assert [True] * 5 == [(await dirs.clear()).more for _ in range(5)]

    assert [2] * 5 == [tried.count(name) for name in sorted(set(tried))]

"""HAMi-core's directories: open to containers, closed above them, and never through a link."""

import asyncio
import contextlib
import errno
import itertools
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent import hookdirs
from agent.errors import StateError
from agent.hookdirs import PASS, STEPS, HostHookDirs, large_directories
from agent.host.system import Worker
from agent.ledger import HookFacts
from agent.sandbox.lab.cluster import stand_in
from tests.fakes.offload import Inline
from tests.host.hook_space import NAME, cleared


@contextlib.contextmanager
def umask(value):
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize(("mask", "above"), [(0o077, 0o755), (0, 0o2775)])
async def test_leaves_are_open_to_all_without_sticky_and_parents_are_not(dirs, hook, mask, above):
    """Also with the bits of a parent that hands its group down, as /usr/local on Debian."""
    hook.chmod(above)
    with umask(mask):
        await dirs.prepare(NAME, wipe=True)

    found = {path.relative_to(hook).as_posix(): mode(path) for path in hook.rglob("*")}
    leaf = f"vgpu/containers/{NAME}"
    assert [(leaf, 0o777)] == [(name, bits) for name, bits in found.items() if bits & 0o022]
    assert {0o755} == {bits & 0o777 for name, bits in found.items() if name != leaf}


async def test_what_is_too_open_or_too_closed_is_put_right(dirs, hook):
    containers = hook / "vgpu" / "containers"
    (containers / NAME).mkdir(parents=True)
    containers.chmod(0o777)
    (containers / NAME).chmod(0o1700)

    await dirs.prepare(NAME, wipe=False)

    assert (0o755, 0o777) == (mode(containers), mode(containers / NAME))


async def test_container_directories_are_found_and_nothing_else(dirs, hook):
    assert [] == await dirs.found()
    await dirs.prepare(NAME, wipe=True)
    containers = hook / "vgpu" / "containers"
    (containers / NAME.replace("main", "link")).symlink_to(containers / NAME)
    (containers / NAME.replace("main", "file")).write_text("")
    for other in ("backup", "a_b", NAME.upper(), f"{NAME}_", f"x{NAME}", "6f1c1f0e_main"):
        (containers / other).mkdir()

    assert [NAME] == await dirs.found()


@pytest.mark.parametrize("step", ["vgpu", "vgpu/containers"])
async def test_a_link_in_the_way_is_refused_and_not_followed(dirs, hook, tmp_path, step):
    victim = tmp_path / "victim"
    (victim / "containers" / NAME).mkdir(parents=True)
    (victim / NAME).mkdir()
    victim.chmod(0o700)
    before = sorted(victim.rglob("*"))
    (hook / step).parent.mkdir(parents=True, exist_ok=True)
    (hook / step).symlink_to(victim)

    for act in (dirs.prepare(NAME, wipe=True), dirs.remove(NAME), dirs.found()):
        with pytest.raises(StateError, match="cannot be used"):
            await act

    assert (0o700, before) == (mode(victim), sorted(victim.rglob("*")))


IN_ITS_PLACE = {
    "link": lambda leaf: leaf.symlink_to(leaf.parents[3] / "victim"),
    "file": lambda leaf: leaf.touch(),
    "fifo": os.mkfifo,
    "socket": lambda leaf: os.mknod(leaf, stat.S_IFSOCK | 0o600),
}


@pytest.mark.parametrize("wipe", [True, False])
@pytest.mark.parametrize("make", IN_ITS_PLACE.values(), ids=IN_ITS_PLACE)
async def test_what_is_in_a_containers_place_is_replaced_and_not_followed(
    dirs, hook, tmp_path, make, wipe
):
    (tmp_path / "victim").mkdir(mode=0o700)
    (tmp_path / "victim" / "file").write_text("mine")
    leaf = hook / "vgpu" / "containers" / NAME
    leaf.parent.mkdir(parents=True)
    make(leaf)

    await dirs.prepare(NAME, wipe=wipe)
    done = await cleared(dirs)

    assert 0 == done.kept
    assert ([leaf], 0o777) == (list(leaf.parent.iterdir()), mode(leaf))
    assert (0o700, "mine") == (mode(tmp_path / "victim"), (tmp_path / "victim/file").read_text())


NO_NAMES = ("", "..", "a_..", "a_b/c", "../a_b", "a_B", "a_-b", "a_b-", "_b", "a_", "a_b\n")


@pytest.mark.parametrize("name", [*NO_NAMES, f"{'a' * 65}_b"])
async def test_a_name_that_is_no_pod_and_container_makes_nothing(dirs, hook, name):
    with pytest.raises(StateError, match="not of the form <pod UID>_<container>"):
        await dirs.prepare(name, wipe=True)
    with pytest.raises(StateError, match="not of the form <pod UID>_<container>"):
        await dirs.remove(name)

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


@pytest.mark.parametrize("trouble", ["none", "open", "vgpu", "vgpu/containers", "missing"])
async def test_a_look_and_a_preparation_find_the_same_wrong(dirs, hook, trouble):
    said = "must be a directory of root's, "
    match trouble:
        case "open":
            hook.chmod(0o777)
            said = "writable by everybody"
        case "missing":
            hook.rmdir()
            said = f"No such file or directory; {hook} must be"
        case "vgpu" | "vgpu/containers":
            await dirs.prepare(NAME, wipe=True)
            (hook / trouble).rename(hook / "away")
            (hook / trouble).symlink_to(hook / "away")

    found = await refusals(dirs)

    if trouble == "none":
        assert [None, None, None] == [*found, await dirs.check()]
    else:
        assert [True, True] == [said in str(one) for one in found]
    if trouble == "missing":
        assert [] == await dirs.found()
        await dirs.remove(NAME)


def installed(hook, *names):
    (hook / "vgpu").mkdir(exist_ok=True)
    for name in names:
        (hook / "vgpu" / name).write_bytes(stand_in() if name.startswith("lib") else b"text\n")


async def test_facts_name_the_versioned_library_if_there_is_one(dirs, hook, tmp_path):
    installed(hook, "libvgpu.so", "ld.so.preload")
    found = HookFacts(f"{hook}/vgpu/libvgpu.so", preload="text\n", hook_path=str(hook))
    assert found == await dirs.facts()

    installed(hook, "libvgpu.so.2.10.0", "license")
    (tmp_path / "dev").mkdir()
    for node in ("nvidia-uvm", "nvidiactl", "nvidia0"):
        (tmp_path / "dev" / node).write_text("")

    assert (
        HookFacts(
            library=f"{hook}/vgpu/libvgpu.so.2.10.0",
            preload="text\n",
            has_license=True,
            device_nodes=(f"{tmp_path}/dev/nvidiactl", f"{tmp_path}/dev/nvidia-uvm"),
            hook_path=str(hook),
        )
        == await dirs.facts()
    )


PLAIN, VERSIONED, PRELOAD = "libvgpu.so", "libvgpu.so.2.10.0", "ld.so.preload"


@pytest.mark.parametrize(
    ("files", "directories", "missing"),
    [
        ((), (), (PLAIN, PRELOAD)),
        ((PLAIN,), (), (PRELOAD,)),
        ((PRELOAD,), (), (PLAIN,)),
        ((PRELOAD, VERSIONED), (), ()),
        ((PRELOAD,), (PLAIN, VERSIONED), (PLAIN,)),  # as a runtime makes them in its place
    ],
    ids=str,
)
async def test_facts_name_what_is_missing_of_hami_core(dirs, hook, files, directories, missing):
    installed(hook, *files)
    for name in directories:
        (hook / "vgpu" / name).mkdir()

    assert tuple(f"{hook}/vgpu/{name}" for name in missing) == (await dirs.facts()).missing


def other_machine() -> bytes:
    head = bytearray(stand_in())
    head[18] ^= 0xFF
    return bytes(head)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x7fELF", b"<html>Not found</html>", stand_in()[:19], other_machine()],
    ids=["empty", "cut", "page", "shorter", "other-machine"],
)
async def test_facts_tell_a_library_that_no_loader_takes(dirs, hook, content):
    installed(hook, "libvgpu.so", "ld.so.preload")
    assert (await dirs.facts()).loadable
    (hook / "vgpu" / "libvgpu.so").write_bytes(content)

    assert not (await dirs.facts()).loadable
    installed(hook, "libvgpu.so.2.10.0")
    assert (await dirs.facts()).loadable, "the versioned one is mounted"


async def test_facts_have_the_text_of_the_preload_file_as_it_is_mounted(dirs, hook, tmp_path):
    installed(hook, "libvgpu.so")
    (hook / "vgpu" / "ld.so.preload").symlink_to(tmp_path / "text")
    for content, text in ((b"/a\r\n", "/a\r\n"), (b"\xff", "\udcff"), (b"/" * 99_999, "/" * 65536)):
        (tmp_path / "text").write_bytes(content)
        assert text == (await dirs.facts()).preload


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("place", ["", "vgpu"])
async def test_a_directory_of_somebody_else_is_refused(dirs, hook, place):
    (hook / "vgpu").mkdir()
    os.chown(hook / place, 65534, 65534)

    with pytest.raises(StateError, match=f"{(hook / place).name} belongs to uid 65534"):
        await dirs.prepare(NAME, wipe=True)


async def test_the_hook_path_may_be_a_link_of_the_operators(hook, tmp_path):
    (tmp_path / "link").symlink_to(hook)

    await HostHookDirs(tmp_path / "link", tmp_path, "", Inline(), Inline()).prepare(NAME, wipe=True)

    assert 0o777 == mode(hook / "vgpu" / "containers" / NAME)


# What was in container directories goes part by part, on a thread of its own.


async def test_a_wipe_removes_links_and_not_what_they_name(dirs, hook, tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").write_text("mine")
    await dirs.prepare(NAME, wipe=True)
    leaf = hook / "vgpu" / "containers" / NAME
    (leaf / "to-directory").symlink_to(tmp_path / "victim")
    (leaf / "to-file").symlink_to(tmp_path / "victim" / "file")
    (leaf / "nested").mkdir()
    (leaf / "nested" / "deeper").symlink_to(tmp_path / "victim")
    os.mkfifo(leaf / "pipe")

    await dirs.prepare(NAME, wipe=True)
    await cleared(dirs)

    assert [leaf] == list(leaf.parent.iterdir())
    assert [] == list(leaf.iterdir())
    assert "mine" == (tmp_path / "victim" / "file").read_text()


async def test_what_cannot_be_removed_is_tried_again_after_an_hour(dirs, hook, monkeypatch):
    tried = []

    def refuse(name: str, above: int) -> Iterator[None]:
        tried.append((name, above))
        raise PermissionError(errno.EPERM, "Operation not permitted")
        yield

    for name in (NAME, NAME.replace("main", "other")):
        await dirs.prepare(name, wipe=True)
        await dirs.remove(name)
    with monkeypatch.context() as patch:
        patch.setattr("agent.hookdirs.remove_stepwise", refuse)
        rounds = [await cleared(dirs) for _ in range(3)]
        (hook / "vgpu" / "containers" / tried[0][0]).rmdir()
        rounds.append(await cleared(dirs))

    assert 2 == len(tried)
    assert [2, 2, 2, 1] == [one.kept for one in rounds]
    assert {"Operation not permitted"} == {one.why for one in rounds}
    monkeypatch.setattr(hookdirs, "AGAIN", 0.0)
    assert 0 == (await cleared(dirs)).kept


async def test_a_container_that_goes_on_writing_holds_up_nobody_elses_removal(
    dirs, hook, monkeypatch
):
    monkeypatch.setattr("agent.hookdirs.STEPS", 20)
    containers = hook / "vgpu" / "containers"
    for number in range(5):
        name = NAME.replace("main", f"c{number}")
        await dirs.prepare(name, wipe=True)
        (containers / name / "a").write_text("")
        await dirs.remove(name)
    busy = min(containers.iterdir())

    for number in range(100):
        for more in range(20):
            (busy / f"{number}-{more}").write_text("")
        assert (await dirs.clear()).more

    assert [busy] == list(containers.iterdir())


async def test_no_removal_is_waited_for_by_what_is_made_beside_it(hook, tmp_path):
    """One file can take the disk seconds."""
    async with Worker("disk") as disk, Worker("clearing") as clearing:
        dirs = HostHookDirs(hook, tmp_path, "", disk, clearing)
        await dirs.prepare(NAME, wipe=True)
        await dirs.remove(NAME)
        held, begun = threading.Event(), threading.Event()

        def hang():
            begun.set()
            held.wait()

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
        assert {NAME} & {path.name for path in (hook / "vgpu" / "containers").iterdir()} == set()


# What containers keep in their directories is counted and not changed, and the room is known.


def handles():
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_what_has_too_many_entries_or_bytes_is_named_and_nothing_else_is_looked_at(
    dirs, hook, monkeypatch
):
    before = handles()
    await dirs.prepare(NAME, wipe=True)
    leaf = hook / "vgpu" / "containers" / NAME
    (leaf / "a").write_bytes(bytes(100_000))
    for number in range(20):  # a file of several names is one
        os.link(leaf / "a", leaf / f"a{number}")
    os.mkfifo(leaf / "fifo")
    (leaf / "loop").symlink_to("loop")
    (leaf / os.fsdecode(b"\xff\xfe\n" * 80)).touch()
    for name in (NAME.replace("main", "other"), ".removed-0"):
        (leaf.parent / name).mkdir()
    for number in range(150):
        (leaf.parent / ".removed-0" / f"{number}").touch()

    for bytes_, entries, least in ((200_000, 100, []), (90_000, 100, [1]), (200_000, 20, [21])):
        monkeypatch.setattr(hookdirs, "BYTES", bytes_)
        monkeypatch.setattr(hookdirs, "ENTRIES", entries)
        found = [(count, name) for _, count, name in large_directories(hook)]
        assert [NAME] * len(least) == [name for _, name in found]
        assert all(count >= one for (count, _), one in zip(found, least, strict=True))
    assert before == handles()
    monkeypatch.setattr(hookdirs, "names_in", lambda _: [NAME.replace("main", "removed-since")])
    assert [] == large_directories(hook)


async def test_a_pass_ends_after_a_while_and_the_next_one_begins_behind_it(dirs, hook, monkeypatch):
    tried, loop = list[str](), asyncio.get_running_loop()
    now = loop.time()
    names = [NAME.replace("main", f"c{number}") for number in range(5)]
    for name in names:
        await dirs.prepare(name, wipe=True)
        await dirs.remove(name)

    def slow(name: str, above: int) -> Iterator[None]:
        nonlocal now
        tried.append(name)
        now += 0.75 * PASS
        yield from itertools.repeat(None, STEPS)

    with monkeypatch.context() as patch:
        patch.setattr("agent.hookdirs.remove_stepwise", slow)
        patch.setattr(loop, "time", lambda: now)
        assert [True] * 5 == [(await dirs.clear()).more for _ in range(5)]

    assert [2] * 5 == [tried.count(name) for name in sorted(set(tried))]

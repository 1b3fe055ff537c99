"""What root in a container does to the directory that it has mounted, met without capabilities."""

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.host.hook_space import HERE, IDENTITIES, NO_PRIVILEGES, OTHER, renaming, said

pytestmark = HERE
ALL = "remove()\nclear()\nprepare()\n"
"""What happens when the container is gone, and when there is another one of its name."""


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    at = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield at
    finally:
        os.close(at)


@IDENTITIES
@pytest.mark.parametrize("mode", [0, 0o400, 0o111, 0o1700, 0o2755])
def test_a_mode_that_a_container_gave_its_directory_is_put_right(hook, leaf, mode, identity):
    (leaf / "a.cache").write_text("")
    leaf.chmod(mode)

    assert ["prepared"] == said(hook, "prepare(wipe=False)\n", *identity)

    assert (0o777, ["a.cache"]) == (leaf.stat().st_mode & 0o7777, names(leaf))


@IDENTITIES
@pytest.mark.parametrize("mode", [0, 0o700, 0o755, 0o1777])
def test_a_directory_that_a_container_gave_away_is_replaced(hook, leaf, mode, identity):
    (leaf / "a.cache").write_text("")
    leaf.chmod(mode)
    os.chown(leaf, OTHER, OTHER)

    assert ["prepared"] == said(hook, "prepare()\n", *identity)

    assert (0o777, []) == (leaf.stat().st_mode & 0o7777, names(leaf))


@IDENTITIES
@pytest.mark.parametrize("mode", [0, 0o1777])
def test_one_that_is_held_stays_with_what_is_mounted_there_though_it_was_given_away(
    hook, leaf, mode, identity
):
    (leaf / "libvgpu.so").write_text("limits")
    leaf.chmod(mode)
    os.chown(leaf, OTHER, OTHER)

    (refused,) = said(hook, "prepare(wipe=False)\n", *identity)

    assert "cannot be used: a container changed" in refused
    assert [leaf] == list(leaf.parent.iterdir())
    assert ["libvgpu.so"] == names(leaf)


@IDENTITIES
@pytest.mark.parametrize("mode", [0, 0o400, 0o555, 0o1777])
def test_directories_of_roots_in_it_go_whatever_their_mode(hook, leaf, mode, identity):
    at = leaf
    for name in ("a", "b", "c"):
        at /= name
        at.mkdir()
        (at / "file").write_text("")
    for path in (at, at.parent, at.parent.parent, leaf):
        path.chmod(mode)

    assert ["removed", "0 ", "prepared"] == said(hook, ALL, *identity)
    assert [leaf] == list(leaf.parent.iterdir())


@IDENTITIES
@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_what_cannot_go_keeps_nothing_else_from_going(hook, leaf, mode, identity):
    (leaf / "shut" / "in").mkdir(parents=True)
    (leaf / "shut" / "in" / "file").write_text("")
    (leaf / "shut" / "in").chmod(mode)
    os.chown(leaf / "shut" / "in", OTHER, OTHER)
    for number in range(50):
        (leaf / str(number)).mkdir()
        (leaf / str(number) / "file").write_text("")

    assert ["removed", "1 Permission denied", "prepared"] == said(hook, ALL, *identity)
    (kept,) = (path for path in leaf.parent.iterdir() if path != leaf)
    assert ["file"] == [path.name for path in kept.rglob("*") if path.is_file()]
    assert ["0 "] == said(hook, "clear()\n")
    assert [leaf] == list(leaf.parent.iterdir())


def test_what_stays_is_tried_once_and_keeps_its_name(hook, leaf):
    for number in range(400):
        (leaf / "deep" / f"shut{number}" / "in").mkdir(parents=True)
        os.chown(leaf / "deep" / f"shut{number}", OTHER, OTHER)
        (leaf / "deep" / f"file{number}").write_text("")

    assert ["removed", "1 Permission denied", "prepared"] == said(hook, ALL, *NO_PRIVILEGES)
    (kept,) = (path for path in leaf.parent.iterdir() if path != leaf)
    (deep,) = kept.iterdir()
    assert {f"shut{number}" for number in range(400)} == set(names(deep))


def test_thousands_of_entries_that_stay_are_given_up_and_hold_up_no_other(hook, leaf):
    (leaf / "shut").mkdir()
    with opened(leaf / "shut") as shut:
        for number in range(3000):
            os.mkdir(str(number), dir_fd=shut)
    os.chown(leaf / "shut", OTHER, OTHER)
    other = leaf.with_name(f"{leaf.name}-b")
    other.mkdir()
    (other / "file").write_text("")

    lines = f"remove()\nNAME += '-b'\n{ALL}"

    assert ["removed", "removed", "1 Permission denied", "prepared"] == said(
        hook, lines, *NO_PRIVILEGES
    )
    assert [] == list(other.iterdir())


@pytest.mark.parametrize("mode", [0o777, 0])
def test_five_thousand_directories_in_each_other_go(hook, mode):
    """In memory, for some disks take milliseconds for each of them."""
    lines = f"""
prepare()
at = os.open(hook / "vgpu" / "containers" / NAME, os.O_RDONLY)
for _ in range(5000):
    os.mkdir("d", dir_fd=at)
    above, at = at, os.open("d", os.O_RDONLY, dir_fd=at)
    os.fchmod(above, {mode})
    os.close(above)
remove()
clear()
print(os.listdir(hook / "vgpu" / "containers"))
"""
    mounted = ("sh", "-c", 'mount -t tmpfs -o mode=755 none "$0" && exec "$@"', str(hook))

    assert ["prepared", "removed", "0 ", "[]"] == said(hook, lines, *mounted, *NO_PRIVILEGES)


def test_odd_names_and_files_go(hook, leaf):
    odd = ["\n\x1b[2Jforged" * 20, "a" * 255, "-rf", " ", os.fsdecode(b"\xff\xfe"), ".removed-x"]
    with opened(leaf) as at:
        for name in odd:
            os.mkdir(name[:255], dir_fd=at)
            os.close(os.open(f"{name[:255]}/f", os.O_CREAT | os.O_WRONLY, dir_fd=at))
    os.mkfifo(leaf / "fifo")
    os.truncate(os.open(leaf / "sparse", os.O_CREAT | os.O_WRONLY), 10 * 2**40)
    (leaf / "link").symlink_to("/")
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as served, contextlib.chdir(leaf):
        served.bind("socket")

    assert ["removed", "0 ", "prepared"] == said(hook, ALL, *NO_PRIVILEGES)
    assert [leaf] == list(leaf.parent.iterdir())


@pytest.mark.parametrize("place", ["a", "a/b", "a/b/c"])
@pytest.mark.parametrize("mode", [0o755, 0o500])
def test_what_is_mounted_in_it_is_neither_entered_nor_changed(hook, leaf, tmp_path, place, mode):
    victim = tmp_path / "victim"
    (victim / "in").mkdir(parents=True)
    (victim / "in" / "file").write_text("mine")
    victim.chmod(mode)
    (leaf / place).mkdir(parents=True)
    (leaf / place).chmod(0o500)
    mounted = ("sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"')
    under = (*mounted, str(victim), str(leaf / place), *NO_PRIVILEGES)

    assert ["removed", "1 Device or resource busy", "prepared"] == said(hook, ALL, *under)
    assert (mode, "mine") == (victim.stat().st_mode & 0o777, (victim / "in/file").read_text())
    assert ["0 "] == said(hook, "clear()\n", *NO_PRIVILEGES)
    assert [leaf] == list(leaf.parent.iterdir())


def test_a_directory_that_is_a_mount_point_is_that_containers_trouble_alone(hook, leaf, tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").write_text("mine")
    mounting = f"sh('mount', '--bind', {str(tmp_path / 'victim')!r}, {str(leaf)!r})\n"

    lines = said(hook, f"{mounting}prepare()\nremove()\nclear()\nNAME += '-b'\nprepare()\n")

    assert lines[0].endswith("[HA-5003]")
    assert "Device or resource busy" in lines[1]
    assert ["0 ", "prepared"] == lines[2:]
    assert "mine" == (tmp_path / "victim" / "file").read_text()


def test_an_immutable_file_stays_and_is_counted(hook, leaf):
    (leaf / "file").write_text("")
    if subprocess.run(["chattr", "+i", leaf / "file"], capture_output=True, check=False).returncode:  # noqa: S603, S607 -- Debian's
        pytest.skip("no immutable files here")

    assert ["removed", "1 Operation not permitted", "prepared"] == said(hook, ALL, *NO_PRIVILEGES)


def test_a_tenant_that_renames_meanwhile_gains_nothing(hook, leaf):
    """It has the directory mounted still, so that it can go on in what was set aside."""
    parts = """
async def many():
    for number in range(200):
        await dirs.clear(again=number % 10 == 0)
asyncio.run(many())
prepare()
"""
    with renaming(leaf, 'os.chmod(f"m{number % 5}", 0)', 'os.symlink("/", f"m{number % 5}/link")'):
        lines = said(hook, "remove()\n" + parts, *NO_PRIVILEGES)

    assert ["removed", "prepared"] == lines
    assert ["0 "] == said(hook, "clear()\n", *NO_PRIVILEGES)
    assert [leaf] == list(leaf.parent.iterdir())

"""What root in a container does to its directory, and what disks do, met without capabilities."""

import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.host.hook_space import (
    HERE,
    IDENTITIES,
    NAME,
    NO_PRIVILEGES,
    OTHER,
    TOP,
    beside,
    each,
    renaming,
    said,
)

pytestmark = HERE


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


CHANGED = [
    *((mode, 0, False, "prepared", ["a.cache"]) for mode in (0, 0o400, 0o111, 0o1700, 0o2755)),
    *((mode, OTHER, True, "prepared", []) for mode in (0, 0o700, 0o755, 0o1777)),
    *((mode, OTHER, False, "delete the pod", ["a.cache"]) for mode in (0, 0o1777)),
]
"""What a container made of its directory, whether it is wiped, what is said, and what is in it."""


@IDENTITIES
def test_a_directory_that_a_container_changed_is_put_right_or_replaced_unless_it_is_held(
    hook, leaf, identity
):
    leaves, lines = beside(leaf, len(CHANGED)), ""
    for one, (mode, owner, wipe, _, _) in zip(leaves, CHANGED, strict=True):
        (one / "a.cache").write_text("")
        one.chmod(mode)
        if owner:
            os.chown(one, owner, owner)
        lines += each([one], f"prepare({wipe=})")

    told = said(hook, lines, *identity)

    for one, (_, _, _, words, left), line in zip(leaves, CHANGED, told, strict=True):
        assert (True, left) == (words in line, names(one))
        if words == "prepared":
            assert 0o777 == one.stat().st_mode & 0o7777
        else:
            assert f"{one} changed its own directory" in line or str(one) in line


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


def test_what_is_mounted_in_it_is_neither_entered_nor_changed(hook, leaf, tmp_path):
    leaves, victims = beside(leaf, 6), []
    mounting = ""
    for one, (place, mode) in zip(
        leaves, itertools.product(("a", "a/b", "a/b/c"), (0o755, 0o500)), strict=True
    ):
        victim = tmp_path / f"victim{len(victims)}"
        (victim / "in").mkdir(parents=True)
        (victim / "in" / "file").write_text("mine")
        victim.chmod(mode)
        victims.append(victim)
        (one / place).mkdir(parents=True)
        (one / place).chmod(0o500)
        mounting += f"mount --bind {victim} {one / place} && "
    under = ("sh", "-c", f'{mounting} exec "$@"', "sh", *NO_PRIVILEGES)

    lines = each(leaves, "remove()") + "clear()\n" + each(leaves, "prepare()")

    assert [*["removed"] * 6, "6 Device or resource busy", *["prepared"] * 6] == said(
        hook, lines, *under
    )
    assert [0o755, 0o500] * 3 == [victim.stat().st_mode & 0o777 for victim in victims]
    assert ["mine"] * 6 == [(victim / "in/file").read_text() for victim in victims]
    assert ["0 "] == said(hook, "clear()\n", *NO_PRIVILEGES)
    assert {leaf, *leaves} == set(leaf.parent.iterdir())


def test_a_directory_that_is_a_mount_point_is_that_containers_trouble_alone(hook, leaf, tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").write_text("mine")
    mounting = f"sh('mount', '--bind', {str(tmp_path / 'victim')!r}, {str(leaf)!r})\n"

    lines = said(hook, f"{mounting}prepare()\nremove()\nclear()\nNAME += '-b'\nprepare()\n")

    assert lines[0].endswith("[HA-5003]")
    assert "Device or resource busy" in lines[1]
    assert ["0 ", "prepared"] == lines[2:]
    assert "mine" == (tmp_path / "victim" / "file").read_text()


def test_a_tenant_that_renames_meanwhile_gains_nothing(hook, leaf):
    """It has the directory mounted still, so that it can go on in what was set aside."""
    parts = """
async def many():
    for number in range(200):
        await dirs.clear()
        large_directories(hook)
asyncio.run(many())
prepare()
"""
    with renaming(leaf, 'os.chmod(f"m{number % 5}", 0)', 'os.symlink("/", f"m{number % 5}/link")'):
        lines = said(hook, "remove()\n" + parts, *NO_PRIVILEGES)

    assert ["removed", "prepared"] == lines
    assert ["0 "] == said(hook, "clear()\n", *NO_PRIVILEGES)
    assert [leaf] == list(leaf.parent.iterdir())


# What root in a container keeps in its directory is counted without capabilities.


@IDENTITIES
def test_a_container_that_closes_its_own_directory_is_told(hook, leaf, identity):
    closed = [(0, 0), (0o300, 0), (0o744, OTHER)]
    leaves = beside(leaf, 3)
    for one, (mode, owner) in zip(leaves, closed, strict=True):
        (one / "file").touch()
        os.chown(one, owner, owner)
        one.chmod(mode)

    assert ["[0]", "[0]", "[1]"] == said(hook, each(leaves, "measure()"), *identity)
    found = [one.stat() for one in leaves]
    assert closed == [(one.st_mode & 0o7777, one.st_uid) for one in found]


# HAMi-core's directories on real file systems: full, read-only, without root's privileges.
#
# Each runs in a process with mounts of its own.


@pytest.mark.parametrize(("limit", "step"), [("nr_inodes=2", "containers"), ("nr_inodes=3", NAME)])
def test_a_full_or_read_only_disk_is_said_and_once_it_takes_writes_it_is_used(hook, limit, step):
    full, fresh, then, kept, *looks = said(
        hook,
        f"sh('mount', '-t', 'tmpfs', '-o', 'mode=755,{limit}', 'none', str(hook))\n"
        "prepare()\n"
        "sh('mount', '-o', 'remount,ro,nr_inodes=99', str(hook))\n"
        "prepare()\n"
        "sh('mount', '-o', 'remount,rw', str(hook))\n"
        "prepare()\n"
        "sh('mount', '-o', 'remount,ro', str(hook))\n"
        "prepare(wipe=False)\n"
        "check()\n"
        "sh('mount', '-o', 'remount,rw,size=64k', str(hook))\n"
        "check()\n"
        "sh('sh', '-c', f'! head -c 1M /dev/zero 2>&- >{hook}/full')\n"
        "check()\n",
    )

    assert f"{step}: No space left on device; {hook} must be" in full
    assert f"Read-only file system; {hook} must be" in fresh
    assert [True, True] == [line.endswith("[HA-5003]") for line in (full, fresh)]
    assert ["prepared", "prepared", "well"] == [then, kept, looks[1]]
    assert "Read-only file system; " in looks[0]
    assert "No space left on device; " in looks[2]


# What the agent has no right to remove, root removes by the two ways that are documented.


@pytest.fixture
def kept(hook: Path, leaf: Path) -> Path:
    """A hook path with a directory that the agent has kept, and one of a container that runs."""
    (leaf / "shut" / "in").mkdir(parents=True)
    (leaf / "shut" / "in" / "file").write_text("")
    (leaf / "shut" / "link").symlink_to(leaf.parent)
    for path in (leaf, leaf / "shut", leaf / "shut" / "in"):
        os.chown(path, OTHER, OTHER)
        path.chmod(0o700)
    lines = "remove()\nclear()\nprepare()\n"
    assert ["removed", "1 Permission denied", "prepared"] == said(hook, lines, *NO_PRIVILEGES)
    (leaf / "a.cache").write_text("")
    return hook


def left(hook: Path) -> list[str]:
    """What a look of the agent's leaves."""
    assert ["0 "] == said(hook, "clear()\n", *NO_PRIVILEGES)
    (leaf,) = (hook / "vgpu" / "containers").iterdir()
    return [leaf.name, *(path.name for path in leaf.iterdir())]


@pytest.mark.parametrize("by", ["the runbook's command", "systemd"])
def test_root_removes_what_the_agent_keeps_and_nothing_else(kept, tmp_path, by):
    if by == "systemd":
        tool = shutil.which("systemd-tmpfiles") or pytest.skip("needs systemd's tool")
        ours = (TOP / "systemd" / "hami-agent.tmpfiles.conf").read_text()
        (text,) = re.findall(r"^e .*$", ours, re.MULTILINE)
        file = tmp_path / "ours.conf"
        commands = [[tool, "--create", file], [tool, "--clean", file]]
    else:
        found = re.findall(r"^rm -rf .*$", (TOP / "RUNBOOK.md").read_text(), re.MULTILINE)
        (text,) = {line for line in found if ".removed-" in line}
        file = tmp_path / "command"
        commands = [["sh", "-eu", file]]
    file.write_text(text.replace("/usr/local", str(kept)) + "\n")
    for command in commands:
        subprocess.run(command, check=True)  # noqa: S603 -- our own words

    assert ["0 "] == said(kept, "clear()\n", *NO_PRIVILEGES)
    (leaf,) = (kept / "vgpu" / "containers").iterdir()
    assert [NAME, "a.cache"] == [leaf.name, *names(leaf)]

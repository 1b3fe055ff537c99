"""HAMi-core's directories on real file systems: full, read-only, without root's privileges.

Each runs in a process with mounts of its own.
"""

import os
from pathlib import Path

import pytest

from tests.host.hook_space import HERE, NAME, NO_PRIVILEGES, said

pytestmark = HERE


@pytest.fixture
def hook(tmp_path: Path) -> Path:
    (tmp_path / "hook").mkdir()
    return tmp_path / "hook"


@pytest.mark.parametrize("inodes", [2, 3])
def test_a_full_disk_is_said_and_once_it_has_room_it_is_used(hook, inodes):
    full, then = said(
        hook,
        f"sh('mount', '-t', 'tmpfs', '-o', 'mode=755,nr_inodes={inodes}', 'none', str(hook))\n"
        "prepare()\n"
        "sh('mount', '-o', 'remount,nr_inodes=99', str(hook))\n"
        "prepare()\n",
    )

    step = {2: "containers", 3: NAME}[inodes]
    assert f"{step}: No space left on device; free some space there." in full
    assert full.endswith("[HA-5003]")
    assert "prepared" == then


def test_a_read_only_disk_is_said_and_what_is_there_already_is_used(hook):
    fresh, then, kept = said(
        hook,
        "sh('mount', '-t', 'tmpfs', '-o', 'mode=755,ro', 'none', str(hook))\n"
        "prepare()\n"
        "sh('mount', '-o', 'remount,rw', str(hook))\n"
        "prepare()\n"
        "sh('mount', '-o', 'remount,ro', str(hook))\n"
        "prepare(wipe=False)\n",
    )

    assert "vgpu: Read-only file system; mount it read-write." in fresh
    assert fresh.endswith("[HA-5003]")
    assert ["prepared", "prepared"] == [then, kept]


def test_a_missing_hook_path_is_said(hook):
    (line,) = said(hook / "missing", "prepare()\n")

    assert (
        f"No such file or directory; make the directory {hook / 'missing'}, owned by root." in line
    )
    assert line.endswith("[HA-5003]")


def test_root_without_privileges_is_enough(hook):
    """As the manifests and the unit run the agent; libvgpu.so's files belong to any user."""
    lines = said(
        hook,
        "prepare()\n"
        "leaf = hook / 'vgpu' / 'containers' / NAME\n"
        "(leaf / 'a.cache').write_text('')\n"
        "prepare(wipe=False)\n"
        "print((leaf / 'a.cache').exists())\n"
        "prepare()\n"
        "print((leaf / 'a.cache').exists())\n"
        "remove()\n",
        *NO_PRIVILEGES,
    )

    assert ["prepared", "prepared", "True", "prepared", "False", "removed"] == lines


def test_files_of_containers_users_are_removed_without_privileges(hook):
    leaf = hook / "vgpu" / "containers" / NAME
    assert ["prepared"] == said(hook, "prepare()\n")
    (leaf / "a.cache").write_text("")
    (leaf / "open").mkdir()
    (leaf / "open" / "b").write_text("")
    for path in (leaf / "a.cache", leaf / "open", leaf / "open" / "b"):
        os.chown(path, 65534, 65534)
    (leaf / "open").chmod(0o777)

    assert ["removed", "0 "] == said(hook, "remove()\nclear()\n", *NO_PRIVILEGES)
    assert [] == list(leaf.parent.iterdir())


def test_what_a_container_locked_away_is_left_and_said_without_privileges(hook):
    leaf = hook / "vgpu" / "containers" / NAME
    assert ["prepared"] == said(hook, "prepare()\n")
    (leaf / "closed").mkdir()
    (leaf / "closed" / "b").write_text("")
    os.chown(leaf / "closed", 65534, 65534)
    (leaf / "closed").chmod(0o700)

    lines = said(hook, "remove()\nclear()\nprepare()\n", *NO_PRIVILEGES)

    assert ["removed", "1 Permission denied", "prepared"] == lines
    assert ["0 "] == said(hook, "clear()\n")
    assert [leaf] == list(leaf.parent.iterdir())


def test_a_look_without_a_write_finds_a_full_and_a_read_only_disk(hook):
    lines = said(
        hook,
        "sh('mount', '-t', 'tmpfs', '-o', 'mode=755,size=64k', 'none', str(hook))\n"
        "prepare()\n"
        "check()\n"
        "(hook / 'full').write_bytes(b'')\n"
        "try:\n"
        "    (hook / 'full').write_bytes(bytes(2 ** 20))\n"
        "except OSError:\n"
        "    check()\n"
        "(hook / 'full').unlink()\n"
        "check()\n"
        "sh('mount', '-o', 'remount,ro', str(hook))\n"
        "check()\n",
    )

    assert ["prepared", "well", "well"] == [lines[0], lines[1], lines[3]]
    assert "No space left on device; free some space there." in lines[2]
    assert "Read-only file system; mount it read-write." in lines[4]


@pytest.mark.parametrize("limit", ["nr_inodes=300", "size=256k"])
def test_a_container_that_filled_the_disk_is_removed_from_the_full_disk(hook, limit):
    """A rename and a removal need no room."""
    lines = said(
        hook,
        "leaf = hook / 'vgpu' / 'containers' / NAME\n"
        "prepare()\n"
        "try:\n"
        "    for number in range(1000):\n"
        "        (leaf / f'd{number}').mkdir()\n"
        "        (leaf / f'd{number}' / 'file').write_bytes(bytes(4096))\n"
        "except OSError as error:\n"
        "    print(error.strerror)\n"
        "remove()\n"
        "clear()\n"
        "prepare()\n",
        *("sh", "-c", f'mount -t tmpfs -o mode=755,{limit} none "$0" && exec "$@"', str(hook)),
        *NO_PRIVILEGES,
    )

    assert ["prepared", "No space left on device", "removed", "0 ", "prepared"] == lines

"""HAMi-core comes onto the host whole, only where it differs, and nothing else is touched."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.shape import tree

pytestmark = pytest.mark.looptime(False)
SCRIPT = "deploy/chart/hami-agent/files/place-library.sh"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """Where an image of HAMi's 2.10 has the library."""
    folder = tmp_path / "image"
    folder.mkdir()
    (folder / "libvgpu.so.v2.10.0").write_bytes(b"\x7fELF new")
    return folder


@pytest.fixture
def host(tmp_path: Path) -> Path:
    folder = tmp_path / "vgpu"
    folder.mkdir()
    return folder


def place(
    image: Path, host: Path, programs: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """As the init container does it; `programs` come before the system's."""
    return subprocess.run(  # noqa: S603 -- a script of this repository
        ("/bin/sh", "-euc", tree.text(SCRIPT), "place-library", str(image), str(host)),
        check=False,
        env={"PATH": f"{programs}:{os.defpath}" if programs else os.defpath},
        capture_output=True,
        text=True,
    )


def inodes(host: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in host.iterdir()}


def test_an_empty_directory_gets_both_files(image, host):
    done = place(image, host)

    assert (0, "") == (done.returncode, done.stderr)
    assert b"\x7fELF new" == (host / "libvgpu.so").read_bytes()
    assert f"{host}/libvgpu.so\n" == (host / "ld.so.preload").read_text()
    assert {"libvgpu.so", "ld.so.preload"} == {path.name for path in host.iterdir()}
    assert {0o644} == {stat.S_IMODE(path.stat().st_mode) for path in host.iterdir()}


def test_what_differs_is_replaced_and_who_has_it_open_keeps_it(image, host):
    (host / "libvgpu.so").write_bytes(b"\x7fELF old")
    (host / "ld.so.preload").write_text("/elsewhere/libvgpu.so\n")
    (host / "containers").mkdir()

    with (host / "libvgpu.so").open("rb") as running:
        place(image, host)

        assert b"\x7fELF old" == running.read()
    assert b"\x7fELF new" == (host / "libvgpu.so").read_bytes()
    assert f"{host}/libvgpu.so\n" == (host / "ld.so.preload").read_text()
    assert {"containers", "ld.so.preload", "libvgpu.so"} == set(inodes(host))


@pytest.mark.parametrize("wrong", ["", "writable", "another's", "a link"])
def test_only_what_could_be_written_by_others_is_replaced(image, host, tmp_path, wrong):
    place(image, host)
    library, programs, elsewhere = host / "libvgpu.so", tmp_path / "programs", tmp_path / "else"
    programs.mkdir()
    elsewhere.write_bytes(b"\x7fELF other")
    match wrong:
        case "writable":
            library.chmod(0o666)
        case "another's":  # Only root can give files away: here `stat` says that it was.
            lie = 'set -- "$1" "$(echo "$2" | sed s/%u/4242/)" "$3"'
            text = f'#!/bin/sh\nif [ "$3" = "{library}" ]; then {lie}; fi\n'
            (programs / "stat").write_text(f'{text}exec {shutil.which("stat")} "$@"\n')
            (programs / "stat").chmod(0o755)
        case "a link":
            library.unlink()
            library.symlink_to(elsewhere)
    before = inodes(host)

    done = place(image, host, programs)

    assert (2 - bool(wrong)) == done.stdout.count("is as it should be")
    assert bool(wrong) == (before["libvgpu.so"] != inodes(host)["libvgpu.so"])
    assert before["ld.so.preload"] == inodes(host)["ld.so.preload"]
    assert (False, b"\x7fELF new") == (library.is_symlink(), library.read_bytes())
    assert b"\x7fELF other" == elsewhere.read_bytes()


def test_a_library_without_a_version_in_its_name_comes_first(image, host):
    (image / "libvgpu.so").write_bytes(b"\x7fELF plain")

    place(image, host)

    assert b"\x7fELF plain" == (host / "libvgpu.so").read_bytes()


def test_an_image_without_the_library_is_said_so_and_nothing_changes(host, tmp_path):
    (host / "libvgpu.so").write_bytes(b"\x7fELF old")

    done = place(tmp_path / "none", host)

    assert 1 == done.returncode
    assert "set library.path or library.image" in done.stderr
    assert {"libvgpu.so"} == set(inodes(host))


def test_what_killed_runs_left_goes_and_nothing_else(image, host):
    ours = {".new-aB3dE6", ".new-000000"}
    others = {".new-1234567", ".new-other", "new-aB3dE6"}
    for name in ours | others | {".new-living"}:
        (host / name).touch()
    for name in ours | others:
        os.utime(host / name, (0, 0))
    (host / ".new-folder").mkdir()
    (host / ".new-linked").symlink_to(host / "new-aB3dE6")

    done = place(image, host)

    assert (0, "") == (done.returncode, done.stderr)
    left = others | {".new-folder", ".new-linked", ".new-living"}
    assert left | {"libvgpu.so", "ld.so.preload"} == set(inodes(host))


def test_a_run_that_is_killed_is_swept_up_after(image, host):
    script = tree.text(SCRIPT).replace("put libvgpu.so\n", "kill -KILL $$\n")
    killed = subprocess.run(  # noqa: S603 -- a script of this repository
        ("/bin/sh", "-euc", script, "place-library", str(image), str(host)), check=False
    )
    (left,) = host.iterdir()
    assert (-9, ".new-") == (killed.returncode, left.name[:5])
    os.utime(left, (0, 0))

    place(image, host)

    assert {"libvgpu.so", "ld.so.preload"} == set(inodes(host))

"""deploy/needs.sh: no Debian package is installed unasked, and what lacks is told in a sentence."""

import os
import pty
import subprocess

import pytest

from tests.shape import tree

pytestmark = pytest.mark.looptime(False)
MACHINE = 'id() { echo "$UID_HERE"; }; apt-get() { :; }; install_packages() { echo "got $*"; }'
NEEDED = "needs bash bash; needs 'one two' bash no-such-one"
ASKED = "it needs Debian packages: one two. "


def said(script: str, typed: str = "", uid: int = 0, **environ: str) -> tuple[int, str]:
    """How the lines end, and what they say; typed on a terminal, if anything is."""
    here, there = pty.openpty() if typed else (None, None)
    if here is not None:
        os.write(here, typed.encode())
    done = subprocess.run(  # noqa: S603 -- our own script
        ["/bin/bash", "-euc", f"source deploy/needs.sh; {MACHINE}; {script}; echo on"],
        cwd=tree.ROOT,
        stdin=subprocess.DEVNULL if there is None else there,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={"PATH": "/usr/bin:/bin", "UID_HERE": str(uid), **environ},
        text=True,
        check=False,
    )
    for descriptor in (here, there):
        if descriptor is not None:
            os.close(descriptor)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("with_these", "code", "expected"),
    [
        ({}, 1, f"{ASKED}Install them, or say YES=1\n"),
        ({"YES": "1"}, 0, f"{ASKED}Installing them\ngot one two\non\n"),
        ({"CI": "true"}, 0, f"{ASKED}Installing them\ngot one two\non\n"),
        ({"typed": "y\n"}, 0, f"{ASKED}Install them? [y/N] got one two\non\n"),
        ({"typed": "\n"}, 1, f"{ASKED}Install them? [y/N] "),
        ({"uid": 1, "YES": "1"}, 1, "it needs one two (only root can install them)\n"),
    ],
    ids=str,
)
def test_what_is_missing_is_installed_by_who_said_yes(with_these, code, expected):
    assert (code, expected) == said(f'{NEEDED}; install_for "it needs"', **with_these)


@pytest.mark.parametrize(
    ("script", "environ", "code", "expected"),
    [
        (NEEDED, {"uid": 1}, 0, "skipped: it needs one two (only root can install them)\n"),
        ("lacks+=(Linux)", {}, 0, "skipped: it needs Linux\n"),
        ("lacks+=(Linux)", {"CI": "1"}, 1, "failed: it needs Linux, and CI may not skip it\n"),
        (NEEDED, {}, 0, "on\n"),
        ("needs bash bash; install_for it", {}, 0, "on\n"),
    ],
)
def test_what_no_package_brings_is_a_skip_and_in_ci_a_failure(script, environ, code, expected):
    assert (code, expected) == said(f'{script}; skip_where_lacking "it needs"', **environ)


def test_a_release_that_lacks_go_is_told_so_before_its_image_is_built(tmp_path):
    go = tmp_path / "go"
    go.write_text("#!/bin/sh\necho go version go1.1 linux/amd64\n")
    go.chmod(0o755)
    done = subprocess.run(
        ["deploy/release"],  # noqa: S607 -- our own script
        cwd=tree.ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        text=True,
        check=False,
    )

    assert (1, "") == (done.returncode, done.stdout)
    assert done.stderr.startswith("a release needs ")
    assert done.stderr.endswith("Go 1.26.0 or later (here is go1.1)\n")

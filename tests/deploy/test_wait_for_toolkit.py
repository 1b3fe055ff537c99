"""Who waits for GPU Operator's toolkit needs no right of root for it, and says what is missing."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shape import tree

pytestmark = [
    pytest.mark.looptime(False),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else"),
]
SCRIPT = "deploy/chart/hami-agent/files/wait-for-toolkit.sh"
NOBODY = 65532


@pytest.fixture
def validations() -> Iterator[Path]:
    """The directory of the host, as a kubelet makes it. Pytest's own are closed to all but root."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "validations"
        folder.mkdir()
        for one in (folder.parent, folder):
            one.chmod(0o755)
        yield folder


def wait(validations: Path) -> "subprocess.CompletedProcess[str]":
    """As the init container does it, which ends here with 9 where it would begin to wait."""
    told = tree.text(SCRIPT).replace("sleep 5", "exit 9")
    return subprocess.run(  # noqa: S603 -- a script of this repository
        ("/bin/sh", "-euc", told, "wait-for-toolkit", str(validations)),
        check=False,
        env={"PATH": os.defpath},
        cwd="/",
        user=NOBODY,
        group=0,
        extra_groups=(),
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("mode", [0o755, 0o750], ids=oct)
def test_a_toolkit_that_is_ready_is_seen_without_being_root(validations: Path, mode: int):
    (validations / "toolkit-ready").touch(0o600)
    validations.chmod(mode)

    done = wait(validations)

    assert (0, "", "") == (done.returncode, done.stdout, done.stderr)


def test_one_that_is_not_ready_is_waited_for(validations: Path):
    done = wait(validations)

    assert (9, "") == (done.returncode, done.stderr)
    assert "waiting for the toolkit of GPU Operator\n" == done.stdout


def test_a_directory_that_is_closed_is_said_so(validations: Path):
    (validations / "toolkit-ready").touch()
    validations.chmod(0o700)

    done = wait(validations)

    assert 9 == done.returncode
    assert f"no right to look into {validations}" in done.stderr

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
TEXT = tree.text("deploy/chart/hami-agent/files/wait-for-toolkit.sh").replace("sleep 5", "exit 9")
NOBODY = 65532
READY = "toolkit-ready"


@pytest.fixture
def validations() -> Iterator[Path]:
    """The directory of the host, as a kubelet makes it. Pytest's own are closed to all but root."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "validations"
        folder.mkdir()
        for one in (folder.parent, folder):
            one.chmod(0o755)
        yield folder


@pytest.mark.parametrize(
    ("mode", "made", "code", "out", "err"),
    [
        (0o755, READY, 0, "", ""),
        (0o750, READY, 0, "", ""),
        (0o755, "other", 9, "waiting for the toolkit of GPU Operator\n", ""),
        (0o700, READY, 9, "", "no right to look into "),
    ],
)
def test_it_is_waited_for_by_who_is_not_root(validations, mode, made, code, out, err):
    """As the init container does it, which ends here with 9 where it would begin to wait."""
    (validations / made).touch(0o600)
    validations.chmod(mode)

    done = subprocess.run(  # noqa: S603 -- a script of this repository
        ("/bin/sh", "-euc", TEXT, "wait-for-toolkit", str(validations)),
        check=False,
        env={"PATH": os.defpath},
        cwd="/",
        user=NOBODY,
        group=0,
        extra_groups=(),
        capture_output=True,
        text=True,
    )

    assert (code, out) == (done.returncode, done.stdout)
    assert (err in done.stderr) if err else ("" == done.stderr)

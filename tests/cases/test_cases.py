"""Each case is right. A case is a script with a small instance of a fault: see box.py."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.agent_process import ENVIRON, ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.looptime(False),
    pytest.mark.timeout(360),
]
HERE = Path(__file__).parent
CASES = sorted({path.stem for path in HERE.glob("*.py")} - {"box", Path(__file__).stem})


@pytest.mark.parametrize("name", CASES)
def test_the_case_is_right(name: str):
    done = subprocess.run(
        [sys.executable, str(HERE / f"{name}.py")],
        cwd=ROOT,
        env=ENVIRON,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=330,
        check=False,
    )

    assert "VERDICT right" == done.stdout.rstrip().rpartition("\n")[2], done.stdout

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
WRONG = {
}
"""Faults that are known and not mended yet. Who mends one removes its name."""

HERE = Path(__file__).parent
CASES = sorted({path.stem for path in HERE.glob("*.py")} - {"box", Path(__file__).stem})


class WrongCaseError(AssertionError):
    """The case says that the agent is wrong."""


def marked(name: str) -> object:
    known = pytest.mark.xfail(raises=WrongCaseError, strict=True, reason="not mended yet")
    return pytest.param(name, marks=known if name in WRONG else ())


@pytest.mark.parametrize("name", [marked(name) for name in CASES])
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
    verdict = done.stdout.rstrip().rpartition("\n")[2]
    if verdict.startswith("VERDICT wrong"):
        raise WrongCaseError(done.stdout)
    assert "VERDICT right" == verdict, done.stdout


def test_what_is_not_mended_yet_is_a_case():
    assert set() == WRONG - set(CASES)

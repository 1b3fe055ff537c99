"""Which examples the properties are held against: hypothesis itself tells CI by its variables."""

import subprocess
import sys

import pytest

from tests.shape.tree import ROOT

SAY = "from hypothesis import settings; print(settings().derandomize)"


@pytest.mark.parametrize(("variables", "derandomized"), [({}, "False"), ({"CI": "true"}, "True")])
def test_a_run_of_ci_plays_the_same_examples_each_time(variables, derandomized):
    said = subprocess.run(  # noqa: S603 -- our own interpreter and arguments
        (sys.executable, "-c", SAY),
        cwd=ROOT,
        env=variables,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert derandomized == said.stdout.strip()

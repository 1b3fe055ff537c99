"""Which examples the properties are held against, and that a slow machine fails none of them."""

import subprocess
import sys

import pytest

from tests.shape.tree import ROOT

SAY = """
import tests.conftest
from hypothesis import settings
print(settings().derandomize, settings().deadline)
"""


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

    assert [derandomized, "None"] == said.stdout.split()

"""What MIGRATION.md tells to type works, as it stands there."""

import json
import re
import shlex

import pytest

from tests.process.agent_process import ROOT, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]

TEXT = (ROOT / "MIGRATION.md").read_text()


def test_an_annotation_is_decoded():
    (line,) = re.findall(r"^hami-agent (decode .+)$", TEXT, re.MULTILINE)

    decoded = run(*shlex.split(line))

    assert 0 == decoded.returncode, decoded.stderr
    assert "GPU-1" in json.dumps(json.loads(decoded.stdout))

"""What SETTINGS.md and GUIDE.md tell to type works, as it stands there."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.process.agent_process import ROOT, run

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(120)]


TEXT = (ROOT / "SETTINGS.md").read_text()
PROMPT = "hami-agent "


def told(verb: str) -> list[str]:
    """The arguments of the one command of that verb, without what stands behind them."""
    (line,) = re.findall(rf"^{re.escape(PROMPT)}({verb}\b.*)$", TEXT, re.MULTILINE)
    return shlex.split(line, comments=True)


def test_the_settings_are_shown_with_their_origin():
    shown = run(*told("config show"))

    assert (0, "") == (shown.returncode, shown.stderr)
    assert re.search(r"sharing\.splitCount +10 +default", shown.stdout)


def test_the_profile_that_the_page_shows_is_checked_and_taken(tmp_path: Path):
    (example,) = re.findall(r"^```\n(sharing:\n.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    (file := tmp_path / "config.yaml").write_text(example)
    command = [str(file) if word == "FILE" else word for word in told("config check")]

    checked = run(*command)

    assert 0 == checked.returncode, checked.stderr
    assert checked.stdout.endswith("ok\n")


def test_all_files_of_a_node_are_checked_together(tmp_path: Path):
    (inline,) = re.findall(r"`hami-agent (config check config\.yaml [^`]+)`", TEXT)
    contents = {
        "config.yaml": "sharing: {splitCount: 20}\n",
        "device-config.yaml": "nvidia: {deviceMemoryScaling: 1.5}\n",
        "config.json": '{"nodeconfig": [{"name": "gpu-1", "devicesplitcount": 5}]}\n',
    }
    words = inline.split()
    assert set(contents) <= set(words)
    for name, content in contents.items():
        (tmp_path / name).write_text(content)

    checked = run(*(str(tmp_path / word) if word in contents else word for word in words))

    assert 0 == checked.returncode, checked.stderr
    shown = [line.split()[:2] for line in checked.stdout.splitlines()]
    assert [["sharing.splitCount", "5"], ["sharing.memoryScaling", "1.5"]] == shown[-3:-1]


GUIDE = (ROOT / "GUIDE.md").read_text()


def test_an_annotation_is_decoded():
    (line,) = re.findall(r"^hami-agent (decode .+)$", GUIDE, re.MULTILINE)

    decoded = run(*shlex.split(line))

    assert 0 == decoded.returncode, decoded.stderr
    assert "GPU-1" in json.dumps(json.loads(decoded.stdout))

"""What SETTINGS.md and GUIDE.md tell to type works, as it stands there."""

import re
import shlex
from pathlib import Path

import pytest

from tests.process.agent_process import ROOT, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

TEXT = (ROOT / "SETTINGS.md").read_text()
DECODED = re.findall(r"^hami-agent decode .+$", (ROOT / "GUIDE.md").read_text(), re.MULTILINE)
FILES = {
    "config.yaml": "sharing: {splitCount: 20}\n",
    "device-config.yaml": "nvidia: {deviceMemoryScaling: 1.5}\n",
    "config.json": '{"nodeconfig": [{"name": "gpu-1", "devicesplitcount": 5}]}\n',
    "FILE": re.findall(r"^```\n(sharing:\n.*?)^```", TEXT, re.MULTILINE | re.DOTALL)[0],
}
SHOWN = r"sharing\.splitCount +5 .*sharing\.memoryScaling +1\.5 [^\n]*\n[^\n]*$"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (r"^hami-agent (config show\b.*)$", r"sharing\.splitCount +10 +default"),
        (r"^hami-agent (config check\b.*)$", r"ok\n$"),
        (r"`hami-agent (config check config\.yaml [^`]+)`", SHOWN),
        (r"^hami-agent (decode .+)$", '"GPU-1"'),
    ],
)
def test_a_documented_command_does_what_it_is_told_to(tmp_path: Path, command: str, said: str):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (line,) = re.findall(command, "\n".join((TEXT, *DECODED)), re.MULTILINE)
    words = shlex.split(line, comments=True)

    ended = run(*(str(tmp_path / word) if word in FILES else word for word in words))

    assert (0, "") == (ended.returncode, ended.stderr)
    assert re.search(said, ended.stdout, re.DOTALL), ended.stdout

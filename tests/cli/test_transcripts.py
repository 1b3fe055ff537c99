"""What the verbs print, character for character: the command lines of tests/golden/verbs.txt.

To add a case, add its line `$ hami-agent …` and run `make golden`. The files that the lines name
are in tests/golden/verbs. HERE stands for their folder, ESC for escape.
"""

import contextlib
import re
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.cli.transcripts import ran
from tests.recorded import FOLDER, golden_part, parts


def transcript(line: str, folder: Path) -> str:
    """Run the line in a copy of the folder."""
    here = str(shutil.copytree(FOLDER / "verbs", folder / "verbs"))
    with contextlib.chdir(here):
        text = ran(line.replace("HERE", here).replace("ESC", "\x1b")).replace(here, "HERE")
    return re.sub(r"choose from [^)]*", "choose from …", text)  # argparse's, by the version


@pytest.mark.parametrize("line", parts("verbs.txt", "$ "))
def test_a_verb_prints_what_it_printed(line):
    with tempfile.TemporaryDirectory() as place:  # a short path: it has sockets
        text = transcript(line, Path(place))

    assert golden_part("verbs.txt", line, text, "$ ") == text

"""What the verbs print, character for character: the command lines of tests/golden/verbs.txt.

To add a case, add its line `$ hami-agent …` and run `python -m tests.cli.test_transcripts`. The
files that the lines name are in tests/golden/verbs. HERE stands for their folder, ESC for escape.
"""

import contextlib
import re
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.cli.transcripts import parts_of, ran

GOLDEN, FILES = Path("tests/golden/verbs.txt"), Path("tests/golden/verbs").absolute()
TOLD = parts_of(GOLDEN, r"\$ ")


def transcript(line: str, folder: Path) -> str:
    """Run the line in a copy of the folder."""
    here = str(shutil.copytree(FILES, folder / "verbs"))
    with contextlib.chdir(here):
        text = ran(line.replace("HERE", here).replace("ESC", "\x1b")).replace(here, "HERE")
    return re.sub(r"choose from [^)]*", "choose from …", text)  # argparse's, by the version


@pytest.mark.parametrize("line", TOLD)
def test_a_verb_prints_what_it_printed(line):
    with tempfile.TemporaryDirectory() as place:  # a short path: it has sockets
        assert TOLD[line] == transcript(line, Path(place))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        told = {line: transcript(line, Path(place, str(at))) for at, line in enumerate(TOLD)}
    GOLDEN.write_text("".join(f"$ {line}\n{text}" for line, text in told.items()), "utf-8")

"""What the verbs print, character for character: the command lines of tests/golden/verbs.txt.

To add a case, add its line `$ hami-agent …` and run `python -m tests.cli.test_transcripts`. The
files that the lines name are in tests/golden/verbs. HERE stands for their folder, ESC for escape.
"""

import contextlib
import io
import re
import shlex
import shutil
import tempfile
from pathlib import Path

import pytest

from agent.cli.main import dispatch

GOLDEN, FILES = Path("tests/golden/verbs.txt"), Path("tests/golden/verbs").absolute()
VARIABLE = re.compile(r"[A-Z_]+=")


def transcripts() -> dict[str, str]:
    """The answer to each command line."""
    _, *parts = re.split(r"^\$ (.*)\n", GOLDEN.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def transcript(line: str, folder: Path) -> str:
    """Run the line in a copy of the folder: exit code, standard output, standard error."""
    here = str(shutil.copytree(FILES, folder / "verbs"))
    words = shlex.split(line.replace("HERE", here).replace("ESC", "\x1b"))
    environ = dict(words.pop(0).split("=", 1) for word in [*words] if VARIABLE.match(word))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(here), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = dispatch(words[1:], environ)
    said = "".join(f"! {text}\n" for text in err.getvalue().splitlines())
    text = f"exit {code}\n{out.getvalue()}{said}".replace(here, "HERE")
    text = re.sub(r'(generatedAt"?: ?["\']).*?(["\'])', r"\1TIME\2", text)
    return re.sub(r"choose from [^)]*", "choose from …", text)  # argparse's, by the version


@pytest.mark.parametrize("line", transcripts())
def test_a_verb_prints_what_it_printed(line: str):
    with tempfile.TemporaryDirectory() as place:  # a short path: it has sockets
        assert transcripts()[line] == transcript(line, Path(place))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        told = {
            line: transcript(line, Path(place, str(number)))
            for number, line in enumerate(transcripts())
        }
    GOLDEN.write_text("".join(f"$ {line}\n{text}" for line, text in told.items()), "utf-8")

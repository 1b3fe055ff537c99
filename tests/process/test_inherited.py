"""Processes whose parent closed, filled up or ignored something: an answer, or a sentence."""

import os
import signal
import subprocess
import sys

import pytest

from tests.process.agent_process import ENVIRON, ROOT

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]

UNWRITTEN = "hami-agent: standard output cannot be written: "
AGENT = f"{sys.executable} -m agent"


def shell(line: str, **environ: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a line of bash."""
    ended = subprocess.run(  # noqa: S603 -- our own interpreter and arguments
        ["/bin/bash", "-c", line],
        cwd=ROOT,
        env=ENVIRON | environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [
        ("version", ""),
        ("version", "1"),
        ("config show", ""),
        ("config check", "1"),
        ("--help", ""),
        ("--help", "1"),
    ],
)
@pytest.mark.parametrize(
    ("where", "why"), [(">/dev/full", "No space left on device"), (">&-", "Bad file descriptor")]
)
def test_an_answer_that_cannot_be_written_is_one_sentence_and_no_success(
    words: str, where: str, why: str, unbuffered: str
):
    found = shell(f"{AGENT} {words} {where}", PYTHONUNBUFFERED=unbuffered)

    assert (74, "", f"{UNWRITTEN}{why}\n") == found


def test_a_reader_that_has_read_enough_is_no_error():
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(
        [sys.executable, "-m", "agent", "config", "schema"],
        cwd=ROOT,
        env=ENVIRON,
        stdout=write,
        stderr=subprocess.PIPE,
        timeout=50,
        check=False,
    )
    os.close(write)

    assert (128 + signal.SIGPIPE, b"") == (ended.returncode, ended.stderr)


@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-", "<&- 2>&-"])
def test_messages_that_cannot_be_written_change_no_exit_code(where: str):
    assert 78 == shell(f"{AGENT} run --split-count none {where}")[0]
    assert 2 == shell(f"{AGENT} decode {where}")[0]
    code, answer, _ = shell(f"{AGENT} version {where}")
    assert (0, "hami-agent ") == (code, answer[:11])


@pytest.mark.parametrize(
    ("source", "code", "says"),
    [
        ("< /dev/null", 2, "hami-agent: nothing to decode"),
        ("<<< $'\\xff\\xfe'", 1, "hami-agent: this is not a value of HAMi's"),
    ],
)
def test_an_input_that_is_no_text_is_one_sentence(source: str, code: int, says: str):
    found, answer, said = shell(f"{AGENT} decode {source}")

    assert (code, "", 1) == (found, answer, len(said.splitlines()))
    assert said.startswith(says)


def test_a_file_is_checked_from_standard_input():
    line = f"echo 'nvidia: {{deviceSplitCount: 4}}' | {AGENT} config check -"

    code, answer, said = shell(line)

    assert (0, "") == (code, said)
    assert "  sharing.splitCount  4      /dev/stdin:1:28" in answer.splitlines()

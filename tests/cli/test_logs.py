"""What strangers name and say is a value in one line of the log, and never a line of its own."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.looptime(False)

FORGED = "12:00:00 info    agent.stopped"
NAMES = {
    "newline": f"a\n{FORGED}",
    "return": f"a\r{FORGED}",
    "separators": f"a\u2028{FORGED}\x85{FORGED}\x0b{FORGED}",
    "escape": "a\x1b[2J\x1b]0;title\x07",
    "c1": "a\x9b2J\x9d0;title\x9c",
    "bidi": "a\u202egpj.exe\u2066\u200b",
    "undecodable": "a\udcff\udc1b",
    "long": "\n" * 255,
    "huge": "x\n" * 140_000,
}
LINES = """
import json, logging, pathlib, sys
import structlog
from agent.kit.logs import configure
configure("info", sys.argv[1], {})
log = structlog.get_logger()
for kind, name in json.loads(sys.stdin.read()).items():
    log.info("text", kind=kind, what=name)
    log.info("path", kind=kind, what=pathlib.Path(name))
    log.info("list", kind=kind, what=[name] * 1000)
    log.info("table", kind=kind, what={name: name})
    log.info("error", kind=kind, what=OSError(2, "none", name))
    try:
        raise ValueError(name)
    except ValueError:
        log.exception("trace", kind=kind)
    logging.getLogger("peer").warning("it said %s", name)
"""
WRONG = """
import logging
import structlog
from agent.kit.logs import configure
configure("info", "auto", {"JOURNAL_STREAM": "8:1"})
logging.getLogger("peer").error("it said %s and %s", "one thing")
logging.getLogger("peer").error("and went on")
structlog.get_logger().info("fine")
structlog.get_logger().error("broken")
"""
EVENTS = 7 * len(NAMES)


LONGEST = 6 * 2 * 16 * 1024
"""Characters of a line, however long the name: JSON writes six for one at most."""


def written(form: str) -> str:
    """All that a process logs of these names."""
    done = subprocess.run(  # noqa: S603 -- our own interpreter and arguments
        [sys.executable, "-c", LINES, form],
        input=json.dumps(NAMES),
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
        timeout=60,
    )
    assert "" == done.stdout
    return done.stderr


def test_in_text_one_event_is_one_line_and_a_terminal_obeys_none_of_it():
    lines = written("text").split("\n")
    assert "" == lines.pop()

    begun = [line for line in lines if not line.startswith("    | ")]
    assert EVENTS == len(begun)
    assert [] == [line for line in begun if line.startswith(FORGED)]
    assert [] == [line[:80] for line in lines if not line.isprintable()]
    assert max(map(len, lines)) < LONGEST


def test_in_json_one_event_is_one_line_and_its_text_is_the_name():
    lines = written("json").splitlines()

    told = [json.loads(line) for line in lines]
    assert EVENTS == len(told)
    assert NAMES["bidi"] == next(
        one["what"] for one in told if (one["event"], one.get("kind")) == ("text", "bidi")
    )
    assert [] == [line[:80] for line in lines if not (line.isascii() and line.isprintable())]
    assert max(map(len, lines)) < LONGEST


def test_a_library_that_logs_wrongly_does_not_fail_and_journald_is_told_each_priority():
    done = subprocess.run(  # noqa: S603 -- our own interpreter and lines
        [sys.executable, "-c", WRONG], capture_output=True, text=True, check=True, timeout=60
    )

    lines = done.stderr.splitlines()
    assert "and went on" in lines[-3]
    assert ["<6>{", "<3>{"] == [line[:4] for line in lines[-2:]]

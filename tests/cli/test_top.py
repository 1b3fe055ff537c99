"""`hami-agent top` on a terminal: what it shows, its keys, an agent that stops answering."""

import contextlib
import functools
import os
import select
import shutil
import sys
import termios

import pytest

from agent.cli import status
from agent.cli.main import Unreachable, dispatch
from agent.cli.status import StatusRead
from tests.builders import NOON
from tests.cli.test_status import STATUS

pytestmark = pytest.mark.looptime(False)
PLAIN = {"NO_COLOR": "1"}
WORDS = ["top", "--socket", "/x/api.sock"]


class FakeScreen:
    """A terminal whose user presses one key after the other, then q."""

    def __init__(self, stack, monkeypatch, answers, keys=b"", lines=40, columns=100):
        self.ours, theirs = os.openpty()
        stack.callback(os.close, self.ours)
        stack.callback(os.close, theirs)
        self.answers, self.keys = list(answers), [*keys, ord("q")]
        self.before = termios.tcgetattr(theirs)
        for name, mode in (("stdin", "r"), ("stdout", "w")):
            stream = os.fdopen(os.dup(theirs), mode, encoding="utf-8")
            monkeypatch.setattr(sys, name, stack.enter_context(stream))
        size = os.terminal_size((columns, lines))
        monkeypatch.setattr(shutil, "get_terminal_size", lambda: size)
        monkeypatch.setattr(status, "status_at", self.read)
        monkeypatch.setattr(select, "select", self.wait)

    def read(self, _):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return StatusRead(answer, NOON, "/x/api.sock")

    def wait(self, waiting, *_):
        key = self.keys.pop(0)
        if key == ord("-"):
            return [], [], []  # the interval has passed
        os.write(self.ours, bytes([key]))
        return waiting, [], []

    def written(self):
        """All that was written until now."""
        os.set_blocking(self.ours, False)
        written = b""
        with contextlib.suppress(BlockingIOError):
            while True:
                written += os.read(self.ours, 65536)
        return written.decode()

    def pictures(self, environ):
        """What was shown, one picture after the other, each with its lines."""
        assert 0 == dispatch(WORDS, environ)
        assert self.before == termios.tcgetattr(sys.stdin), "the terminal is as it was"
        text = self.written()
        assert (True, True) == (text.startswith(status.OPENED), text.endswith(status.CLOSED))
        return [
            [line.removeprefix("\x1b[2K") for line in one.removesuffix("\x1b[J").split("\r\n")]
            for one in text.removesuffix(status.CLOSED).split("\x1b[H")[1:]
        ]


@pytest.fixture
def on_screen(monkeypatch):
    """Makes a FakeScreen of these answers."""
    with contextlib.ExitStack() as stack:
        yield functools.partial(FakeScreen, stack, monkeypatch)
        monkeypatch.undo()


@pytest.mark.parametrize("environ", [{}, PLAIN])
def test_gpus_and_containers_are_drawn_again_until_q(on_screen, environ):
    pictures = on_screen([STATUS], b"-x").pictures(environ)

    assert 3 == len(pictures), "after the interval, and after another key"
    for lines in pictures:
        assert 1 == sum("train-0" in line for line in lines)
        (bad,) = (line for line in lines if "BAD" in line)
        assert bad.startswith("1 " if environ else "\x1b[31m1 ")


def test_while_the_agent_does_not_answer_the_last_values_stay_and_their_age_is_said(on_screen):
    silent = Unreachable("/x/api.sock does not answer")
    screen = on_screen([STATUS, silent, STATUS], b"--")
    first, second, third = screen.pictures(PLAIN)

    assert "the values are of 12:00:00 UTC: /x/api.sock does not answer" == second[0]
    assert first == second[1:] == third


def test_what_does_not_fit_is_counted(on_screen):
    (lines,) = on_screen([STATUS], lines=6, columns=64).pictures(PLAIN)

    assert 6 == len(lines)
    assert lines[-1].endswith("more lines: `hami-agent status --by pod`, q ends")
    assert 64 >= max(map(len, lines))


@pytest.mark.parametrize("ended", [KeyboardInterrupt(), b""], ids=["Ctrl-C", "no terminal left"])
def test_without_a_key_to_come_it_ends(monkeypatch, on_screen, ended):
    def read(*_):
        if isinstance(ended, BaseException):
            raise ended
        return ended

    screen = on_screen([STATUS], b"x")
    with monkeypatch.context() as patch:
        patch.setattr(os, "read", read)
        assert 0 == dispatch(WORDS, {})
    assert status.CLOSED in screen.written()


def test_without_an_agent_the_screen_is_left_as_it_is(on_screen, capfd):
    screen = on_screen([Unreachable("nobody answers")])

    assert 3 == dispatch(WORDS, {})
    assert "" == screen.written()
    assert "nobody answers" in capfd.readouterr().err


def test_without_a_terminal_it_names_the_other_verb(capsys):
    assert 2 == dispatch(["top"], {})
    assert "there is no terminal: use `hami-agent status`" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "3601", "soon", "nan"])
def test_an_interval_that_is_none_is_refused(text, capsys):
    assert 2 == dispatch(["top", "--interval", text], {})
    assert "is not a number from 1 to 3600" in capsys.readouterr().err

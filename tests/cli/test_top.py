"""`hami-agent top` on a terminal: what it shows, its ends, an agent that stops answering."""

import asyncio
import functools
import io
import os
import pty
import select
import shutil
import signal
import sys
import termios
from asyncio.subprocess import DEVNULL

import pytest
from aiohttp import web

from agent.cli import status
from agent.cli.main import Unreachable, dispatch
from agent.cli.status import StatusRead
from agent.status import envelope
from agent.web.server import serve_socket
from tests.builders import NOON
from tests.cli.test_status import STATUS

pytestmark = pytest.mark.looptime(False)
PLAIN = {"NO_COLOR": "1"}
WORDS = ["top", "--socket", "/x/api.sock"]


class FakeScreen(io.StringIO):
    """A terminal whose user presses Ctrl-C when there are no more answers."""

    def __init__(self, monkeypatch, answers, lines=40, columns=100):
        super().__init__()
        self.answers = list(answers)
        monkeypatch.setattr(sys, "stdout", self)
        size = os.terminal_size((columns, lines))
        monkeypatch.setattr(shutil, "get_terminal_size", lambda: size)
        monkeypatch.setattr(status, "status_at", self.answer)
        monkeypatch.setattr(select, "select", self.wait)

    def isatty(self):
        return True

    def answer(self, _):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return StatusRead(answer, NOON, "/x/api.sock")

    def wait(self, *_):
        if not self.answers:
            raise KeyboardInterrupt
        return [], [], []

    def pictures(self, environ):
        """What was shown, one picture after the other, each with its lines."""
        assert 0 == dispatch(WORDS, environ)
        text = self.getvalue()
        assert (True, True) == (text.startswith(status.OPENED), text.endswith(status.CLOSED))
        return [
            [line.removeprefix("\x1b[2K") for line in one.removesuffix("\x1b[J").split("\n")]
            for one in text.removesuffix(status.CLOSED).split("\x1b[H")[1:]
        ]


@pytest.fixture
def on_screen(monkeypatch):
    """Makes a FakeScreen of these answers."""
    return functools.partial(FakeScreen, monkeypatch)


@pytest.mark.parametrize("environ", [{}, PLAIN])
def test_gpus_and_containers_are_drawn_again_until_it_is_interrupted(on_screen, environ):
    pictures = on_screen([STATUS] * 3).pictures(environ)

    assert 3 == len(pictures)
    for lines in pictures:
        assert 1 == sum("train-0" in line for line in lines)
        (bad,) = (line for line in lines if "BAD" in line)
        assert bad.startswith("1 " if environ else "\x1b[31m1 ")


def test_while_the_agent_does_not_answer_the_last_values_stay_and_their_age_is_said(on_screen):
    silent = Unreachable("/x/api.sock does not answer")
    first, second, third = on_screen([STATUS, silent, STATUS]).pictures(PLAIN)

    assert "the values are of 12:00:00 UTC: /x/api.sock does not answer" == second[0]
    assert first == second[1:] == third


def test_what_does_not_fit_is_counted(on_screen):
    (lines,) = on_screen([STATUS], lines=6, columns=64).pictures(PLAIN)

    assert 6 == len(lines)
    assert lines[-1].endswith("more lines: `hami-agent status --by pod`")
    assert 64 >= max(map(len, lines))


def test_without_an_agent_the_screen_is_left_as_it_is(on_screen, capfd):
    screen = on_screen([Unreachable("nobody answers")])

    assert 3 == dispatch(WORDS, {})
    assert "" == screen.getvalue()
    assert "nobody answers" in capfd.readouterr().err


LOGIN = """
import os, signal, sys
os.login_tty(int(sys.argv.pop(1)))
signal.signal(signal.SIGINT, signal.default_int_handler)
from agent.cli import main, status
if "fails" in sys.argv:
    pods, sys.argv[-1:] = iter([["once"]]), []
    status.pod_lines = lambda *_: next(pods)
sys.exit(main.dispatch(sys.argv[1:], {}))
"""
"""Runs `top` on a terminal of its own, as a shell does; with `fails` its second picture fails."""


@pytest.fixture
def opened_terminal():
    """Both ends of it; when they are closed, a program on it ends."""
    ends = pty.openpty()
    yield ends
    for end in ends:
        os.close(end)


@pytest.mark.process
@pytest.mark.parametrize(
    ("end", "code"),
    [("x\nq", 0), ("Q", 0), ("\x03", 0), (signal.SIGTERM, 0), ("fails", 1)],
    ids=["q", "Q", "Ctrl-C", "SIGTERM", "an exception"],
)
async def test_a_terminal_is_as_it_was_whatever_ends_it(tmp_path, opened_terminal, end, code):
    served = {"/api/v1/status": lambda _: web.Response(body=envelope("Status", STATUS, NOON))}
    main, terminal = opened_terminal
    before, socket = termios.tcgetattr(terminal), tmp_path / "api.sock"
    shown = b""

    async def until(mark):
        nonlocal shown
        while mark not in shown:
            shown += await asyncio.to_thread(os.read, main, 65536)

    words = (str(terminal), "top", "--interval", "1", "--socket", str(socket))
    words += ("fails",) * (end == "fails")
    async with asyncio.timeout(40), serve_socket(served, socket):
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", LOGIN, *words), pass_fds=(terminal,), stderr=DEVNULL
        )
        await until(b"gpu-a07")
        during = termios.tcgetattr(terminal)[3]
        if isinstance(end, signal.Signals):
            program.send_signal(end)
        elif end != "fails":
            for key in end[:-1]:  # another key draws it again
                shown = b""
                os.write(main, key.encode())
                await until(b"gpu-a07")
            os.write(main, end[-1].encode())
        await until(status.CLOSED.encode())
        ended = await program.wait()

    assert (code, 0) == (ended, during & (termios.ICANON | termios.ECHO))
    assert before == termios.tcgetattr(terminal)

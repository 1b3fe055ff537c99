"""What the output can show, and what is said while a command waits."""

import contextlib
import io
import sys

import pytest

from agent.cli.output import terminal_width, working


class FakeTerminal(io.StringIO):
    """Standard error on a terminal."""

    def isatty(self):
        return True


def test_on_a_terminal_a_wait_is_named_and_leaves_no_trace(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := FakeTerminal())
    with contextlib.suppress(ValueError), working("reading"):
        assert "reading ..." == terminal.getvalue()
        int("x")

    assert "reading ...\r\x1b[K" == terminal.getvalue()


def test_a_script_hears_nothing_of_a_wait(monkeypatch):
    monkeypatch.setattr(sys, "stderr", pipe := io.StringIO())
    with working("reading"):
        pass

    assert not pipe.getvalue()


@pytest.mark.parametrize(
    ("given", "width"), [("80", 80), ("5", 20), ("", 120), ("wide", 120), ("9" * 5000, 120)]
)
def test_without_a_terminal_the_width_is_that_of_columns_if_it_is_one(given, width):
    assert width == terminal_width({"COLUMNS": given})

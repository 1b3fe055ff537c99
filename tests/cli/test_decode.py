"""`decode` reads a value from standard input too. What it decodes: tests/golden/verbs.txt."""

import io
import json

import pytest

from agent.cli.main import dispatch


def test_a_terminal_is_not_waited_for(capsys, monkeypatch):
    typed = io.StringIO("typed")
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", typed)

    assert 2 == dispatch(["decode"], {})
    assert "give a value or pipe one in" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["-"]])
def test_a_value_is_read_from_stdin_too(words, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("GPU-1,10,81559,100,NVIDIA-Tesla P4,0,true:\n"))

    assert 0 == dispatch(["decode", *words], {})
    assert "register" == json.loads(capsys.readouterr().out)["kind"]

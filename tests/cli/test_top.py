"""`hami-agent top` without what it needs says what to use instead."""

import importlib.util

import pytest

from agent.cli.main import dispatch


@pytest.fixture
def with_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())


def test_without_the_extra_it_names_the_package_and_the_other_verb(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

    assert 2 == dispatch(["top"], {})
    err = capsys.readouterr().err
    assert "run `uv sync --extra cli` in its source directory, or use `hami-agent status`" in err


def test_without_a_terminal_it_names_the_other_verb(with_the_extra, capsys):
    assert 2 == dispatch(["top"], {})
    assert "there is no terminal: use `hami-agent status`" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "3601", "soon", "nan"])
def test_an_interval_that_is_none_is_refused(text, capsys):
    assert 2 == dispatch(["top", "--interval", text], {})
    assert "is not a number from 1 to 3600" in capsys.readouterr().err

"""The same seed plays the same histories, whatever else the process has loaded."""

import importlib
import sys
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.machine.playing import play_chunk


class Numbers(RuleBasedStateMachine):
    """Keeps what is drawn."""

    counted: dict[int, int]
    drawn: list[int]

    @rule(number=st.integers(0, 10**9))
    def keep(self, number: int) -> None:
        type(self).drawn.append(number)


def draws() -> list[int]:
    """All numbers of some histories of one seed."""
    machine = type("Drawn", (Numbers,), {"drawn": []})
    play_chunk(machine, 7, 30)
    return machine.drawn  # type: ignore[attr-defined]


def test_constants_of_loaded_modules_change_no_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = draws()
    tmp_path.joinpath("full_of_numbers.py").write_text(
        f"NUMBERS = {[7_000_000 + n for n in range(100)]}\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("full_of_numbers")
    try:
        assert draws() == before
    finally:
        del sys.modules["full_of_numbers"]

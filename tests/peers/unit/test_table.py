"""What was measured is written for people, and the same for programs."""

import json
from pathlib import Path

import pytest

from tests.peers.lab.table import Table


def test_a_program_reads_every_figure_with_its_bound_and_unit(tmp_path: Path):
    table = Table()
    table.add("start → ready", 1.5, 2.0)
    table.add("pods", 3, unit="pods")

    table.write(tmp_path / "build" / "peers.md")

    assert [
        {"what": "start → ready", "measured": 1.5, "bound": 2.0, "unit": "s"},
        {"what": "pods", "measured": 3, "bound": None, "unit": "pods"},
    ] == json.loads((tmp_path / "build" / "peers.json").read_text())
    assert "start → ready" in (tmp_path / "build" / "peers.md").read_text()


def test_of_what_several_workers_measured_the_worse_is_told():
    table, other = Table(), Table()
    table.add("start → ready", 1.5, 2.0)
    other.add("start → ready", 1.7, 2.0)
    other.add("pods", 3, unit="pods")

    table.take(other.told())

    assert [("start → ready", 1.7), ("pods", 3)] == [(row.what, row.measured) for row in table.rows]


def test_a_count_is_over_its_bound_by_one_and_a_time_only_by_far():
    table = Table()

    table.hold("pods refused", 0, 0, unit="")
    table.hold("lock free", 24.0, 5.0)
    with pytest.raises(AssertionError, match="pods refused: 1, not 0"):
        table.hold("pods refused", 1, 0, unit="")
    with pytest.raises(AssertionError, match="lock free: 26 s, not 25 s"):
        table.hold("lock free", 26.0, 5.0)

    assert ["over", "over"] == [row.cells()[-1] for row in table.rows]


def test_a_count_with_a_bound_cannot_be_told_without_being_held():
    with pytest.raises(ValueError, match="pods refused: a count with a bound is held"):
        Table().add("pods refused", 1, 0, unit="")

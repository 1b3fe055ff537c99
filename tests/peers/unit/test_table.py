"""What was measured is written for people, and the same for programs."""

import json
from pathlib import Path

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

"""The demo's witness of durability: a row that is not in the file yet is told."""

from types import SimpleNamespace
from typing import Any

from agent.ledger import Ledger, State
from agent.sandbox.kubelet.seen import KubeletEvent
from agent.sandbox.scenario.stage import DiskWatch
from agent.state import StateEncoder
from tests.builders import NOON, a_row

ROW = a_row()


def answered(kind="allocated", ids=ROW.slice_ids):
    return KubeletEvent(NOON, 0.0, kind, pod=ROW.key.pod_uid, container=ROW.key.container, ids=ids)


def watching(tmp_path, *rows):
    (tmp_path / "state.json").write_bytes(StateEncoder().encode(State(ledger=Ledger(rows=rows))))
    cluster: Any = SimpleNamespace(places=SimpleNamespace(state=tmp_path))
    return DiskWatch(cluster)


def test_a_row_that_is_on_disk_is_no_problem(tmp_path):
    disk = watching(tmp_path, ROW)
    disk.hear(answered())

    assert (1, []) == (disk.checks, disk.problems)


def test_a_row_that_is_not_there_yet_is_told(tmp_path):
    disk = watching(tmp_path)
    disk.hear(answered())

    assert 1 == len(disk.problems)


def test_a_row_with_other_ids_is_told(tmp_path):
    disk = watching(tmp_path, ROW)
    disk.hear(answered(ids=("GPU-x-1",)))

    assert 1 == len(disk.problems)


def test_a_missing_or_torn_file_is_told(tmp_path):
    disk = watching(tmp_path, ROW)
    (tmp_path / "state.json").write_bytes(b"{")
    disk.hear(answered())
    (tmp_path / "state.json").unlink()
    disk.hear(answered())

    assert 2 == len(disk.problems)


def test_only_answers_are_looked_for(tmp_path):
    disk = watching(tmp_path)
    disk.hear(answered(kind="admitted"))

    assert (0, []) == (disk.checks, disk.problems)

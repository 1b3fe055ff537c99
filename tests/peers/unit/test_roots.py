"""A cluster's directory is removed with it; what a killed run left behind, by the next one."""

import fcntl
from pathlib import Path

import pytest

from tests.peers.lab.roots import open_root, remove_leftovers


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HAMI_PEERS_ROOT", str(tmp_path))
    return tmp_path


@pytest.fixture
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In the place of a hierarchy of cgroups."""
    return tmp_path_factory.mktemp("tree")


def a_leftover(where: Path, name: str = "hp-left") -> Path:
    """What a run leaves that was killed."""
    root = where / name
    (root / "logs").mkdir(parents=True)
    (root / "held").touch()
    return root


def test_it_lies_where_it_is_told_to_and_is_removed(where):
    with open_root() as root:
        assert where == root.parent
        assert (root / "logs").is_dir()
    assert [] == list(where.iterdir())


def test_one_that_is_held_is_left_alone(where, tree):
    with open_root() as root:
        remove_leftovers(where, [tree])
        assert (root / "logs").is_dir()


def test_opening_one_removes_what_nobody_holds(where):
    left = a_leftover(where)
    with open_root():
        assert not left.exists()


def test_its_cgroups_are_removed_with_it(where, tree):
    left = a_leftover(where)
    (tree / left.name / "kubepods" / "pod").mkdir(parents=True)
    (tree / "another").mkdir()

    remove_leftovers(where, [tree])

    assert not left.exists()
    assert [tree / "another"] == list(tree.iterdir())


def test_one_whose_cgroups_are_in_use_stays_for_the_next_time(where, tree):
    left = a_leftover(where)
    busy = tree / left.name / "pod" / "process"
    busy.parent.mkdir(parents=True)
    busy.touch()  # such a directory cannot be removed, like a cgroup with processes

    remove_leftovers(where, [tree])
    assert (left / "logs").is_dir()

    busy.unlink()
    remove_leftovers(where, [tree])
    assert not left.exists()


def test_one_of_which_a_lock_is_taken_just_now_is_left_alone(where, tree):
    left = a_leftover(where)
    with (left / "held").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        remove_leftovers(where, [tree])
    assert left.exists()


def test_other_directories_are_left_alone(where, tree):
    other, early = a_leftover(where, "other"), where / "hp-early"
    early.mkdir()
    remove_leftovers(where, [tree])
    assert other.exists()
    assert early.exists()

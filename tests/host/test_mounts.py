"""A directory is lost when it was removed and what came in its place is seen read-only."""

from pathlib import Path

import pytest

from agent.host.node import WrittenDirectory, is_read_only


class Mounts:
    """Through which everything is seen read-only, or nothing."""

    read_only = False

    def look(self, directory: Path) -> bool:
        directory.stat()
        return self.read_only


@pytest.fixture
def mounts():
    return Mounts()


@pytest.fixture
def seen(tmp_path, mounts):
    path = tmp_path / "device-plugins"
    path.mkdir()
    with WrittenDirectory(path, mounts.look) as written:
        yield written


def test_a_directory_that_can_be_written_is_not_lost(seen):
    assert not seen.is_lost()


def test_a_directory_that_was_removed_or_made_anew_is_not_lost(seen):
    assert not seen.is_lost()
    seen.path.rmdir()
    assert not seen.is_lost()
    seen.path.mkdir()
    assert not seen.is_lost()


@pytest.mark.parametrize("looks", [0, 1], ids=["right after the start", "later"])
def test_a_removed_directory_with_a_read_only_one_in_its_place_is_lost(looks, seen, mounts):
    assert not any(seen.is_lost() for _ in range(looks))
    seen.path.rmdir()
    mounts.read_only = True
    assert not seen.is_lost()
    seen.path.mkdir()

    assert seen.is_lost()


def test_a_directory_on_a_file_system_that_turned_read_only_is_not_lost(seen, mounts):
    assert not seen.is_lost()
    mounts.read_only = True

    assert not seen.is_lost()


def test_a_directory_that_never_could_be_written_is_not_lost(tmp_path, mounts):
    mounts.read_only = True
    with WrittenDirectory(tmp_path / "made", mounts.look) as seen:
        seen.path.mkdir()
        assert not seen.is_lost()
        seen.path.rmdir()
        seen.path.mkdir()

        assert not seen.is_lost()


def test_what_the_kernel_says_is_asked(tmp_path):
    assert not is_read_only(tmp_path)
    with pytest.raises(FileNotFoundError):
        is_read_only(tmp_path / "absent")


def handles():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_handle_is_left_behind(seen):
    before = handles()
    with WrittenDirectory(seen.path) as written:
        for _ in range(3):
            assert not written.is_lost()

    assert before == handles()

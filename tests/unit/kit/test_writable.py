"""check_writable(): full, read-only and removed directories are told from those that are well."""

import errno
import os

import pytest

from agent.kit.disk import check_writable

WELL = {"f_blocks": 100, "f_bfree": 50, "f_bavail": 40, "f_files": 100, "f_ffree": 50, "f_flag": 0}


ORDER = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail")


def told(directory, user=0, **found):
    """The code of the error, 0 for none, of a file system that tells this of itself."""
    facts = WELL | found
    result = os.statvfs_result([facts.get(name, 0) for name in (*ORDER, "f_flag", "f_namemax")])
    try:
        check_writable(directory, "there", lambda _: result, lambda: user)
    except OSError as error:
        return error.errno if error.filename == "there" else None
    return 0


@pytest.fixture
def directory(tmp_path):
    opened = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield opened
    os.close(opened)


def test_a_directory_of_this_machine_takes_writes(directory):
    check_writable(directory, "there")


def test_a_read_only_one_does_not(directory):
    assert errno.EROFS == told(directory, f_flag=os.ST_RDONLY)


def test_one_without_a_free_block_or_inode_is_full(directory):
    assert errno.ENOSPC == told(directory, f_bfree=0, f_bavail=0)
    assert errno.ENOSPC == told(directory, f_ffree=0)


def test_what_is_set_aside_for_root_counts_for_root_alone(directory):
    assert 0 == told(directory, f_bavail=0)
    assert errno.ENOSPC == told(directory, user=1000, f_bavail=0)


def test_a_file_system_that_tells_no_size_is_full_for_nobody(directory):
    assert 0 == told(directory, f_blocks=0, f_bfree=0, f_bavail=0, f_files=0, f_ffree=0)


def test_a_directory_that_was_removed_takes_nothing(tmp_path):
    (tmp_path / "gone").mkdir()
    opened = os.open(tmp_path / "gone", os.O_RDONLY | os.O_DIRECTORY)
    (tmp_path / "gone").rmdir()

    assert errno.ENOENT == told(opened)
    os.close(opened)

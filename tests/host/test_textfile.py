"""Files of settings: read whole, or refused with a sentence."""

import os
from pathlib import Path

import pytest

from agent.errors import SettingsError
from agent.host.files import read_file


def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path):
    pipe = tmp_path / "config.yaml"
    os.mkfifo(pipe)

    with pytest.raises(SettingsError, match=r"config\.yaml: is a pipe"):
        read_file(pipe, 10)


@pytest.mark.parametrize(("size", "reason"), [(3, None), (10, None), (11, "is larger than 0 KiB")])
def test_a_file_is_read_up_to_its_bound(tmp_path, size, reason):
    file = tmp_path / "config.yaml"
    file.write_bytes(b"x" * size)

    if reason is None:
        assert b"x" * size == read_file(file, 10)
    else:
        with pytest.raises(SettingsError, match=reason):
            read_file(file, 10)


@pytest.mark.parametrize("name", ["none", "here", "loop", "x" * 300])
def test_what_cannot_be_read_is_refused_with_what_to_do(tmp_path, name):
    (tmp_path / "here").mkdir()
    (tmp_path / "loop").symlink_to("loop")

    with pytest.raises(SettingsError, match=r"cannot be read: .*; check the path and its rights"):
        read_file(tmp_path / name, 10)


def test_a_file_that_fails_while_it_is_read_is_refused_with_the_reason():
    with pytest.raises(SettingsError, match="/proc/self/mem: cannot be read: Input/output error"):
        read_file(Path("/proc/self/mem"), 10)


@pytest.mark.parametrize("name", ["none", "here", "loop", "file/x"])
def test_a_file_that_need_not_be_there_may_be_missing(tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "here").mkdir()
    (tmp_path / "loop").symlink_to("loop")

    assert b"" == read_file(tmp_path / "file", 10, needed=False)
    assert None is read_file(tmp_path / name, 10, needed=False)
    with pytest.raises(SettingsError, match="File name too long"):
        read_file(tmp_path / ("x" * 300), 10, needed=False)

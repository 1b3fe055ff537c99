"""Files of settings: read whole, refused with a sentence, and never waited for."""

import os

import pytest

from agent.core.errors import SettingsError
from agent.host.textfile import read_bounded


def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path):
    pipe = tmp_path / "config.yaml"
    os.mkfifo(pipe)

    with pytest.raises(SettingsError, match=r"config\.yaml: is a pipe"):
        read_bounded(pipe, 10)


@pytest.mark.parametrize(("size", "reason"), [(3, None), (10, None), (11, "is larger than 0 KiB")])
def test_a_file_is_read_up_to_its_bound(tmp_path, size, reason):
    file = tmp_path / "config.yaml"
    file.write_bytes(b"x" * size)

    if reason is None:
        assert b"x" * size == read_bounded(file, 10)
    else:
        with pytest.raises(SettingsError, match=reason):
            read_bounded(file, 10)

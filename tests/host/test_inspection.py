"""Names, paths and sockets, as this host shows them."""

import contextlib
import errno
import os
import socket
from pathlib import Path

import pytest

from agent.host import node as surroundings
from agent.host.node import foreign_plugins, write_failure
from agent.host.system import BOOT_ID, host_name, read_id


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_why_nothing_can_be_written_is_told(tmp_path: Path, monkeypatch, code):
    (tmp_path / "file").touch()
    assert (0, errno.ENOTDIR) == (write_failure(tmp_path), write_failure(tmp_path / "file"))

    def refuse(directory: int, name: str) -> None:
        raise OSError(code, os.strerror(code), name)

    monkeypatch.setattr("os.access", lambda *_: False)
    assert errno.EACCES == write_failure(tmp_path)
    monkeypatch.setattr(surroundings, "check_writable", refuse)
    assert code == write_failure(tmp_path)


def test_a_foreign_plugin_is_a_socket_of_its_name_with_a_listener(tmp_path: Path):
    with contextlib.ExitStack() as opened:
        for name in ("kubelet.sock", "nvidia-gpu.sock", "nvidia-dead.sock"):
            one = opened.enter_context(socket.socket(socket.AF_UNIX))
            one.bind(str(tmp_path / name))
            if "dead" not in name:
                one.listen()
        (tmp_path / "nvidia-file").touch()

        assert [str(tmp_path / "nvidia-gpu.sock")] == foreign_plugins(tmp_path)
    assert [] == foreign_plugins(tmp_path / "none")


def test_the_host_is_named_as_its_kubelet_names_the_node(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: " GPU-Node.Example ")

    assert "gpu-node.example" == host_name()


def test_ids_are_read_without_the_line_end_and_empty_where_they_cannot_be_read(tmp_path):
    (tmp_path / "id").write_text("2f7c7a3e\n")

    assert "2f7c7a3e" == read_id(tmp_path / "id")
    assert "" == read_id(tmp_path / "missing") == read_id(tmp_path)
    assert 36 == len(read_id(BOOT_ID))

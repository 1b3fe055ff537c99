"""Names, paths and sockets, as this host shows them."""

import errno
import os
import socket
from pathlib import Path

import pytest

from agent.host import node as surroundings
from agent.host.node import plugin_sockets, write_failure
from agent.host.system import BOOT_ID, host_name, read_id
from agent.node import PluginSocket


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


def test_a_socket_without_a_listener_is_dead_and_the_kubelets_is_passed_over(tmp_path: Path):
    names = ("kubelet.sock", "nvidia-gpu.sock", "other.sock")
    kubelet, theirs, other = (socket.socket(socket.AF_UNIX) for _ in names)
    with kubelet, theirs, other:
        for one, name in zip((kubelet, theirs, other), names, strict=True):
            one.bind(str(tmp_path / name))
        other.listen()
        (tmp_path / "checkpoint").touch()

        assert (
            PluginSocket(str(tmp_path / "nvidia-gpu.sock"), alive=False),
            PluginSocket(str(tmp_path / "other.sock"), alive=True),
        ) == plugin_sockets(tmp_path, "kubelet.sock")
    assert () == plugin_sockets(tmp_path / "none", "kubelet.sock")


def test_the_host_is_named_as_its_kubelet_names_the_node(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: " GPU-Node.Example ")

    assert "gpu-node.example" == host_name()


def test_ids_are_read_without_the_line_end_and_empty_where_they_cannot_be_read(tmp_path):
    (tmp_path / "id").write_text("2f7c7a3e\n")

    assert "2f7c7a3e" == read_id(tmp_path / "id")
    assert "" == read_id(tmp_path / "missing") == read_id(tmp_path)
    assert 36 == len(read_id(BOOT_ID))

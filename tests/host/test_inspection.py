"""Names, paths and sockets, as this host shows them."""

import datetime as dt
import errno
import os
import socket
from pathlib import Path

import pytest

from agent.host import node as surroundings
from agent.host.node import look_at, plugin_sockets
from agent.host.system import BOOT_ID, host_name, read_id
from agent.kit.timing import SystemClock
from agent.node import PluginSocket


def test_each_kind_of_path_has_its_word(tmp_path: Path):
    (tmp_path / "file").touch(mode=0o640)
    os.mkfifo(tmp_path / "pipe")
    kinds = {name: look_at(tmp_path / name).kind for name in ("", "file", "pipe", "none", "file/x")}

    assert {"": "directory", "file": "file", "pipe": "special file", "none": "", "file/x": ""} == (
        kinds
    )
    assert 0o640 == look_at(tmp_path / "file").mode


def test_what_is_missing_can_be_made_where_the_folder_above_lets_it(tmp_path: Path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "file").touch()
    closed = str(tmp_path / "closed")
    monkeypatch.setattr("os.access", lambda path, _: str(path) != closed)

    makable = {
        name: not look_at(tmp_path / name).failure
        for name in ("a", "a/b/c", "closed/a/b", "file/a")
    }

    assert {"a": True, "a/b/c": True, "closed/a/b": False, "file/a": False} == makable


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_why_nothing_can_be_written_is_told_of_a_directory_and_of_one_to_be_made(
    tmp_path: Path, monkeypatch, code
):
    assert 0 == look_at(tmp_path).failure == look_at(tmp_path / "new").failure

    def refuse(directory: int, name: str) -> None:
        raise OSError(code, os.strerror(code), name)

    monkeypatch.setattr(surroundings, "check_writable", refuse)

    assert code == look_at(tmp_path).failure == look_at(tmp_path / "new").failure


def test_a_path_that_cannot_be_looked_at_is_not_taken_for_missing(tmp_path: Path):
    (tmp_path / "loop").symlink_to("loop")

    assert "cannot be looked at" in look_at(tmp_path / "loop").kind


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


def test_a_directory_that_is_not_there_has_no_sockets(tmp_path: Path):
    assert () == plugin_sockets(tmp_path / "none", "kubelet.sock")


def test_the_host_is_named_as_its_kubelet_names_the_node(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: " GPU-Node.Example ")

    assert "gpu-node.example" == host_name()


def test_ids_are_read_without_the_line_end_and_empty_where_they_cannot_be_read(tmp_path):
    (tmp_path / "id").write_text("2f7c7a3e\n")

    assert "2f7c7a3e" == read_id(tmp_path / "id")
    assert "" == read_id(tmp_path / "missing") == read_id(tmp_path)
    assert 36 == len(read_id(BOOT_ID))


def test_now_is_in_utc():
    assert dt.timedelta(0) == SystemClock().now().utcoffset()

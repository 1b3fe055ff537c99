"""The host has its kubelet's name; ids of boot and machine are words or nothing."""

import socket

import pytest

from agent.host.process import boot_id, host_name, machine_id


def test_the_host_is_named_as_its_kubelet_names_the_node(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "gethostname", lambda: " GPU-Node.Example ")

    assert "gpu-node.example" == host_name()


def test_ids_are_read_without_the_line_end(tmp_path):
    (tmp_path / "id").write_text("2f7c7a3e\n")

    assert "2f7c7a3e" == boot_id(tmp_path / "id") == machine_id(tmp_path / "id")


def test_an_id_that_cannot_be_read_is_empty(tmp_path):
    assert "" == boot_id(tmp_path / "missing") == machine_id(tmp_path)


def test_this_boot_has_an_id():
    assert 36 == len(boot_id())

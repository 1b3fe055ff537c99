"""Ports for servers: nobody listens on them, no client gets them, and none is given twice."""

import socket
from pathlib import Path

import pytest

from tests.peers.lab.ports import Ports, free_ports, usable


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_no_port_is_given_twice():
    ports = [*free_ports(3), *free_ports(2), *free_ports(3)]
    assert len(ports) == len(set(ports))


@pytest.mark.skipif(not Path("/proc/sys/net").is_dir(), reason="asks the kernel of Linux")
def test_the_kernel_gives_none_of_them_to_a_client():
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if len(usable(low)) < low:
        assert [] == [port for port in free_ports(20) if low <= port <= high]


def test_a_port_on_which_somebody_listens_is_not_given(listener):
    with pytest.raises(RuntimeError, match="others listen"):
        Ports(range(listener, listener + 1)).take(1)


def test_two_processes_begin_at_different_places_and_go_round():
    among = range(15000, 15003)
    assert [15001, 15002, 15000] == Ports(among, 1).take(3)
    assert [15002] == Ports(among, 5).take(1)


def test_where_clients_get_nearly_all_ports_any_will_do():
    assert range(15000, 32768) == usable(32768)
    assert range(15000, 65536) == usable(1024)

"""Binding that fails is said in words, and nothing is left behind."""

import asyncio
import contextlib
import os
import socket
import stat
from pathlib import Path

import pytest

from agent.errors import AgentError, KubeletError, PermissionFault
from agent.kit.cell import Cell
from agent.kubelet.door import Incarnation, PluginServer, bind, socket_name, sweep
from agent.kubelet.register import Rival
from tests.fakes.allocator import FakeAllocator
from tests.fakes.chance import Seeded
from tests.fakes.door import RESOURCE, a_list
from tests.hami_vectors import vectors


def names(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


def test_a_name_that_is_taken_is_not_taken_over(tmp_path: Path):
    taken = tmp_path / socket_name(tmp_path, RESOURCE, Seeded(5))
    taken.write_text("mine")

    bound = bind(tmp_path, RESOURCE, Seeded(5))

    assert {taken.name, bound.path.name} == names(tmp_path)
    assert "mine" == taken.read_text()
    assert 0o600 == stat.S_IMODE(bound.path.stat().st_mode)
    bound.sock.close()


def test_each_start_has_a_socket_name_of_its_own_where_hami_has_one_for_all(tmp_path: Path):
    """A kubelet that knows the old name and a plugin on the new one are never mistaken."""
    vector = vectors("next_container")["next_container-244"]
    chance = Seeded(5)
    for resource, theirs in zip(vector.given, vector.expected, strict=True):
        ours = {socket_name(tmp_path, resource, chance) for _ in range(3)}

        assert 3 == len(ours)
        assert theirs not in ours
        assert all("/" not in name and name.endswith(".sock") for name in ours)


def test_when_every_name_is_taken_nothing_is_bound(tmp_path: Path):
    class Stuck(Seeded):
        def getrandbits(self, k: int) -> int:
            return 7

    (tmp_path / "hami-gpu-00000007.sock").touch()

    with pytest.raises(KubeletError, match="all names tried were taken"):
        bind(tmp_path, RESOURCE, Stuck())


@pytest.mark.parametrize(
    ("failure", "expected", "text"),
    [
        (PermissionError(13, "Permission denied"), PermissionFault, "may not be written"),
        (OSError(28, "No space left on device"), KubeletError, "No space left on device"),
    ],
)
def test_a_file_that_cannot_be_made_private_is_not_served(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: OSError,
    expected: type[AgentError],
    text: str,
):
    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(os, "fchmod", fail)

    with pytest.raises(expected, match=text):
        bind(tmp_path, RESOURCE, Seeded())


def test_a_link_in_the_place_of_the_socket_is_not_followed(tmp_path: Path):
    """Neither for the file nor for its mode: an attacker's link would point at another's file."""
    victim = tmp_path / "victim"
    victim.touch(mode=0o644)
    for target in ("victim", "nowhere"):
        taken = tmp_path / socket_name(tmp_path, RESOURCE, Seeded(5))
        taken.symlink_to(tmp_path / target)

        bound = bind(tmp_path, RESOURCE, Seeded(5))

        assert bound.path != taken
        assert 0o644 == stat.S_IMODE(victim.stat().st_mode)
        assert not (tmp_path / "nowhere").exists()
        bound.sock.close()
        bound.unlink()
        taken.unlink()


def test_a_file_that_was_swapped_right_after_the_bind_is_not_taken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Swapped(socket.socket):
        def bind(self, address: str) -> None:  # type: ignore[override]
            super().bind(address)
            Path(address).unlink()
            Path(address).touch()

    monkeypatch.setattr(socket, "socket", Swapped)

    with pytest.raises(KubeletError, match="all names tried were taken"):
        bind(tmp_path, RESOURCE, Seeded())


@pytest.mark.parametrize("mode", [0o666, 0o660, 0o604])
def test_a_socket_that_others_may_open_is_not_taken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
):
    """Somebody else's in its place, or one that was not born with its mode."""

    class Opened(socket.socket):
        def bind(self, address: str) -> None:  # type: ignore[override]
            super().bind(address)
            Path(address).chmod(mode)

    monkeypatch.setattr(socket, "socket", Opened)

    with pytest.raises(KubeletError, match="all names tried were taken"):
        bind(tmp_path, RESOURCE, Seeded())


def test_nothing_is_served_where_everybody_may_put_a_socket(tmp_path: Path):
    tmp_path.chmod(0o1777)

    with pytest.raises(PermissionFault, match=r"writable by everybody.*make it 0750"):
        bind(tmp_path, RESOURCE, Seeded())

    assert set() == names(tmp_path)
    tmp_path.chmod(0o755)
    bound = bind(tmp_path, RESOURCE, Seeded())
    bound.sock.close()


def test_nothing_is_served_in_a_directory_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    owner = tmp_path.stat().st_uid
    if owner == 0:
        owner = 1234
        os.chown(tmp_path, owner, -1)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)

    with pytest.raises(PermissionFault, match=f"belongs to uid {owner}"):
        bind(tmp_path, RESOURCE, Seeded())


def test_a_socket_that_is_gone_by_the_end_is_no_error(tmp_path: Path):
    bound = bind(tmp_path, RESOURCE, Seeded())
    bound.path.unlink()

    bound.unlink()

    assert set() == names(tmp_path)
    bound.sock.close()


def test_a_live_socket_survives_the_sweep_although_its_queue_is_full(tmp_path: Path):
    bound = bind(tmp_path, RESOURCE, Seeded())
    bound.sock.listen(0)
    waiting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    waiting.connect(str(bound.path))

    assert () == sweep(tmp_path, RESOURCE)
    assert {bound.path.name} == names(tmp_path)
    waiting.close()
    bound.sock.close()
    assert (bound.path.name,) == sweep(tmp_path, RESOURCE)


def test_a_directory_that_is_not_there_has_nothing_to_sweep(tmp_path: Path):
    assert () == sweep(tmp_path / "missing", RESOURCE)


@pytest.mark.looptime(False)
async def test_a_server_that_does_not_answer_itself_does_not_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Unreachable(Seeded):
        def getrandbits(self, k: int) -> int:
            return 7

    server = PluginServer(tmp_path, Cell(RESOURCE), Cell(a_list()), FakeAllocator(), Unreachable())

    def swap(path: Path) -> None:
        """Somebody deletes the file between bind and the first connection."""
        path.rename(path.with_suffix(".away"))
        path.symlink_to("nowhere")

    start = Incarnation.start

    async def start_and_swap(server: Incarnation, *, sock: socket.socket) -> None:
        swap(Path(sock.getsockname()))
        await start(server, sock=sock)

    monkeypatch.setattr(Incarnation, "start", start_and_swap)

    with pytest.raises(KubeletError, match="does not answer a call of its own server"):
        await server.rebind()

    assert "" == server.endpoint


@pytest.mark.looptime(False)
async def test_servers_of_two_resources_of_one_tail_are_born_at_once_and_sweep_only_the_dead(
    tmp_path: Path,
):
    servers = [
        PluginServer(tmp_path, Cell(resource), Cell(a_list()), FakeAllocator(), Seeded(seed))
        for seed, resource in enumerate(("a.example/gpu", "b.example/gpu"))
    ]
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as dead:
        dead.bind(str(tmp_path / "hami-gpu-01234567.sock"))

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(server.run()) for server in servers]
        for _ in range(5):
            async with asyncio.TaskGroup() as births:
                for server in servers:
                    births.create_task(server.rebind())
            assert {server.endpoint for server in servers} == names(tmp_path)
        for task in running:
            task.cancel()

    assert set() == names(tmp_path)


@pytest.mark.parametrize(
    ("domain", "named", "answers"),
    [("nvidia.com", ("nvidia-gpu.sock",), True), ("hami.io", (), None)],
)
def test_a_socket_without_a_domain_in_its_name_tells_of_nvidias_resources_alone(
    tmp_path: Path, domain: str, named: tuple[str, ...], answers: object
):
    rival = Rival(tmp_path, Cell(f"{domain}/gpu"))
    assert named == rival.names
    assert rival.answers() is None

    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(rival.path)
        theirs.listen()

        assert answers is rival.answers()

"""The life of a server: bound before it says so, drained before it goes, nobody else's file."""

import asyncio
import contextlib
import errno
import os
import socket
import stat
from pathlib import Path
from typing import Any

import grpc
import pytest

from agent.errors import DirectoryLost, KubeletError, PermissionFault
from agent.kit.cell import Cell
from agent.kubelet import door as door_module
from agent.kubelet.door import Incarnation, bind, sweep
from agent.kubelet.register import Rivals
from tests.fakes.chance import Seeded
from tests.fakes.door import RESOURCE, FakeDoor, a_door, a_group, a_list, a_server
from tests.fakes.grpc_messages import GrpcPlugin, refused
from tests.fakes.raw_h2 import a_raw_call, prefixed
from tests.hami_vectors import vectors
from tests.services.at_work import at_work

pytestmark = pytest.mark.looptime(False)


async def an_open_allocate(
    door: FakeDoor, plugin: GrpcPlugin, group: asyncio.TaskGroup
) -> asyncio.Task[Any]:
    """An Allocate that the allocator answers when it is opened."""
    door.allocator.open.clear()
    allocate = group.create_task(asyncio.to_thread(plugin.allocate, ["a"]))
    while not door.allocator.asked:
        await asyncio.to_thread(plugin.options)
    return allocate


def names(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


class ServedKubelet:
    """The kubelet's one connection, with its list stream open."""

    def __init__(self, door: FakeDoor) -> None:
        self.plugin = GrpcPlugin(door.path)
        self.stream = self.plugin.lists()

    async def __aenter__(self) -> GrpcPlugin:
        await asyncio.to_thread(next, self.stream)
        return self.plugin

    async def __aexit__(self, *_: object) -> None:
        assert [] == await asyncio.to_thread(list, self.stream)
        assert grpc.StatusCode.OK == self.stream.code()
        self.plugin.close()


def ask_for_ever(plugin: GrpcPlugin) -> None:
    while True:
        plugin.allocate(["a"])


async def test_an_admission_that_is_under_way_is_served_to_its_end(tmp_path):
    async with asyncio.TaskGroup() as group:
        async with a_door(tmp_path) as door, ServedKubelet(door) as plugin:
            door.allocator.open.clear()
            asked = group.create_task(asyncio.to_thread(plugin.prefer, ["a", "b"], [], 1))
            while not door.allocator.preferring:
                await asyncio.to_thread(plugin.options)

            ending = group.create_task(door.end())
            await asyncio.to_thread(plugin.options)
            assert not ending.done()
            door.allocator.open.set()

            assert ["b"] == await asked
            for container in ("b", "a"):  # the next container of the pod comes at once, too
                answer = await asyncio.to_thread(plugin.allocate, [container])
                assert container == answer.container_responses[0].envs["IDS"]
                await asyncio.to_thread(plugin.prefer, ["a"], [], 1)
            answer = await asyncio.to_thread(plugin.allocate, ["a"])
            assert "a" == answer.container_responses[0].envs["IDS"]
            await ending
        assert set() == names(tmp_path)


async def test_a_kubelet_that_goes_on_asking_does_not_hold_up_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(door_module, "LAST_CALLS", 0.2)
    async with (
        asyncio.TaskGroup() as group,
        a_door(tmp_path) as door,
        ServedKubelet(door) as plugin,
    ):
        await asyncio.to_thread(plugin.allocate, ["a"])
        ending = group.create_task(door.end())
        with pytest.raises(grpc.RpcError):
            await asyncio.to_thread(ask_for_ever, plugin)
        await ending


@pytest.mark.parametrize("by", ["the end", "a rebind, then the end", "a rebind, then another name"])
async def test_a_drain_waits_for_the_open_allocate_and_refuses_others(tmp_path, monkeypatch, by):
    """Python 3.11.2, which is Debian 12's, cut the call off: see PluginServer.run."""
    monkeypatch.setattr(door_module, "LAST_CALLS", 0.0)
    async with asyncio.TaskGroup() as group, a_door(tmp_path) as door:
        async with ServedKubelet(door) as plugin:
            before = await an_open_allocate(door, plugin, group)
            if by == "a rebind, then another name":
                door.resource.set("example.com/one")
            draining = group.create_task(door.end() if by == "the end" else door.server.rebind())
            await asyncio.to_thread(plugin.options)
            code, text = await refused(plugin.allocate, ["b"])
            assert ("UNAVAILABLE", True) == (code, text.endswith("[HA-5004]"))
            if by == "a rebind, then the end":
                draining.cancel()
                draining = group.create_task(door.end())
                await asyncio.to_thread(plugin.options)
            if by == "a rebind, then another name":
                door.resource.set("example.com/two")
            assert not draining.done()
            door.allocator.open.set()
            assert "a" == (await before).container_responses[0].envs["IDS"]
        await draining

        # The registration compares `served` with the present name before it registers.
        if by == "a rebind, then another name":
            assert "example.com/two" == door.server.served
            assert door.server.endpoint.startswith("hami-two-")


async def test_an_allocate_by_a_former_name_is_refused_although_a_preference_came_before(tmp_path):
    """The kubelet books the former name; the row would get the new one."""
    async with a_door(tmp_path) as door, asyncio.TaskGroup() as group:
        async with ServedKubelet(door) as plugin:
            assert ["b"] == await asyncio.to_thread(plugin.prefer, ["a", "b"], [], 1)
            door.resource.set("example.com/vgpu")
            rebinding = group.create_task(door.server.rebind())
            code, text = await refused(plugin.allocate, ["b"])
            assert ("UNAVAILABLE", True) == (code, text.endswith("[HA-5004]"))
            assert [] == door.allocator.asked
        await rebinding

        assert {door.path.name} == names(tmp_path)
        renamed = GrpcPlugin(door.path)
        answer = await asyncio.to_thread(renamed.allocate, ["b"])
        assert "b" == answer.container_responses[0].envs["IDS"]
        renamed.close()


async def test_a_peer_that_neither_reads_nor_leaves_does_not_hold_up_the_end(tmp_path):
    listed = a_list(1, a_group(slices=5_000))
    async with a_door(tmp_path, listed) as door, a_raw_call(door.path) as call:
        await call.request("/v1beta1.DevicePlugin/ListAndWatch", prefixed(b""))
        while len(call.body) < 65_535:
            await call.read(acknowledge=False)

        await door.server.rebind()

        await call.until_ended()
        assert {door.path.name} == names(tmp_path)
        async with asyncio.timeout(30):
            await door.server.streams.until(lambda count: count == 0)


async def test_dead_sockets_of_ours_are_cleared_away_and_no_others(tmp_path):
    kept = ["kubelet.sock", "nvidia-gpu.sock", "hami-gpu.sock", "hami-gpumem-00000001.sock"]
    for name in [*kept, "hami-gpu-0badcafe.sock"]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
            dead.bind(str(tmp_path / name))
    (tmp_path / "hami-gpu-0000beef.sock").write_text("not a socket")
    kept.append("hami-gpu-0000beef.sock")

    async with a_door(tmp_path, seed=1) as live, a_door(tmp_path, seed=2) as door:
        assert {*kept, live.path.name, door.path.name} == names(tmp_path)


async def test_a_directory_that_turned_read_only_needs_a_new_process(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    server = a_server(tmp_path)
    for is_lost in (False, True):  # one that was never writable is no reason to end
        with monkeypatch.context() as patched:
            patched.setattr(os, "fchmod", fail)
            patched.setattr(Path, "unlink", fail)  # the former socket stays
            with pytest.raises(DirectoryLost, match=f"{tmp_path} is read-only: restart"):
                await server.rebind()
        assert is_lost == bool(server._lost.value)
        await server.rebind()

    with pytest.raises(DirectoryLost):
        await server.run()


# Binding that fails is said in words, and nothing is left behind.


def bound_path(directory: Path, chance: Seeded, resource: str = RESOURCE) -> Path:
    """A socket that is bound there, and closed."""
    path, sock = bind(directory, resource, chance)
    sock.close()
    assert 0o600 == stat.S_IMODE(path.stat().st_mode)
    return path


def a_name(directory: Path) -> Path:
    """The name that the chance of seed 5 gives first."""
    path = bound_path(directory, Seeded(5))
    path.unlink()
    return path


def test_each_start_has_a_socket_name_of_its_own_where_hami_has_one_for_all(tmp_path):
    """A kubelet that knows the old name and a plugin on the new one are never mistaken."""
    vector = vectors("next_container")["next_container-244"]
    chance = Seeded(5)
    for resource, theirs in zip(vector.given, vector.expected, strict=True):
        ours = {bound_path(tmp_path, chance, resource).name for _ in range(3)}

        assert 3 == len(ours)
        assert theirs not in ours
        assert all("/" not in name and name.endswith(".sock") for name in ours)
    with contextlib.chdir(tmp_path):
        long = bound_path(Path(), chance, "vendor.com/" + "g" * 63)
    assert len(f"/var/lib/kubelet/device-plugins/{long.name}") < 108


@pytest.mark.parametrize(
    ("wrong", "expected", "text"),
    [
        (PermissionError(13, "Permission denied"), PermissionFault, "may not be written"),
        (OSError(28, "No space left on device"), KubeletError, "No space left on device"),
        ("open", PermissionFault, r"writable by everybody.*to root, with mode 0750"),
        ("another's", PermissionFault, "belongs to uid "),
    ],
)
def test_nothing_is_served_where_others_could_put_or_reach_a_socket(
    tmp_path, monkeypatch, wrong, expected, text
):
    def fail(*_: object, **__: object) -> None:
        assert isinstance(wrong, OSError)
        raise wrong

    with monkeypatch.context() as patched:
        if wrong == "open":
            tmp_path.chmod(0o1777)
        elif wrong == "another's":
            if os.geteuid() == 0:  # nobody else can give it away, and root's own is in order
                os.chown(tmp_path, 1234, -1)
            patched.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
        else:
            patched.setattr(os, "fchmod", fail)
        with pytest.raises(expected, match=text):
            bind(tmp_path, RESOURCE, Seeded())

    if isinstance(wrong, str):
        assert set() == names(tmp_path)
    tmp_path.chmod(0o755)
    os.chown(tmp_path, os.geteuid(), -1)
    bound_path(tmp_path, Seeded())


def test_a_link_in_the_place_of_the_socket_is_not_followed(tmp_path):
    """Neither for the file nor for its mode: an attacker's link would point at another's file."""
    victim = tmp_path / "victim"
    victim.touch(mode=0o644)
    for target in ("victim", "nowhere"):
        taken = a_name(tmp_path)
        taken.symlink_to(tmp_path / target)
        chance = Seeded(5)

        with pytest.raises(KubeletError, match="cannot be bound: Address already in use"):
            bind(tmp_path, RESOURCE, chance)

        bound = bound_path(tmp_path, chance)
        assert bound != taken
        assert 0o644 == stat.S_IMODE(victim.stat().st_mode)
        assert not (tmp_path / "nowhere").exists()
        taken.unlink()
        bound.unlink()


def test_a_live_socket_survives_the_sweep_although_its_queue_is_full(tmp_path):
    path, sock = bind(tmp_path, RESOURCE, Seeded())
    sock.listen(0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waiting:
        waiting.connect(str(path))

        sweep(tmp_path, RESOURCE)
        assert {path.name} == names(tmp_path)
    sock.close()
    sweep(tmp_path, RESOURCE)
    assert set() == names(tmp_path)


async def test_a_server_that_does_not_answer_itself_does_not_serve(tmp_path, monkeypatch):
    class Unreachable(Seeded):
        def getrandbits(self, k: int) -> int:
            return 7

    server = a_server(tmp_path, chance=Unreachable())

    def swap(path: Path) -> None:
        """Somebody deletes the file between bind and the first connection."""
        path.rename(path.with_suffix(".away"))
        path.symlink_to("nowhere")

    start = Incarnation.start

    async def start_and_swap(server: Incarnation, *, sock: socket.socket) -> None:
        swap(Path(sock.getsockname()))
        await start(server, sock=sock)

    monkeypatch.setattr(Incarnation, "start", start_and_swap)

    with pytest.raises(KubeletError, match="does not serve: "):
        await server.rebind()

    assert "" == server.endpoint


async def test_a_server_that_cannot_listen_leaves_no_socket_and_is_tried_again(
    tmp_path, monkeypatch
):
    async def refuse(_: Incarnation, *, sock: socket.socket) -> None:
        raise OSError(errno.ENOBUFS, "no buffer space")

    server = a_server(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Incarnation, "start", refuse)
        with pytest.raises(KubeletError, match="no buffer space"):
            await server.rebind()
    assert ("", set()) == (server.endpoint, names(tmp_path))

    async with at_work(server.run):
        await server.rebind()
        assert {server.endpoint} == names(tmp_path)


@pytest.mark.parametrize(
    ("domain", "named", "answers"), [("nvidia.com", "nvidia-gpu.sock", True), ("hami.io", "", None)]
)
def test_a_socket_without_a_domain_in_its_name_tells_of_nvidias_resources_alone(
    tmp_path, domain, named, answers
):
    rival = Rivals(tmp_path, Cell(f"{domain}/gpu"), None, [].append)  # type: ignore[arg-type]
    assert named == rival.name
    assert str(tmp_path / named) == rival.path.rstrip("/")
    assert rival.answers() is None

    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(tmp_path / "nvidia-gpu.sock"))
        theirs.listen()

        assert answers is rival.answers()

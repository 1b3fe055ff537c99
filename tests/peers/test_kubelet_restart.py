"""What a kubelet's restart keeps, sweeps and asks again: the model and the real kubelet alike.

Only the model is tried on a whole reboot: here single containers die while the kubelet is away,
which it tells from a reboot by nothing.
"""

import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent.sandbox.kubelet.checkpoint import encode
from tests.fakes.plugin import a_device
from tests.peers.lab.space import because

DEAF = "exec sleep 3600"
"""Dies of SIGKILL only. A rejected pod whose containers all end with 0 may end as Succeeded."""


@contextlib.contextmanager
def litter(directory: Path) -> Iterator[dict[str, bool]]:
    """Things in the plugin directory, and whether a starting kubelet leaves them there."""
    folder = directory / "folder"
    folder.mkdir()
    (folder / "kept").touch()
    (directory / "file").touch()
    for name in ("stale.sock", "folder/inner.sock"):
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(directory / name))
    (directory / "link.sock").symlink_to("folder/inner.sock")
    (directory / "dangling").symlink_to("nowhere")
    kept = ("folder", "folder/kept", "folder/inner.sock", "file", "dangling")
    try:
        yield dict.fromkeys(kept, True) | {"stale.sock": False, "link.sock": False}
    finally:
        for name in ("folder/kept", "folder/inner.sock", "file", "dangling", "link.sock"):
            (directory / name).unlink(missing_ok=True)
        folder.rmdir()


async def test_only_sockets_are_swept(node):
    async with node.plugin():
        await node.kill()
        assert (node.plugins / "kubelet.sock").is_socket(), "it is left, dead"
        with litter(node.plugins) as expected:
            await node.start()
            present = {str(path.relative_to(node.plugins)) for path in node.plugins.rglob("*")}
            assert expected == {name: name in present for name in expected}
        assert not (node.plugins / "p.sock").exists()
        assert node.checkpoint_path.exists()


async def test_running_containers_pass_and_nothing_is_counted_while_the_plugin_is_away(node):
    async with node.plugin() as plugin:
        await node.runs("p", node.container(count=2))
        await node.until_counted(4, 4)

        await node.restart()

        await node.until_counted(0, 0)
        known = await node.until_held("p", lambda held: held is not None)
        assert {"main": plugin.asked[0]} == known
        await node.come_back(plugin)
        await node.until_counted(4, 4)
        assert ("Running", 1) == (node.phase("p"), len(plugin.asked))


async def test_the_checkpoint_is_byte_for_byte_what_the_model_writes(node):
    async with node.plugin(count=0) as plugin:
        plugin.publish([a_device("b", nodes=(1,)), a_device("<&>"), a_device("é")])
        await node.until_listed(3)
        await node.runs("p", node.container("a"), node.container("b", count=2))

        assert node.checkpoint_path.read_bytes() == encode(node.checkpoint())
        assert 0o600 == node.checkpoint_path.stat().st_mode & 0o777


async def test_only_healthy_ids_are_written_and_only_with_lists_and_allocations(node):
    async with node.plugin() as plugin:
        plugin.publish([*plugin.devices, a_device("ill", health="Unhealthy")])
        await node.until_counted(5, 4)
        healthy = {"g0", "g1", "g2", "g3"}
        await node.until_recorded(lambda found: healthy == recorded(node, found))
        await node.runs("p")
        written = node.checkpoint_path.stat().st_mtime_ns

        await node.delete("p", grace=1)
        await node.until_gone("p")
        plugin.end_streams()
        await node.until_counted(5, 0)

        assert written == node.checkpoint_path.stat().st_mtime_ns
        assert node.resource in {entry.resource for entry in node.checkpoint().entries}


def recorded(node, found) -> set[str]:
    """The healthy ids of the test's resource by the kubelet's records."""
    return set((found.registered or {}).get(node.resource, ()))


def spoil_sum(text: str) -> str:
    document = json.loads(text)
    return json.dumps(document | {"Checksum": document["Checksum"] ^ 1})


@pytest.mark.parametrize("spoil", [spoil_sum, lambda text: text[:-9]], ids=["sum", "json"])
async def test_records_that_cannot_be_believed_are_none(node, spoil):
    async with node.plugin() as plugin:
        await node.runs("p")
        await node.kill()
        node.checkpoint_path.write_text(spoil(node.checkpoint_path.read_text()))

        await node.start()
        await node.come_back(plugin)

        assert {"main": frozenset()} == await node.until_held("p", lambda held: held is not None)
        # Until then the file may be the spoilt one.
        await node.until_recorded(lambda found: recorded(node, found))
        data = json.loads(node.checkpoint_path.read_text())["Data"]
        assert data["PodDeviceEntries"] is None
        assert [node.resource] == list(data["RegisteredDevices"])
        assert ("Running", 1) == (node.phase("p"), len(plugin.asked))


async def test_a_changed_count_has_its_own_text(node):
    async with node.plugin() as plugin:
        uid = await node.runs("p", node.container(script=DEAF))
        await node.kill()
        found = node.checkpoint()
        entries = tuple(
            replace(entry, numa={-1: ("g0", "g1")}) if entry.pod_uid == uid else entry
            for entry in found.entries
        )
        node.checkpoint_path.write_bytes(encode(replace(found, entries=entries)))
        await node.start()
        await node.come_back(plugin)

        assert (
            because(
                f'pod "{uid}" container "main" changed request for resource "{node.resource}" '
                "from 2 to 1"
            )
            == (await node.until_phase("p", "Failed"))["message"]
        )


async def test_recorded_ids_are_admitted_without_a_call_once_the_plugin_is_back(node):
    async with node.plugin() as plugin:
        await node.runs("p", inits=(node.init(),))
        held = await node.held("p")
        await node.kill()
        await node.end_container("p")

        await node.start()
        await node.come_back(plugin)

        await node.until_restarted()
        assert held == await node.held("p")
        assert 2 == len(plugin.asked)


async def test_an_id_that_fell_ill_meanwhile_rejects_its_pod(node):
    async with node.plugin() as plugin:
        await node.runs("p")
        (held,) = plugin.asked
        await node.kill()
        await node.end_container("p")
        await node.start()
        await node.come_back(
            plugin,
            [
                a_device(one.id, health="Unhealthy" if one.id in held else "Healthy")
                for one in plugin.devices
            ],
        )

        assert (
            because(
                "previously allocated devices are no longer healthy; "
                f"cannot allocate unhealthy devices {node.resource}"
            )
            == (await node.until_phase("p", "Failed"))["message"]
        )


@pytest.mark.parametrize("why", ["a container is dead", "an init container is done"])
async def test_a_pod_that_is_not_all_running_is_rejected_whole_without_the_plugin(node, why):
    async with node.plugin():
        inits = (node.init(),) if "init" in why else ()
        apps = [node.container(name, script=DEAF) for name in "ab"]
        await node.runs("p", *apps, inits=inits)
        await node.kill()
        if not inits:
            await node.end_container("p", "a")

        await node.start()

        status = await node.until_phase("p", "Failed")
        assert (
            because(
                f"no healthy devices present; cannot allocate unhealthy devices {node.resource}"
            )
            == status["message"]
        )
        assert "UnexpectedAdmissionError" == status["reason"]


async def test_a_kill_in_an_allocate_records_nothing_and_asks_again(node):
    async with node.plugin() as plugin:
        plugin.hold()
        await node.create("p")
        await node.until(lambda: plugin.asked, "no Allocate")
        await node.kill()
        plugin.let_go()
        assert node.resource not in {entry.resource for entry in node.checkpoint().entries}

        await node.start()
        await node.come_back(plugin)

        await node.until_phase("p", "Running")
        assert 2 == len(plugin.asked)


async def test_a_lost_checkpoint_asks_nothing_for_running_containers(node):
    async with node.plugin() as plugin:
        await node.create("p")
        await node.create("q")
        for name in ("p", "q"):
            await node.until_phase(name, "Running")
        await node.restart(lose_checkpoint=True)
        await node.come_back(plugin)
        await node.until_counted(4, 4)

        for name in ("p", "q"):
            known = await node.until_held(name, lambda held: held is not None)
            assert {"main": frozenset()} == known
        assert 2 == len(plugin.asked)
        await node.runs("r", node.container(count=2))
        assert 3 == len(plugin.asked)

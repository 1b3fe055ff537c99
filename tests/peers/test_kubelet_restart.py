"""How plugin, kubelet and containers come and go: the model and the real kubelet alike."""

import contextlib
import json

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.sandbox.kubelet.checkpoint import CheckpointError, encode
from agent.wire.v1beta1 import DevicePluginOptions
from tests.fakes.plugin import a_device, devices
from tests.peers.lab.nodes import ProbePlugin, first
from tests.peers.lab.part import because

# How a plugin becomes known and is forgotten: the model and the real kubelet alike (legacy mode).
#
# Only the model is tried on registration by socket path, which is kubelet 1.37 and later.


def a_plugin(node, name="p.sock", count=2):
    return ProbePlugin(node.plugins, resource=node.resource, name=name, count=count)


async def refused(plugin, **fields) -> tuple[Status, str | None]:
    with pytest.raises(GRPCError) as caught:
        await plugin.register(**fields)
    return caught.value.status, caught.value.message


BAD_VERSION = (
    'requested API version "v1" is not supported by kubelet. Supported version is ["v1beta1"]'
)


async def test_another_version_is_refused_with_the_exact_text(node):
    async with a_plugin(node) as plugin:
        assert (Status.UNKNOWN, BAD_VERSION) == await refused(plugin, version="v1")
        assert 0 == plugin.connections


async def test_options_are_asked_before_the_reply_and_their_failure_fails_register(node):
    async with a_plugin(node) as plugin:
        plugin.script.options_error = GRPCError(Status.INTERNAL, "not now")

        text = "failed to get device plugin options: rpc error: code = Internal desc = not now"
        assert (Status.UNKNOWN, text) == await refused(plugin)
        assert 0 == plugin.streams


async def test_all_calls_come_without_a_deadline_over_the_connection_that_register_opened(
    node, plugin
):
    await node.runs("p")

    assert 1 == plugin.connections
    paths = [headers[":path"].rpartition("/")[2] for headers in plugin.headers]
    assert ["GetDevicePluginOptions", "ListAndWatch", "Allocate"] == paths
    for headers in plugin.headers:
        assert "localhost" == headers[":authority"]
        assert "application/grpc" == headers["content-type"]
        assert "grpc-timeout" not in headers


async def test_a_second_register_replaces_the_endpoint_until_the_old_stream_ends(node):
    async with node.plugin() as old, a_plugin(node, "q.sock") as new:
        await new.register()
        await node.until_listed(2)
        await node.runs("p")
        assert (1, 1) == (old.streams, new.streams)
        assert (0, 1) == (len(old.asked), len(new.asked))
        old.publish(old.devices[:3])
        await node.until_listed(3)

        old.end_streams()

        await node.until_listed(0)
        await node.until(lambda: new.streams == 0, "the new stream lives on")
        assert 1 == new.connections, "nobody dials again"


async def test_the_end_of_the_stream_makes_everything_unhealthy_and_nobody_dials_again(
    node, plugin
):
    await node.until_counted(4, 4)

    plugin.end_streams()

    await node.until_counted(4, 0)
    assert [] == await node.allocatable()
    assert (1, 0) == (plugin.connections, plugin.streams)
    await plugin.register()
    await node.until_counted(4, 4)


# What a kubelet's restart keeps, sweeps and asks again: the model and the real kubelet alike.
#
# Only the model is tried on a whole reboot: here single containers die while the kubelet is away,
# which it tells from a reboot by nothing.

DEAF = "exec sleep 3600"
"""Dies of SIGKILL only. A rejected pod whose containers all end with 0 may end as Succeeded."""


async def test_sockets_are_swept_and_other_files_are_not(node, plugin):
    await node.kill()
    assert (node.plugins / "kubelet.sock").is_socket(), "it is left, dead"
    kept = node.plugins / "file"
    kept.touch()
    await node.start()
    assert kept.exists()
    kept.unlink()
    assert not (node.plugins / "p.sock").exists()
    assert node.checkpoint_path.exists()


async def test_running_containers_pass_and_nothing_is_counted_while_the_plugin_is_away(
    node, plugin
):
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


def recorded(node) -> set[str]:
    """The healthy ids of the test's resource by the kubelet's records."""
    with contextlib.suppress(CheckpointError, FileNotFoundError):
        return set((node.checkpoint().registered or {}).get(node.resource, ()))
    return set()


def spoil_sum(text: str) -> str:
    document = json.loads(text)
    return json.dumps(document | {"Checksum": document["Checksum"] ^ 1})


@pytest.mark.parametrize("spoil", [spoil_sum, lambda text: text[:-9]], ids=["sum", "json"])
async def test_records_that_cannot_be_believed_are_none(node, plugin, spoil):
    await node.runs("p")
    await node.kill()
    node.checkpoint_path.write_text(spoil(node.checkpoint_path.read_text()))

    await node.start()
    await node.come_back(plugin)

    assert {"main": frozenset()} == await node.until_held("p", lambda held: held is not None)
    # Until then the file may be the spoilt one.
    await node.until(lambda: recorded(node), "the ids are not recorded")
    data = json.loads(node.checkpoint_path.read_text())["Data"]
    assert data["PodDeviceEntries"] is None
    assert [node.resource] == list(data["RegisteredDevices"])
    assert ("Running", 1) == (node.phase("p"), len(plugin.asked))


async def test_recorded_ids_are_admitted_without_a_call_once_the_plugin_is_back(node, plugin):
    await node.runs("p", inits=(node.init(),))
    held = await node.held("p")
    await node.kill()
    await node.end_container("p")

    await node.start()
    await node.come_back(plugin)

    await node.until_restarted()
    assert held == await node.held("p")
    assert 2 == len(plugin.asked)


async def test_an_id_that_fell_ill_meanwhile_rejects_its_pod(node, plugin):
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
async def test_a_pod_that_is_not_all_running_is_rejected_whole_without_the_plugin(
    node, plugin, why
):
    inits = (node.init(),) if "init" in why else ()
    apps = [node.container(name, script=DEAF) for name in "ab"]
    await node.runs("p", *apps, inits=inits)
    await node.kill()
    if not inits:
        await node.end_container("p", "a")

    await node.start()

    status = await node.until_phase("p", "Failed")
    assert (
        because(f"no healthy devices present; cannot allocate unhealthy devices {node.resource}")
        == status["message"]
    )
    assert "UnexpectedAdmissionError" == status["reason"]


async def test_a_kill_in_an_allocate_records_nothing_and_asks_again(node, plugin):
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


async def test_a_lost_checkpoint_asks_nothing_for_running_containers(node, plugin):
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


# Containers that start and die beside admission: the model and the real kubelet alike.
#
# The panic of kubelet 1.36 when calls of pod workers overlap is left to the model: a real one would
# take the pods of every test beside with it.

real_only = pytest.mark.parametrize("place", ["real"], indirect=True)
REFUSED = GRPCError(Status.FAILED_PRECONDITION, "not now. [HA-3f9c]")
CONFIG_ERROR = "CreateContainerConfigError"


async def offer_pre_start(node, plugin) -> None:
    plugin.script.options = DevicePluginOptions(pre_start_required=True)
    await node.come_back(plugin)


async def test_a_container_that_dies_is_started_again_without_a_call(node, plugin):
    await node.runs("p")
    plugin.publish(devices(4, health="Unhealthy"))
    await node.until_listed(0)
    await node.end_container("p")
    await node.until_restarted()

    assert 1 == len(plugin.asked)


@real_only
async def test_pre_start_is_called_at_every_start_of_a_container(node, plugin):
    await offer_pre_start(node, plugin)
    await node.runs("p", node.container(count=2))
    await node.end_container("p")
    await node.until_restarted()

    assert ["allocate", "prestart", "prestart"] == [call.kind for call in plugin.calls]
    assert 1 == len({call.ids for call in plugin.calls})
    (limit, _) = [h["grpc-timeout"] for h in plugin.headers if "grpc-timeout" in h]
    assert 29 <= seconds(limit) <= 30


@real_only
async def test_what_pre_start_refuses_is_not_started_and_the_pod_says_why(node, plugin):
    await offer_pre_start(node, plugin)
    plugin.script.pre_start_error = REFUSED
    await node.create("p")
    await node.until(lambda: waits(node), "it does not wait")

    words = "device plugin PreStartContainer rpc failed with err: rpc error: code = "
    assert f"{words}FailedPrecondition desc = not now. [HA-3f9c]" == waits(node)
    plugin.script.pre_start_error = None
    await node.until_phase("p", "Running")


def waits(node) -> str | None:
    """Why the container of pod p waits, where it is for its configuration."""
    waiting = node.state("p").get("waiting", {})
    return waiting.get("message") if waiting.get("reason") == CONFIG_ERROR else None


def seconds(text: str) -> float:
    return int(text[:-1]) * {"S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}[text[-1]]


async def test_after_a_lost_checkpoint_a_dead_container_is_allocated_by_its_worker(node, plugin):
    await lose_records(node, plugin)
    plugin.look = lambda: node.held("p")

    await node.end_container("p")
    await node.until_restarted()

    prefer, allocate = plugin.calls
    assert ["prefer", "allocate"] == [prefer.kind, allocate.kind]
    assert prefer.ids == allocate.ids
    assert {"main": frozenset()} == prefer.found == allocate.found
    assert {"main": allocate.ids} == await node.held("p")


@pytest.mark.long
async def test_refused_there_the_pod_lives_and_is_asked_again(node, plugin, table):
    await lose_records(node, plugin)
    plugin.script.refusals.append(REFUSED)

    await node.end_container("p")
    await node.until(lambda: waits(node), "it does not wait")
    assert "not now. [HA-3f9c]" == waits(node), "the plugin's words alone"
    await node.until_restarted()

    one, two = [call.at for call in plugin.calls if call.kind == "allocate"]
    kind = type(node).__name__
    table.add(f"refused in a pod worker, asked again after ({kind})", two - one)


async def lose_records(node, plugin) -> None:
    """A running pod p whose records the kubelet has lost; the plugin is back."""
    plugin.choose(first)
    await node.runs("p")
    await node.restart(lose_checkpoint=True)
    await node.come_back(plugin)
    await node.until_counted(4, 4)
    await node.until_held("p", lambda held: held is not None)
    await node.create("late", node.container(count=0))
    await node.until_phase("late", "Running")  # it has heard of everything
    plugin.calls.clear()


async def test_with_nothing_published_a_lost_checkpoint_kills_running_pods(node, plugin):
    await node.runs("p", node.container(script="exec sleep 3600"))
    await plugin.die()
    await node.restart()
    await node.until_counted(0, 0)

    await node.restart(lose_checkpoint=True)

    status = await node.until_phase("p", "Failed")
    assert f"OutOf{node.resource}" == status["reason"]
    assert (
        f"Pod was rejected: Node didn't have enough resource: {node.resource}, "
        "requested: 1, used: 0, capacity: 0"
    ) == status["message"]

"""Containers that start and die beside admission: the model and the real kubelet alike.

The panic of kubelet 1.36 when calls of pod workers overlap is left to the model: a real one would
take the pods of every test beside with it.
"""

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.wire.v1beta1 import DevicePluginOptions
from tests.fakes.plugin import devices
from tests.peers.lab.nodes import first

REFUSED = GRPCError(Status.FAILED_PRECONDITION, "not now. [HA-3f9c]")
CONFIG_ERROR = "CreateContainerConfigError"


async def offer_pre_start(node, plugin) -> None:
    plugin.script.options = DevicePluginOptions(pre_start_required=True)
    await node.come_back(plugin)


async def test_a_container_that_dies_is_started_again_without_a_call(node):
    async with node.plugin() as plugin:
        await node.runs("p")
        plugin.publish(devices(4, health="Unhealthy"))
        await node.until_listed(0)
        await node.end_container("p")
        await node.until_restarted()

        assert 1 == len(plugin.asked)


async def test_a_container_that_dies_without_the_plugin_is_started_again(node):
    async with node.plugin() as plugin:
        await node.runs("p")
        await plugin.die()
        await node.until_counted(4, 0)

        await node.end_container("p")
        await node.until_restarted()

        assert {"main": plugin.asked[0]} == await node.held("p")


async def test_pre_start_is_called_at_every_start_of_a_container(node):
    async with node.plugin() as plugin:
        await offer_pre_start(node, plugin)
        await node.runs("p", node.container(count=2))
        await node.end_container("p")
        await node.until_restarted()

        assert ["allocate", "prestart", "prestart"] == [call.kind for call in plugin.calls]
        assert 1 == len({call.ids for call in plugin.calls})
        (limit, _) = [h["grpc-timeout"] for h in plugin.headers if "grpc-timeout" in h]
        assert 29 <= seconds(limit) <= 30


def seconds(text: str) -> float:
    return int(text[:-1]) * {"S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}[text[-1]]


async def test_a_failed_pre_start_keeps_the_container_waiting_and_the_pod_alive(node):
    async with node.plugin() as plugin:
        await offer_pre_start(node, plugin)
        plugin.script.pre_start_errors.append(REFUSED)
        await node.create("p")

        await node.until(lambda: waits(node) is not None, "it does not wait")
        go_text = "rpc error: code = FailedPrecondition desc = not now. [HA-3f9c]"
        text = f"device plugin PreStartContainer rpc failed with err: {go_text}"
        assert (CONFIG_ERROR, text) == waits(node)
        await node.until_phase("p", "Running")
        assert ["allocate", "prestart", "prestart"] == [call.kind for call in plugin.calls]


def waits(node, name="p") -> tuple[str, str] | None:
    """Why the pod's container waits, where it is for its configuration."""
    waiting = node.state(name).get("waiting", {})
    is_meant = waiting.get("reason") == CONFIG_ERROR
    return (waiting["reason"], waiting.get("message", "")) if is_meant else None


async def test_pre_starts_run_beside_each_other_and_beside_admission(node):
    async with node.plugin() as plugin:
        await offer_pre_start(node, plugin)
        plugin.hold_starts()
        for name in ("p", "q"):
            await node.create(name)

        await node.until(lambda: len(plugin.of("prestart")) == 2, "one waits for the other")
        assert 2 == len(plugin.asked)
        plugin.let_start()
        for name in ("p", "q"):
            await node.until_phase(name, "Running")


async def test_after_a_restart_nobody_asks_for_a_pre_start_before_the_plugin_is_back(node):
    async with node.plugin() as plugin:
        await offer_pre_start(node, plugin)
        await node.runs("p")

        await node.restart()
        await node.until_counted(0, 0)
        await node.end_container("p")
        await node.until_restarted()

        assert 1 == len(plugin.of("prestart"))


async def test_after_a_lost_checkpoint_a_dead_container_is_allocated_by_its_worker(node, table):
    async with node.plugin() as plugin:
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
async def test_refused_there_the_pod_lives_and_is_asked_again(node, table):
    async with node.plugin() as plugin:
        await lose_records(node, plugin)
        plugin.script.refusals.append(REFUSED)

        await node.end_container("p")
        await node.until(lambda: waits(node) is not None, "it does not wait")
        assert (CONFIG_ERROR, "not now. [HA-3f9c]") == waits(node), "the plugin's words alone"
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


async def test_with_nothing_published_a_lost_checkpoint_kills_running_pods(node):
    async with node.plugin() as plugin:
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


async def test_after_a_lost_checkpoint_the_node_offers_its_whole_old_capacity(node):
    async with node.plugin() as plugin:
        await node.runs("p")
        plugin.publish(devices(4, health="Unhealthy"))
        await node.until_counted(4, 0)
        await plugin.die()

        await node.restart(lose_checkpoint=True)

        await node.until_counted(4, 4)
        assert [] == await node.allocatable()
        assert {"main": frozenset()} == await node.until_held("p", lambda held: held is not None)
        assert "Running" == node.phase("p")


@pytest.mark.long
async def test_a_worker_waits_for_the_admission_that_is_going_on(node):
    async with node.plugin() as plugin:
        await node.runs("p")
        plugin.hold()
        await node.create("q")
        await node.until(lambda: len(plugin.asked) == 2, "no Allocate")
        await node.end_container("p")
        await node.stays(lambda: node.restarts() < 1, "it is started again", 5.0)

        plugin.let_go()
        await node.until_restarted()

"""What a plugin's lists make of its resource: the model and the real kubelet alike.

Only the model is tried on lists of just under 4 MiB and on overlapping health updates by the
hundred. The five minutes after which a resource is removed are waited for in a long test, with the
real kubelet; the model passes them in virtual time among its own tests.
"""

import asyncio

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.wire.v1beta1 import DevicePluginOptions
from tests.fakes.plugin import a_device, devices
from tests.peers.lab.nodes import ProbePlugin, first
from tests.peers.lab.space import because
from tests.peers.lab.table import FAR


async def ids(node) -> list[str]:
    return sorted(text for entry in await node.allocatable() for text in entry.device_ids)


async def test_each_list_replaces_the_one_before_and_only_healthy_is_healthy(node):
    async with node.plugin() as plugin:
        await node.until_counted(4, 4)
        odd = [a_device(f"h{n}", health=word) for n, word in enumerate(("", "healthy", "HEALTHY"))]
        plugin.publish([a_device("new"), a_device("ill", health="Unhealthy"), *odd])

        await node.until_counted(5, 1)
        assert ["new"] == await ids(node)


async def test_an_id_listed_twice_is_counted_in_both_sets_and_is_given(node):
    async with node.plugin(count=0) as plugin:
        plugin.publish([a_device("d"), a_device("d", health="Unhealthy"), a_device("e")])
        await node.until_counted(3, 2)
        await node.create("p", node.container(count=2))

        await node.until_phase("p", "Running")
        assert [{"d", "e"}] == plugin.asked


async def test_an_empty_list_leaves_the_resource_present_with_nothing(node):
    async with node.plugin() as plugin:
        await node.until_counted(4, 4)
        plugin.publish([])

        await node.until_counted(0, 0)
        await node.create("p")
        assert (await node.until_phase("p", "Failed"))["message"].startswith(
            "Pod was rejected: Allocate failed due to no healthy devices present"
        )


async def test_a_list_over_4_mib_ends_the_stream(node):
    async with node.plugin() as plugin:
        plugin.publish([a_device(f"{number:09}" * 7) for number in range(60_000)])

        await node.until_counted(4, 0)
        await node.until(lambda: not plugin.open_connections(), "the connection lives on")


async def test_there_is_one_entry_for_each_id_and_numa_node(node):
    async with node.plugin(count=0) as plugin:
        plugin.publish([a_device("both", nodes=(0, 1)), a_device("none"), a_device("no", nodes=())])
        await node.until_listed(2)
        entries = [(entry.device_ids, nodes_of(entry)) for entry in await node.allocatable()]
        assert [(["both"], 0), (["both"], 1), (["none"], None)] == sorted(entries)

        await node.create("p", node.container(count=3))
        await node.until_phase("p", "Running")
        (main,) = (await node.get("p")).containers
        held = [(entry.device_ids, nodes_of(entry)) for entry in main.devices]
        assert [
            *((["both"], 0), (["both"], 1), (["no"], None), (["none"], None)),
        ] == sorted(held, key=str)
        (entry,) = [e for e in node.checkpoint().entries if e.resource == node.resource]
        assert {-1: {"no", "none"}, 0: {"both"}, 1: {"both"}} == {
            numa: set(members) for numa, members in entry.numa.items()
        }


def nodes_of(entry) -> int | None:
    return None if entry.topology is None else entry.topology.nodes[0].id


async def test_the_order_of_a_containers_ids_differs_from_call_to_call(node):
    async with node.plugin(count=8):
        await node.create("p", node.container(count=8))
        await node.until_phase("p", "Running")
        orders: set[tuple[str, ...]] = set()

        async def ask(_: object) -> bool:
            (main,) = (await node.get("p")).containers
            orders.add(tuple(text for entry in main.devices for text in entry.device_ids))
            return True

        for _ in range(10):
            await ask(None)
        assert 1 < len(orders)


@pytest.mark.long
@pytest.mark.timeout(420)
@pytest.mark.parametrize("place", ["real"], indirect=True)
async def test_after_five_minutes_without_its_plugin_a_resource_counts_nothing(node):
    async with node.plugin() as plugin:
        await node.until_counted(4, 4)
        plugin.end_streams()
        await node.until_counted(4, 0)

        await node.until(lambda: node.counted() == ("0", "0"), f"{node.counted()}", 330)
        assert node.resource not in (node.checkpoint().registered or {})
        await node.create("p")
        assert (
            f"Pod was rejected: Node didn't have enough resource: {node.resource}, "
            "requested: 1, used: 0, capacity: 0"
        ) == (await node.until_phase("p", "Failed"))["message"], "it is admitted without ids first"
        assert [] == plugin.calls
        await plugin.register()
        await node.until_counted(4, 4)


# Ids that a pod uses again, and what is preferred: the model and the real kubelet alike.


async def prefer(node, plugin) -> None:
    """From now on it is asked for its preference."""
    plugin.choose(first)
    await node.come_back(plugin)


async def test_init_containers_give_their_ids_to_the_containers_after_them(node):
    async with node.plugin(count=2) as plugin:
        inits = (node.init("i"), node.init("j", count=2))
        await node.create("p", node.container("a", count=2), inits=inits)

        await node.until_phase("p", "Running")
        one, two, three = plugin.asked
        assert {"g0", "g1"} == two == three
        assert one < two
        assert {"a": three} == await node.held("p")


async def test_what_init_containers_leave_stays_with_the_pod_until_it_ends(node):
    async with node.plugin(count=2) as plugin:
        await node.create("p", inits=(node.init(count=2),))
        await node.until_phase("p", "Running")
        await node.create("q")
        assert "Available: 0" in (await node.until_phase("q", "Failed"))["message"]
        await node.delete("p", grace=1)
        await node.until_gone("p")

        await node.create("r", node.container(count=2))
        await node.until_phase("r", "Running")
        assert 3 == len(plugin.asked)


async def test_a_sidecars_ids_are_not_given_again_and_reuse_asks_for_no_preference(node):
    async with node.plugin() as plugin:
        await prefer(node, plugin)
        inits = (node.sidecar("s"), node.init("i"))
        await node.create("p", node.container("a1"), node.container("a2"), inits=inits)

        await node.until_phase("p", "Running")
        assert [
            *(("prefer", {"g0"}), ("allocate", {"g0"})),
            *(("prefer", {"g1"}), ("allocate", {"g1"})),
            ("allocate", {"g1"}),
            *(("prefer", {"g2"}), ("allocate", {"g2"})),
        ] == [(call.kind, call.ids) for call in plugin.calls]


async def test_a_part_that_is_reused_must_be_included(node):
    async with node.plugin(count=4) as plugin:
        await prefer(node, plugin)
        inits = (node.init("i", count=2), node.sidecar("s"))
        await node.create("p", node.container("a", count=2), inits=inits)

        await node.until_phase("p", "Running")
        init, sidecar, app = plugin.asked
        (_, required, size) = plugin.preferred[-1]
        assert {"g0", "g1"} == init
        assert sidecar < init
        assert 2 == len(plugin.preferred), "the sidecar took what was left"
        assert (init - sidecar, 2) == (set(required), size)
        assert set(required) | {"g2"} == app


async def test_a_preference_is_asked_even_when_all_that_is_left_is_needed(node):
    async with node.plugin(count=2) as plugin:
        await prefer(node, plugin)
        await node.create("p", node.container(count=2))

        await node.until_phase("p", "Running")
        ((available, required, size),) = plugin.preferred
        assert ({"g0", "g1"}, [], 2) == (set(available), required, size)


@pytest.mark.parametrize(
    ("preferred", "sure"),
    [([], set()), (["g1"], {"g1"}), (["alien", "g1"], {"g1"}), (["g0", "g1", "g2"], set())],
)
async def test_short_foreign_and_long_answers_are_made_to_fit(node, preferred, sure):
    async with node.plugin() as plugin:
        await prefer(node, plugin)
        plugin.choose(lambda *_: preferred)
        await node.create("p", node.container(count=2))

        await node.until_phase("p", "Running")
        (ids,) = plugin.asked
        assert 2 == len(ids)
        assert sure <= ids


async def test_a_preference_that_fails_fails_the_admission_with_the_exact_text(node):
    async with node.plugin() as plugin:
        await prefer(node, plugin)
        plugin.script.prefer = None
        await node.create("p")

        status = await node.until_phase("p", "Failed")
        assert (
            because(
                "device plugin GetPreferredAllocation rpc failed with err: "
                "rpc error: code = Unimplemented desc = no preference"
            )
            == status["message"]
        )


# How a plugin becomes known and is forgotten: the model and the real kubelet alike (legacy mode).
#
# Only the model is tried on registration by socket path, which is kubelet 1.37 and later.

LONG_NAME = "n" * 64
LONG_DOMAIN = ".".join(["d" * 61] * 4)


def a_plugin(node, name="p.sock", count=2):
    return ProbePlugin(node.plugins, resource=node.resource, name=name, count=count)


async def refused(plugin, **fields) -> tuple[Status, str | None]:
    with pytest.raises(GRPCError) as caught:
        await plugin.register(**fields)
    return caught.value.status, caught.value.message


async def test_another_version_is_refused_with_the_exact_text(node):
    async with a_plugin(node) as plugin:
        text = (
            'requested API version "v1" is not supported by kubelet. '
            'Supported version is ["v1beta1"]'
        )
        assert (Status.UNKNOWN, text) == await refused(plugin, version="v1")
        assert 0 == plugin.connections


async def test_names_that_no_plugin_may_register_are_refused_with_the_exact_text(node):
    async with a_plugin(node) as plugin:
        for name in (
            *("gpu", "x.kubernetes.io/g", "requests.a.b/c", "A/b", "a/b/c", "a/", "/a", "a/-b"),
            *(f"a/{LONG_NAME}", f"{LONG_DOMAIN}/g", "a_b/c", ""),
        ):
            text = f'the ResourceName "{name}" is invalid'
            assert (Status.UNKNOWN, text) == await refused(plugin, resource_name=name)


async def test_unusual_names_are_taken(node):
    async with a_plugin(node) as plugin:
        for name in ("vendor.com/gpu-1_x.Y", f"a/{LONG_NAME[1:]}", f"{LONG_DOMAIN[:244]}/g"):
            await plugin.register(resource_name=name)
            await node.until_listed(2, name)


@pytest.mark.parametrize(
    ("name", "endpoint"),
    [("sub/p.sock", "sub/p.sock"), ("p.sock", "/p.sock"), ("p.sock", "x/../p.sock")],
)
async def test_the_endpoint_is_joined_below_the_directory(node, name, endpoint):
    (node.plugins / name).parent.mkdir(exist_ok=True)
    async with a_plugin(node, name) as plugin:
        await plugin.register(endpoint=endpoint)
        await node.until_listed(2)


@pytest.mark.parametrize("place", ["real"], indirect=True)
async def test_the_dial_is_tried_again_after_about_a_second(node):
    loop = asyncio.get_running_loop()
    plugin = a_plugin(node)
    begun = loop.time()
    async with asyncio.TaskGroup() as group:
        group.create_task(plugin.register())
        await asyncio.sleep(0.3)  # it is the delay of the plugin under test
        await plugin.serve()
    took = loop.time() - begun
    await node.until_listed(2)
    await plugin.die()
    assert 0.9 <= took < FAR  # times one second


@pytest.mark.long
async def test_a_plugin_that_never_listens_fails_after_ten_seconds(node):
    begun = asyncio.get_running_loop().time()

    answer = await refused(a_plugin(node))

    text = "failed to dial device plugin: context deadline exceeded"
    assert (Status.UNKNOWN, text) == answer
    assert 9.9 <= asyncio.get_running_loop().time() - begun < 20


async def test_options_are_asked_before_the_reply_and_their_failure_fails_register(node):
    async with a_plugin(node) as plugin:
        plugin.script.options_error = GRPCError(Status.INTERNAL, "not now")

        text = "failed to get device plugin options: rpc error: code = Internal desc = not now"
        assert (Status.UNKNOWN, text) == await refused(plugin)
        assert 0 == plugin.streams


async def test_options_come_from_the_call_and_not_from_the_register_request(node):
    async with a_plugin(node) as plugin:
        plugin.script.prefer = first
        both = DevicePluginOptions(True, True)
        await plugin.register(options=both)
        await node.until_listed(2)
        await node.create("p")

        await node.until_phase("p", "Running")
        assert ["allocate"] == [call.kind for call in plugin.calls]


async def test_all_calls_come_over_the_connection_that_register_opened(node):
    async with node.plugin() as plugin:
        await node.create("p")
        await node.until_phase("p", "Running")

        assert 1 == plugin.connections
        paths = [headers[":path"].rpartition("/")[2] for headers in plugin.headers]
        assert ["GetDevicePluginOptions", "ListAndWatch", "Allocate"] == paths


async def test_calls_say_localhost_as_authority_and_have_no_deadline(node):
    async with node.plugin() as plugin:
        await node.create("p")
        await node.until_phase("p", "Running")

        for headers in plugin.headers:
            assert "localhost" == headers[":authority"]
            assert "application/grpc" == headers["content-type"]
            assert "grpc-timeout" not in headers


async def test_a_second_register_replaces_the_endpoint_and_leaves_the_old_stream_open(node):
    async with node.plugin() as old, a_plugin(node, "q.sock") as new:
        await new.register()
        await node.until_listed(2)
        await node.create("p")
        await node.until_phase("p", "Running")

        assert (1, 1) == (old.streams, new.streams)
        assert (0, 1) == (len(old.asked), len(new.asked))
        old.publish(old.devices[:3])
        await node.until_listed(3)


async def test_the_end_of_the_old_stream_disconnects_the_new_client(node):
    async with node.plugin() as old, a_plugin(node, "q.sock") as new:
        await new.register()
        await node.until_listed(2)

        old.end_streams()

        await node.until_listed(0)
        await node.until(lambda: new.streams == 0, "the new stream lives on")
        await node.until_counted(2, 0)
        assert 1 == new.connections, "nobody dials again"


async def test_after_a_failed_register_again_the_end_of_the_stream_goes_unnoticed(node):
    async with node.plugin() as plugin:
        plugin.script.options_error = GRPCError(Status.INTERNAL, "not now")
        await refused(plugin)

        plugin.end_streams()
        await node.until(lambda: plugin.streams == 0, "the stream lives on")
        await node.until_counted(4, 4)
        await node.until_listed(4)

        await node.create("p")
        await node.until_phase("p", "Running")
        assert 1 == len(plugin.asked), "its connection is still open"


async def test_the_end_of_the_stream_makes_everything_unhealthy_and_nobody_dials_again(node):
    async with node.plugin() as plugin:
        await node.until_counted(4, 4)

        plugin.end_streams()

        await node.until_counted(4, 0)
        assert [] == await node.allocatable()
        assert (1, 0) == (plugin.connections, plugin.streams)
        await plugin.register()
        await node.until_counted(4, 4)


# Containers that start and die beside admission: the model and the real kubelet alike.
#
# The panic of kubelet 1.36 when calls of pod workers overlap is left to the model: a real one would
# take the pods of every test beside with it.

REFUSED = GRPCError(Status.FAILED_PRECONDITION, "not now. [HA-3f9c]")
CONFIG_ERROR = "CreateContainerConfigError"


async def offer_pre_start(node, plugin) -> None:
    plugin.script.options = DevicePluginOptions(pre_start_required=True)
    await node.come_back(plugin)


async def test_a_container_that_dies_is_started_again_without_a_call(node):
    async with node.plugin() as plugin:
        await node.create("p")
        await node.until_phase("p", "Running")
        plugin.publish(devices(4, health="Unhealthy"))
        await node.until_listed(0)
        await node.end_container("p")
        await node.until_restarted()

        assert 1 == len(plugin.asked)


async def test_a_container_that_dies_without_the_plugin_is_started_again(node):
    async with node.plugin() as plugin:
        await node.create("p")
        await node.until_phase("p", "Running")
        await plugin.die()
        await node.until_counted(4, 0)

        await node.end_container("p")
        await node.until_restarted()

        assert {"main": plugin.asked[0]} == await node.held("p")


async def test_pre_start_is_called_at_every_start_of_a_container(node):
    async with node.plugin() as plugin:
        await offer_pre_start(node, plugin)
        await node.create("p", node.container(count=2))
        await node.until_phase("p", "Running")
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
        await node.create("p")
        await node.until_phase("p", "Running")

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
    await node.create("p")
    await node.until_phase("p", "Running")
    await node.restart(lose_checkpoint=True)
    await node.come_back(plugin)
    await node.until_counted(4, 4)
    await node.until_held("p", lambda held: held is not None)
    await node.create("late", node.container(count=0))
    await node.until_phase("late", "Running")  # it has heard of everything
    plugin.calls.clear()


async def test_with_nothing_published_a_lost_checkpoint_kills_running_pods(node):
    async with node.plugin() as plugin:
        await node.create("p", node.container(script="exec sleep 3600"))
        await node.until_phase("p", "Running")
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
        await node.create("p")
        await node.until_phase("p", "Running")
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
        await node.create("p")
        await node.until_phase("p", "Running")
        plugin.hold()
        await node.create("q")
        await node.until(lambda: len(plugin.asked) == 2, "no Allocate")
        await node.end_container("p")
        await node.stays(lambda: node.restarts() < 1, "it is started again", 5.0)

        plugin.let_go()
        await node.until_restarted()

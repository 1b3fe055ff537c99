"""What a kubelet does with lists, ids and preferences: the model and the real one alike."""

import asyncio

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from tests.fakes.plugin import a_device, answer
from tests.peers.lab.nodes import first
from tests.peers.lab.part import because

# Which ids a container gets and what the plugin is asked.
#
# Only the model is tried on what a real kubelet shows after hours or with two NUMA nodes: hints of
# the topology manager, and a resource that is gone after its five minutes.

TEXT = "test refusal, second sentence. [HA-3f9c]"
REFUSED = GRPCError(Status.FAILED_PRECONDITION, TEXT)
GO_TEXT = f"rpc error: code = FailedPrecondition desc = {TEXT}"


def too_few(node, *, requested: int, available: int) -> str:
    numbers = f"Requested: {requested}, Available: {available}"
    return because(f"requested number of devices unavailable for {node.resource}. {numbers}")


async def test_each_container_is_one_allocate_with_one_container_request(node, plugin):
    asking = (node.container("a"), node.container("b", count=2))
    await node.runs("p", node.container("none", count=0), *asking)
    assert [1, 2] == [len(ids) for ids in plugin.asked]
    held = {"none": frozenset(), "a": plugin.asked[0], "b": plugin.asked[1]}
    assert held == await node.held("p")


async def test_a_pod_that_names_its_node_is_not_scheduled_until_the_kubelet_has_admitted_it(
    node, plugin
):
    plugin.script.gate = asyncio.Event()
    await node.create("p", node.container("a"), node.container("b"))
    await node.until(lambda: plugin.asked, "nothing is asked")

    await node.stays(lambda: node.conditions("p") == {}, "conditions before the answer")
    plugin.script.gate.set()
    await node.until_phase("p", "Running")
    assert "True" == node.conditions("p")["PodScheduled"]

    plugin.script.refusals.append(REFUSED)
    await node.fails("q")
    assert "PodScheduled" not in node.conditions("q")


async def test_a_refusal_reaches_the_pod_word_for_word_and_frees_the_ids_of_the_whole_pod(node):
    async with node.plugin(count=3) as plugin:

        def refuse_the_second(ids):
            if len(plugin.asked) == 2:
                raise REFUSED
            return [answer(ids)]

        plugin.script.responses = refuse_the_second
        status = await node.fails("p", *(node.container(name) for name in "abc"))
        assert ("UnexpectedAdmissionError", because(GO_TEXT)) == (
            status["reason"],
            status["message"],
        )
        assert 2 == len(plugin.asked), "the next container is not asked for"
        assert await node.held("p") is None

        await node.runs("q", node.container(count=3))
        await node.delete("q", grace=1)
        await node.until_gone("q")
        await node.runs("r", node.container(count=3))


async def test_too_few_free_ids_are_refused_with_both_numbers(node):
    async with node.plugin(count=3) as plugin:
        await node.runs("p", node.container(count=2))

        status = await node.fails("q", node.container(count=2))
        assert too_few(node, requested=2, available=1) == status["message"]
        assert 1 == len(plugin.asked)


async def test_a_resource_that_nobody_ever_registered_is_admitted_without_ids(node):
    await node.runs("p")
    assert {"main": frozenset()} == await node.held("p")


async def test_an_unhealthy_id_is_never_given(node, plugin):
    ill = [a_device(f"g{number}", health="Unhealthy") for number in range(3)]
    plugin.publish([*ill, a_device("g3")])
    await node.until_listed(1)
    await node.runs("p")

    status = await node.fails("q")
    assert [{"g3"}] == plugin.asked
    assert "Requested: 1, Available: 0" in status["message"]


async def test_the_death_of_the_plugin_in_an_allocate_reaches_the_pod(node, plugin):
    plugin.hold()
    await node.create("p")
    await node.until(lambda: plugin.asked, "no Allocate")
    await plugin.die()

    status = await node.until_phase("p", "Failed")
    eof = "rpc error: code = Unavailable desc = error reading from server: EOF"
    assert because(eof) == status["message"]


async def test_while_an_allocate_is_held_nothing_else_is_admitted(node, plugin):
    plugin.hold()
    await node.create("p")
    await node.until(lambda: plugin.asked, "no Allocate")
    await node.create("plain", node.container(count=0))
    await node.create("q")
    await node.stays(
        lambda: (1, "Pending") == (len(plugin.asked), node.phase("plain")), "one goes on"
    )

    plugin.let_go()
    for name in ("p", "plain", "q"):
        await node.until_phase(name, "Running")


# What a plugin's lists make of its resource.


async def ids(node) -> list[str]:
    return sorted(text for entry in await node.allocatable() for text in entry.device_ids)


async def test_each_list_replaces_the_one_before_and_only_healthy_is_healthy(node, plugin):
    await node.until_counted(4, 4)
    odd = [a_device(f"h{n}", health=word) for n, word in enumerate(("", "healthy", "HEALTHY"))]
    plugin.publish([a_device("new"), a_device("ill", health="Unhealthy"), *odd])

    await node.until_counted(5, 1)
    assert ["new"] == await ids(node)


async def test_an_empty_list_leaves_the_resource_present_with_nothing(node, plugin):
    await node.until_counted(4, 4)
    plugin.publish([])

    await node.until_counted(0, 0)
    for name, count in (("one", 1), ("zero", 0)):
        status = await node.fails(name, node.container(count=count))
        text = f"no healthy devices present; cannot allocate unhealthy devices {node.resource}"
        assert because(text) == status["message"], "even for a count of zero"


async def test_a_list_over_4_mib_ends_the_stream(node, plugin):
    plugin.publish([a_device(f"{number:09}" * 7) for number in range(60_000)])

    await node.until_counted(4, 0)
    await node.until(lambda: not plugin.open_connections(), "the connection lives on")


async def test_there_is_one_entry_for_each_id_and_numa_node(node):
    async with node.plugin(count=0) as plugin:
        plugin.publish([a_device("both", nodes=(0, 1)), a_device("none"), a_device("no", nodes=())])
        await node.until_listed(2)
        entries = [(entry.device_ids, nodes_of(entry)) for entry in await node.allocatable()]
        assert [(["both"], 0), (["both"], 1), (["none"], None)] == sorted(entries)

        await node.runs("p", node.container(count=3))
        (main,) = (await node.get("p")).containers
        held = [(entry.device_ids, nodes_of(entry)) for entry in main.devices]
        assert [*((["both"], 0), (["both"], 1), (["no"], None), (["none"], None))] == sorted(
            held, key=str
        )
        (entry,) = [e for e in node.checkpoint().entries if e.resource == node.resource]
        assert {-1: {"no", "none"}, 0: {"both"}, 1: {"both"}} == {
            numa: set(members) for numa, members in entry.numa.items()
        }


def nodes_of(entry) -> int | None:
    return None if entry.topology is None else entry.topology.nodes[0].id


# Ids that a pod uses again, and what is preferred.


async def prefer(node, plugin) -> None:
    """From now on it is asked for its preference."""
    plugin.choose(first)
    await node.come_back(plugin)


async def test_init_containers_give_their_ids_to_the_containers_after_them(node):
    async with node.plugin(count=2) as plugin:
        inits = (node.init("i"), node.init("j", count=2))
        await node.runs("p", node.container("a", count=2), inits=inits)
        one, two, three = plugin.asked
        assert {"g0", "g1"} == two == three
        assert one < two
        assert {"a": three} == await node.held("p")


async def test_what_init_containers_leave_stays_with_the_pod_until_it_ends(node):
    async with node.plugin(count=2) as plugin:
        await node.runs("p", inits=(node.init(count=2),))
        assert "Available: 0" in (await node.fails("q"))["message"]
        await node.delete("p", grace=1)
        await node.until_gone("p")

        await node.runs("r", node.container(count=2))
        assert 3 == len(plugin.asked)


async def test_a_sidecars_ids_are_not_given_again_and_reuse_asks_for_no_preference(node, plugin):
    await prefer(node, plugin)
    inits = (node.sidecar("s"), node.init("i"))
    await node.runs("p", node.container("a1"), node.container("a2"), inits=inits)
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
        await node.runs("p", node.container("a", count=2), inits=inits)
        init, sidecar, app = plugin.asked
        (_, required, size) = plugin.preferred[-1]
        assert {"g0", "g1"} == init
        assert sidecar < init
        assert 2 == len(plugin.preferred), "the sidecar took what was left"
        assert (init - sidecar, 2) == (set(required), size)
        assert set(required) | {"g2"} == app


async def test_a_preference_that_fails_fails_the_admission_with_the_exact_text(node, plugin):
    await prefer(node, plugin)
    plugin.script.prefer = None
    status = await node.fails("p")
    assert (
        because(
            "device plugin GetPreferredAllocation rpc failed with err: "
            "rpc error: code = Unimplemented desc = no preference"
        )
        == status["message"]
    )

"""What a plugin's lists make of its resource: the model and the real kubelet alike.

Only the model is tried on lists of just under 4 MiB and on overlapping health updates by the
hundred. The five minutes after which a resource is removed are waited for in a long test, with the
real kubelet; the model passes them in virtual time among its own tests.
"""

import pytest

from tests.fakes.plugin import a_device


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
        await node.runs("p", node.container(count=2))
        assert [{"d", "e"}] == plugin.asked


async def test_an_empty_list_leaves_the_resource_present_with_nothing(node):
    async with node.plugin() as plugin:
        await node.until_counted(4, 4)
        plugin.publish([])

        await node.until_counted(0, 0)
        assert (await node.fails("p"))["message"].startswith(
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


async def test_the_order_of_a_containers_ids_differs_from_call_to_call(node):
    async with node.plugin(count=8):
        await node.runs("p", node.container(count=8))
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

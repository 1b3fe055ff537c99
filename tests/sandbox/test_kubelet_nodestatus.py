"""The Node object as the kubelet model keeps it."""

import asyncio

from tests.fakes.node_rig import a_node_rig
from tests.fakes.plugin import RESOURCE, devices


async def test_the_node_follows_at_ticks_of_ten_seconds(tmp_path):
    async with a_node_rig(tmp_path, count=4) as node:
        loop, started = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        await node.sees(lambda: "4" == node.count("allocatable"))
        node.plugin.publish(devices(2))
        await node.rig.until_listed(2)
        await asyncio.sleep(5)
        assert "4" == node.count("allocatable")

        await node.sees(lambda: "2" == node.count("allocatable"))
        assert 10 == round(loop.time() - started)

        node.plugin.end_streams()
        await node.sees(lambda: "0" == node.count("allocatable"))
        assert "2" == node.count("capacity")
        await node.sees(lambda: "0" == node.count("capacity"))
        assert 300 < loop.time() - started < 340


async def test_an_eager_node_follows_at_once(tmp_path):
    async with a_node_rig(tmp_path, count=4, eager=True) as node:
        await node.sees(lambda: "4" == node.count("allocatable"))
        started = asyncio.get_running_loop().time()
        node.plugin.publish(devices(2))

        await node.sees(lambda: "2" == node.count("allocatable"))
        assert asyncio.get_running_loop().time() - started < 1


async def test_a_node_that_was_deleted_comes_back_with_the_kubelet(tmp_path):
    async with a_node_rig(tmp_path) as node:
        await node.sees(lambda: node.count("allocatable"))
        node.store.delete("nodes", "", "node-a")
        await asyncio.sleep(30)
        assert [] == node.store.select("nodes")

        await node.rig.kubelet.restart()

        await node.sees(lambda: node.store.select("nodes"))


async def test_what_the_node_publishes_decides_in_the_kubelets_predicates(tmp_path):
    async with a_node_rig(tmp_path, count=4, eager=True) as node:
        await node.sees(lambda: node.count("allocatable") == "4")

        def label(stored):
            stored["metadata"]["labels"]["zone"] = "a"
            return stored

        node.store.update("nodes", "", "node-a", label)
        node.plugin.publish(devices(3))
        await node.sees(lambda: node.count("allocatable") == "3")

        assert {RESOURCE: 3} == node.rig.kubelet.node.published
        assert "a" == node.rig.kubelet.node.labels["zone"]


async def test_what_only_an_earlier_kubelet_knew_is_wholly_allocatable(tmp_path):
    async with a_node_rig(tmp_path, count=4) as node:
        await node.sees(lambda: "4" == node.count("allocatable"))
        node.plugin.end_streams()
        await node.sees(lambda: "0" == node.count("allocatable"))

        await node.rig.kubelet.restart(lose_checkpoint=True)

        await node.sees(lambda: "4" == node.count("allocatable"))
        assert 0 == node.rig.kubelet.allocatable(RESOURCE)


async def test_a_pod_that_asks_for_a_removed_resource_finds_none_of_it(tmp_path):
    async with a_node_rig(tmp_path, count=4) as node:
        await node.sees(lambda: "4" == node.count("allocatable"))
        node.plugin.end_streams()
        await node.sees(lambda: "0" == node.count("capacity"))

        node.create("p")

        await node.phases(p="Failed")
        assert node.pod("p")["status"]["message"].endswith("requested: 1, used: 0, capacity: 0")
        assert [] == node.plugin.allocated

"""What an uninstallation asks, over real HTTP: a Node is changed only as it was seen."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from agent.codec.objects import decode_pod
from agent.core.cluster.pods import PodView
from agent.core.errors import ApiConflict, ApiNotFound, MalformedText
from agent.core.node.leftovers import Agents, NodeLeftovers
from agent.host.kube.leftovers import KubeLeftovers
from agent.host.kube.lists import LIMITS
from agent.host.kube.session import ApiRequest, KubeSession
from tests.builders import NODE, RESOURCE
from tests.fakes.kubeworld import model_world

pytestmark = pytest.mark.looptime(False)


def a_node(name: str, ready: str = "True") -> dict[str, Any]:
    conditions = [{"type": "Other", "status": "Unknown"}, {"type": "Ready", "status": ready}]
    conditions += [{"type": "GpuDegraded", "status": "True"}]
    metadata = {"name": name, "annotations": {"hami-agent/0": "1", "hami-agent/1": "1"}}
    return {"metadata": metadata, "status": {"conditions": conditions}}


def a_pod(name: str, **spec: Any) -> dict[str, Any]:
    namespace = spec.pop("namespace", "gpus")
    limits = {"limits": {RESOURCE: str(spec.pop("gpus", 0))}}
    spec["containers"] = [{"name": "main", "resources": limits}]
    return {"metadata": {"name": name, "namespace": namespace}, "spec": spec}


async def test_a_node_is_changed_only_as_it_was_seen(tmp_path: Path):
    async with model_world(tmp_path, "admin") as world:
        world.store.create("nodes", a_node("a"))
        api = KubeLeftovers(world.session)
        (seen,) = await api.nodes()
        await api.remove(seen, ["hami-agent/0"])
        with pytest.raises(ApiConflict):
            await api.remove(seen, ["hami-agent/1"])
        left = await api.node("a")

    assert (["hami-agent/0", "hami-agent/1"], ["hami-agent/1"]) == (
        sorted(seen.annotations),
        sorted(left.annotations),
    )


async def test_all_nodes_are_read_page_by_page(tmp_path: Path):
    async with model_world(tmp_path, "admin") as world:
        for number in range(2 * LIMITS[1] + 1):
            world.store.create("nodes", a_node(f"n{number:03}"))

        found = await KubeLeftovers(world.session).nodes()

    assert [f"n{number:03}" for number in range(2 * LIMITS[1] + 1)] == [one.name for one in found]


async def test_a_node_that_is_not_there_is_told_apart(tmp_path: Path):
    async with model_world(tmp_path, "admin") as world:
        with pytest.raises(ApiNotFound):
            await KubeLeftovers(world.session).node("a")


async def test_the_condition_goes_and_the_others_stay(tmp_path: Path):
    async with model_world(tmp_path, "admin") as world:
        world.store.create("nodes", a_node("a"))
        await KubeLeftovers(world.session).forget_condition("a")
        left = world.store.get("nodes", "", "a")["status"]["conditions"]

    assert ["Other", "Ready"] == [one["type"] for one in left]


async def test_a_node_says_who_serves_there_until_its_kubelet_falls_silent(tmp_path: Path):
    async with model_world(tmp_path, "admin") as world:
        for ready in ("True", "False", "Unknown"):
            made = a_node(ready.lower(), ready)
            made["status"]["allocatable"] = {RESOURCE: "8"}
            world.store.create("nodes", made)
        world.store.create("nodes", {"metadata": {"name": "new"}})
        api = KubeLeftovers(world.session)
        names = ("true", "false", "unknown", "new", "none")
        found = {name: await api.look(name, RESOURCE) for name in names}

    serving = NodeLeftovers(kubelet=True, served=8, degraded=True)
    assert {
        "true": serving,
        "false": serving,
        "unknown": NodeLeftovers(degraded=True),
        "new": NodeLeftovers(),
        "none": NodeLeftovers(),
    } == found


async def test_the_agents_pods_are_told_and_on_demand_with_their_nodes(tmp_path: Path):
    async with model_world(tmp_path, "admin") as world:
        for name, spec in (("one", {"nodeName": "a"}), ("two", {}), ("far", {"namespace": "b"})):
            world.store.create("pods", a_pod(name, **spec))
        # The model evaluates no selector of labels; tests/peers asks the real server with one.
        api, agents = KubeLeftovers(world.session), Agents("gpus", "")
        names, found = await api.agents(agents), await api.places(agents)

    assert ("one", "two") == names
    assert {"one": "a", "two": ""} == found


class OnePod:
    """A session whose every list is of the same pod."""

    def __init__(self) -> None:
        self.asked: list[ApiRequest] = []

    async def call(self, request: ApiRequest, _: int | None = None) -> bytearray:
        self.asked.append(request)
        pods = [{"metadata": {"name": "a", "resourceVersion": "1"}}]
        return bytearray(json.dumps({"metadata": {"resourceVersion": "1"}, "items": pods}).encode())


async def test_where_only_names_are_needed_no_whole_pod_is_asked_for():
    session = OnePod()
    api = KubeLeftovers(cast("KubeSession", session))

    await api.agents(Agents("gpus", "app=agent"))
    await api.places(Agents("gpus", "app=agent"))

    assert [True, False] == ["PartialObjectMetadataList" in one.accept for one in session.asked]


async def test_a_pod_that_cannot_be_read_hides_no_other(tmp_path: Path, monkeypatch: Any):
    def unreadable(pod: dict[str, Any], resource: str) -> PodView:
        if pod["metadata"]["name"] == "odd":
            raise MalformedText("odd")
        return decode_pod(pod, resource)

    monkeypatch.setattr("agent.host.kube.leftovers.decode_pod", unreadable)
    async with model_world(tmp_path) as world:
        for name in ("odd", "plain"):
            world.store.create("pods", a_pod(name, nodeName=NODE, gpus=1))

        found = await KubeLeftovers(world.session).gpu_pods(NODE, RESOURCE)

    assert ("gpus/plain",) == found


async def test_pods_are_asked_for_the_resource_that_is_named(tmp_path: Path):
    async with model_world(tmp_path) as world:
        world.store.create("pods", a_pod("gpu", nodeName=NODE, gpus=1))

        assert () == await KubeLeftovers(world.session).gpu_pods(NODE, "other.com/gpu")


async def test_pods_with_gpus_are_those_of_the_node_that_are_not_over(tmp_path: Path):
    async with model_world(tmp_path) as world:
        pods = {"gpu": {"gpus": 1}, "plain": {}, "over": {"gpus": 1}, "far": {"gpus": 1}}
        for name, spec in pods.items():
            node = "b" if name == "far" else NODE
            made = a_pod(name, nodeName=node, **spec)
            if name == "over":
                made["status"] = {"phase": "Succeeded"}
            world.store.create("pods", made)

        found = await KubeLeftovers(world.session).gpu_pods(NODE, RESOURCE)

    assert ("gpus/gpu",) == found

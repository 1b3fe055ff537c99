"""What an uninstallation asks of the API server, over real HTTP, and what it removes."""

from pathlib import Path
from typing import Any

import pytest

from agent.cluster import CORDON, HANDSHAKE, MUTEX_LOCK, REGISTER, SCORE, PodView
from agent.errors import ApiNotFound, MalformedText
from agent.kube.leftovers import KubeLeftovers, NodeLeftovers
from agent.kube.lists import LIMITS
from agent.kube.objects import decode_pod
from tests.builders import NODE, RESOURCE
from tests.fakes.kubeworld import model_world

pytestmark = pytest.mark.looptime(False)


OTHERS = (MUTEX_LOCK, CORDON, "seen")
KEYS = (REGISTER, SCORE, HANDSHAKE, "hami-agent/0", "hami-agent/1")


def a_node(name: str, ready: str = "True") -> dict[str, Any]:
    conditions = [{"type": "Other", "status": "Unknown"}, {"type": "Ready", "status": ready}]
    conditions += [{"type": "GpuDegraded", "status": "True"}]
    metadata = {"name": name, "annotations": dict.fromkeys((*KEYS, *OTHERS), "1")}
    return {"metadata": metadata, "status": {"conditions": conditions}}


def a_pod(name: str, **spec: Any) -> dict[str, Any]:
    namespace = spec.pop("namespace", "gpus")
    limits = {"limits": {RESOURCE: str(spec.pop("gpus", 0))}}
    spec["containers"] = [{"name": "main", "resources": limits}]
    return {"metadata": {"name": name, "namespace": namespace}, "spec": spec}


async def test_report_own_keys_and_condition_go_and_all_else_stays(tmp_path: Path):
    async with model_world(tmp_path, "admin") as world:
        for name in "ab":
            world.store.create("nodes", a_node(name))
        api = KubeLeftovers(world.session, RESOURCE)
        seen = await api.node("a")
        await api.clean(seen)
        await api.clean(seen)
        left, other = (world.store.get("nodes", "", name) for name in "ab")
        after = await api.node("a")

    assert (sorted(KEYS), True) == (sorted(seen.keys), seen.degraded)
    assert set(OTHERS) == left["metadata"]["annotations"].keys()
    assert ["Other", "Ready"] == [one["type"] for one in left["status"]["conditions"]]
    assert {*KEYS, *OTHERS} == other["metadata"]["annotations"].keys()
    assert not after.is_touched


async def test_a_node_that_is_gone_is_told_apart_and_an_untouched_one_costs_no_request(
    tmp_path: Path,
):
    async with model_world(tmp_path, "admin") as world:
        api = KubeLeftovers(world.session, RESOURCE)
        await api.clean(NodeLeftovers("a"))
        before = dict(world.session.requests.items())
        for degraded in (False, True):
            with pytest.raises(ApiNotFound):
                await api.clean(NodeLeftovers("a", KEYS[:degraded], degraded=True))
        with pytest.raises(ApiNotFound):
            await api.node("a")

    assert {} == before


async def test_all_nodes_are_read_page_by_page(tmp_path: Path):
    async with model_world(tmp_path, "admin") as world:
        for number in range(2 * LIMITS[1] + 1):
            world.store.create("nodes", a_node(f"n{number:04}"))

        found = await KubeLeftovers(world.session, RESOURCE).nodes()

    assert [f"n{number:04}" for number in range(2 * LIMITS[1] + 1)] == [one.name for one in found]
    assert all(one.is_touched for one in found)


@pytest.mark.parametrize(
    ("ready", "amount", "has_kubelet", "served"),
    [
        ("True", "8", True, True),
        ("False", "1k", True, True),
        ("Unknown", "8", False, False),
        ("True", "0", True, False),
        ("True", "many", True, False),
        ("True", None, True, False),
    ],
)
async def test_a_plugin_serves_where_a_living_kubelet_offers_the_resource(
    tmp_path: Path, ready: str, amount: Any, *, has_kubelet: bool, served: bool
):
    made = a_node("a", ready)
    made["status"]["allocatable"] = {RESOURCE: amount, "other.com/gpu": "8"}
    async with model_world(tmp_path, "admin") as world:
        world.store.create("nodes", made)
        found = await KubeLeftovers(world.session, RESOURCE).node("a")

    assert (has_kubelet, served) == (found.has_kubelet, found.served)


@pytest.mark.parametrize(
    "odd", [{}, {"status": None}, {"status": {"conditions": ["odd"], "allocatable": []}}]
)
async def test_a_node_that_says_nothing_has_nothing(tmp_path: Path, odd: dict[str, Any]):
    async with model_world(tmp_path, "admin") as world:
        world.store.create("nodes", {"metadata": {"name": "new"}} | odd)
        found = await KubeLeftovers(world.session, RESOURCE).node("new")

    assert NodeLeftovers("new") == found


async def test_the_agents_pods_are_listed_with_their_nodes(tmp_path: Path):
    async with model_world(tmp_path, "admin") as world:
        for name, spec in (("one", {"nodeName": "a"}), ("two", {}), ("far", {"namespace": "b"})):
            world.store.create("pods", a_pod(name, **spec))
        # The model evaluates no selector of labels; tests/peers asks the real server with one.
        found = await KubeLeftovers(world.session, RESOURCE).agents("gpus", "")

    assert {"one": "a", "two": ""} == found


async def test_a_pod_that_cannot_be_read_hides_no_other(tmp_path: Path, monkeypatch: Any):
    def unreadable(pod: dict[str, Any], resource: str) -> PodView:
        if pod["metadata"]["name"] == "odd":
            raise MalformedText("odd")
        return decode_pod(pod, resource)

    monkeypatch.setattr("agent.kube.leftovers.decode_pod", unreadable)
    async with model_world(tmp_path) as world:
        for name in ("odd", "plain"):
            world.store.create("pods", a_pod(name, nodeName=NODE, gpus=1))

        found = await KubeLeftovers(world.session, RESOURCE).gpu_pods(NODE)

    assert ("gpus/plain",) == found


async def test_pods_are_asked_for_the_resource_that_is_named(tmp_path: Path):
    async with model_world(tmp_path) as world:
        world.store.create("pods", a_pod("gpu", nodeName=NODE, gpus=1))

        assert () == await KubeLeftovers(world.session, "other.com/gpu").gpu_pods(NODE)


async def test_pods_with_gpus_are_those_of_the_node_that_are_not_over(tmp_path: Path):
    async with model_world(tmp_path) as world:
        pods = {"gpu": {"gpus": 1}, "plain": {}, "over": {"gpus": 1}, "far": {"gpus": 1}}
        for name, spec in pods.items():
            node = "b" if name == "far" else NODE
            made = a_pod(name, nodeName=node, **spec)
            if name == "over":
                made["status"] = {"phase": "Succeeded"}
            world.store.create("pods", made)

        found = await KubeLeftovers(world.session, RESOURCE).gpu_pods(NODE)

    assert ("gpus/gpu",) == found

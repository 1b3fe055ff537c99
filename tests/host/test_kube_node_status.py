"""A condition of the Node over real HTTP: merged by its type, the others stay."""

from pathlib import Path

import pytest

from agent.cluster import NodeCondition
from agent.errors import ApiNotFound
from agent.kube.api import KubeNodeStatus
from tests.builders import NODE, NOON
from tests.fakes.kubeworld import model_world

pytestmark = pytest.mark.looptime(False)


def degraded(*, status: bool, message: str = "GPU 1 is bad") -> NodeCondition:
    return NodeCondition("GpuDegraded", status, "NotServed", message, NOON)


async def test_a_condition_is_created_and_replaced_and_the_others_stay(tmp_path: Path):
    async with model_world(tmp_path) as world:
        ready = {"type": "Ready", "status": "True"}
        world.store.create("nodes", {"metadata": {"name": NODE}, "status": {"conditions": [ready]}})
        api = KubeNodeStatus(world.session, NODE)
        await api.set_condition(degraded(status=False))
        await api.set_condition(degraded(status=True))
        found = world.store.get("nodes", "", NODE)["status"]["conditions"]

    assert {"Ready": "True", "GpuDegraded": "True"} == {one["type"]: one["status"] for one in found}
    assert {
        "type": "GpuDegraded",
        "status": "True",
        "reason": "NotServed",
        "message": "GPU 1 is bad",
        "lastHeartbeatTime": "2026-09-01T12:00:00Z",
        "lastTransitionTime": "2026-09-01T12:00:00Z",
    } in found


async def test_a_node_that_is_not_there_has_no_condition(tmp_path: Path):
    async with model_world(tmp_path) as world:
        with pytest.raises(ApiNotFound):
            await KubeNodeStatus(world.session, NODE).set_condition(degraded(status=True))

"""The Node's status on the real API server: the agent's account may change its condition alone.

The right comes with `report.nodeCondition`; the policies are as helm renders them then.
"""

import pytest
import pytest_asyncio

from tests.chart.lab.helm import CHART, Helm, of_kind
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.api import STRATEGIC
from tests.peers.lab.guarded import COLLECTIONS, IN_FORCE, open_guarded
from tests.peers.lab.keeper import kept
from tests.peers.lab.servers import NODE_PATH, NODES, OTHER_NODE, OWN_POD, PODS
from tests.peers.lab.site import NAMESPACE
from tests.peers.lab.waiting import until_answer

ROLE = "/apis/rbac.authorization.k8s.io/v1/clusterroles/hami-agent"
NODE_STATUS, OTHER_STATUS = f"{NODE_PATH}/status", f"{NODES}/{OTHER_NODE}/status"
DEGRADED = {"type": "GpuDegraded", "status": "True", "reason": "NotServed", "message": "two"}
OWN_NODE_ONLY = "the agent may change its own Node only"
ANNOTATIONS_ONLY = "the agent may change annotations only"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def conditioned(binaries, tools, tmp_path_factory):
    """The same with `report.nodeCondition`, as helm renders it."""
    helm = Helm(tools / "helm", tmp_path_factory.mktemp("helm"))
    settings = (
        "config.report.nodeCondition=true",
        "image.repository=example/hami-agent",
        f"namespaceOverride={NAMESPACE}",
    )
    objects = helm.told("hami-agent", CHART, settings)
    async with kept(
        open_guarded(binaries, [one for one in objects if one["kind"] in COLLECTIONS])
    ) as made:
        role = of_kind(objects, "ClusterRole")["hami-agent"]
        await made.admin.have("PATCH", ROLE, {"rules": role["rules"]})
        await made.admin.have("PATCH", NODE_STATUS, {"status": A_KUBELETS})

        async def has_right() -> bool:
            told, path = {"status": {"conditions": [DEGRADED]}}, f"{NODE_STATUS}?dryRun=All"
            return 200 == (await made.agent.ask("PATCH", path, told, kind=STRATEGIC)).code

        # The server learns of a changed role from a watch of its own.
        await until_answer(has_right, IN_FORCE, lambda: "the role does not hold")
        yield made


A_KUBELETS = {
    "conditions": [{**DEGRADED, "type": "Ready"}],
    "capacity": {"pods": "9"},
    "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
    "nodeInfo": dict.fromkeys(
        (
            *("machineID", "systemUUID", "bootID", "kernelVersion", "osImage", "architecture"),
            *("containerRuntimeVersion", "kubeletVersion", "kubeProxyVersion", "operatingSystem"),
        ),
        "some",
    ),
}
FORGED = {
    "another condition": {
        "conditions": [DEGRADED, {**DEGRADED, "type": "Ready", "status": "False"}]
    },
    "capacity": {"capacity": {RESOURCE: "8"}},
    "allocatable": {"allocatable": {RESOURCE: "8"}},
    "addresses": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]},
    "port of the kubelet": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 1}}},
    "version": {"nodeInfo": {"kubeletVersion": "v1"}},
    "volumes": {"volumesInUse": ["a"]},
    "phase": {"phase": "Pending"},
}


@pytest.mark.parametrize("forged", FORGED)
async def test_of_its_status_the_agent_may_change_the_condition_alone(conditioned, forged):
    told = {"status": FORGED[forged]}
    code, reason, text = await conditioned.agent.told("PATCH", NODE_STATUS, told, kind=STRATEGIC)

    assert (403, "Forbidden") == (code, reason), text
    assert ANNOTATIONS_ONLY in text


@pytest.mark.parametrize(
    ("path", "status", "why"),
    [
        (OTHER_STATUS, {"conditions": [DEGRADED]}, OWN_NODE_ONLY),
        (f"{PODS}/{OWN_POD}/status", {"phase": "Failed"}, ANNOTATIONS_ONLY),
    ],
    ids=["another Node", "a pod"],
)
async def test_no_other_status_is_changed(conditioned, path, status, why):
    told = {"status": status}
    code, reason, text = await conditioned.agent.told("PATCH", path, told, kind=STRATEGIC)

    assert (403, "Forbidden") == (code, reason)
    assert why in text


async def test_the_condition_of_the_agents_node_is_written_and_changed(conditioned):
    before = (await conditioned.admin.have("GET", NODE_PATH))["status"]
    for value in ("True", "False"):
        told = {"status": {"conditions": [{**DEGRADED, "status": value}]}}
        left = await conditioned.agent.have("PATCH", NODE_STATUS, told, kind=STRATEGIC)
        found = {one["type"]: one["status"] for one in left["status"]["conditions"]}
        assert {"Ready": "True", "GpuDegraded": value} == found
        assert without_conditions(before) == without_conditions(left["status"])


def without_conditions(status):
    return {member: value for member, value in status.items() if member != "conditions"}

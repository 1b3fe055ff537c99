"""What looks at a node before the installation is what will be installed, and leaves nothing."""

from typing import Any

import pytest
import yaml

from agent.node import Right, rights
from tests.shape import tree

NAME = "hami-agent-doctor"
NOT_NEEDED = {"HAMI_AGENT_WEB_ADDRESS"}
"""It opens no port."""


def documents(path: str) -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all(tree.text(path))}


@pytest.fixture
def pod() -> dict[str, Any]:
    return documents("deploy/doctor.yaml")["Pod"]["spec"]


@pytest.fixture
def agents() -> dict[str, Any]:
    return documents("deploy/manifests/daemonset.yaml")["DaemonSet"]["spec"]["template"]["spec"]


def test_everything_has_a_name_of_its_own_so_that_an_installation_finds_nothing_in_its_way():
    found = documents("deploy/doctor.yaml")

    assert {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Pod"} == set(found)
    assert {NAME} == {one["metadata"]["name"] for one in found.values()}
    assert {NAME} == {one["name"] for one in found["ClusterRoleBinding"]["subjects"]}
    assert NAME == found["ClusterRoleBinding"]["roleRef"]["name"]


READS = {"get", "list", "watch"}


def granted(path: str) -> set[tuple[str, str]]:
    return {
        (verb, resource)
        for rule in documents(path)["ClusterRole"]["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_its_rights_are_those_of_the_agents_that_change_nothing():
    mine, agents = granted("deploy/doctor.yaml"), granted("deploy/manifests/rbac.yaml")

    assert {verb for verb, _ in mine} <= {"get", "list", "watch"}
    asked = (*rights("n"), Right("get", "pods", "pod", "namespace"))
    assert {(one.verb, one.resource) for one in asked if one.verb in READS} == mine
    assert mine < agents


def test_it_sees_what_the_agent_will_see(pod: dict[str, Any], agents: dict[str, Any]):
    (container,), (agent,) = pod["containers"], agents["containers"]
    without = [one for one in agent["volumeMounts"] if one["name"] != "config"]

    assert ["doctor", "--pre", "--read-only"] == container["args"]
    assert agent["image"] == container["image"]
    assert without == container["volumeMounts"]
    assert [one for one in agents["volumes"] if one["name"] != "config"] == pod["volumes"]
    assert [one for one in agent["env"] if one["name"] not in NOT_NEEDED] == container["env"]
    # It may do no more than the agent, ends, and is not started again.
    assert agent["securityContext"] == container["securityContext"]
    assert agents["securityContext"] == pod["securityContext"]
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostPID", "hostIPC", "hostNetwork"} & set(pod)
    assert "Never" == pod["restartPolicy"]
    assert "NODE" == pod["nodeName"], "to be replaced by whoever applies it"

"""The manifests and the unit: their settings are taken; the doctor's pod sees what the agent sees.

What the agent's pod may do and mounts: tests/chart, of which the manifests are one row of values.
"""

import re
from typing import Any

import pytest
import yaml

from agent.ledger import SourceFile
from agent.node import Right, rights
from agent.settings.reading import Sources, make_plan
from agent.settings.schema import BY_KEY, FIELDS
from tests.shape import tree

NAME = "hami-agent-doctor"
NOT_NEEDED = {"HAMI_AGENT_WEB_ADDRESS"}
"""It opens no port."""
READS = {"get", "list", "watch"}


def documents(path: str) -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all(tree.text(path))}


@pytest.fixture
def doctors() -> dict[str, Any]:
    return documents("deploy/doctor.yaml")


@pytest.fixture
def agents() -> dict[str, Any]:
    return documents("deploy/manifests/daemonset.yaml")["DaemonSet"]["spec"]["template"]["spec"]


def test_the_doctor_has_names_of_its_own_so_that_an_installation_finds_nothing_in_its_way(doctors):
    assert {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Pod"} == set(doctors)
    assert {NAME} == {one["metadata"]["name"] for one in doctors.values()}
    assert {NAME} == {one["name"] for one in doctors["ClusterRoleBinding"]["subjects"]}
    assert NAME == doctors["ClusterRoleBinding"]["roleRef"]["name"]


def test_its_rights_are_those_of_the_agents_that_change_nothing(doctors):
    mine, agents = (
        {
            (verb, name)
            for rule in one["rules"]
            for name in rule["resources"]
            for verb in rule["verbs"]
        }
        for one in (doctors["ClusterRole"], documents("deploy/manifests/rbac.yaml")["ClusterRole"])
    )
    asked = (*rights("n"), Right("get", "pods", "pod", "namespace"))

    assert {(one.verb, one.resource) for one in asked if one.verb in READS} == mine
    assert mine < agents


def test_it_sees_what_the_agent_will_see(doctors, agents):
    pod = doctors["Pod"]["spec"]
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


def test_the_settings_as_shipped_are_accepted_and_the_commented_ones_are_the_defaults():
    shipped = documents("deploy/manifests/config.yaml")["ConfigMap"]["data"]["config.yaml"]
    plain = re.sub(r"(?m)^( *)# (\w+: \S+)$", r"\1\2", shipped)
    as_shipped, settings = (
        make_plan(Sources(own=SourceFile("config.yaml", text.encode())))
        for text in (shipped, plain)
    )

    assert {"default"} == {setting.origin for setting in as_shipped.resolve().values()}
    assert len(settings.base) > 8
    assert {one.field.key: one.field.default for one in settings.base} == {
        one.field.key: one.value for one in settings.base
    }


def test_every_variable_that_is_set_is_a_setting(agents):
    (container,) = agents["containers"]
    names = {variable["name"] for variable in container["env"]}
    names |= set(re.findall(r"(?m)^#?(\w+)=", tree.text("systemd/hami-agent.env.example")))
    known = {name for field in FIELDS for name in field.variables}

    assert {"NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"} == names - known


def test_hamis_files_are_mounted_where_the_agent_looks_for_them(agents):
    (sources,) = [v["projected"]["sources"] for v in agents["volumes"] if v["name"] == "hami"]
    paths = {f"/etc/hami/{item['path']}" for s in sources for item in s["configMap"]["items"]}

    assert {BY_KEY["files.deviceConfig"].default, BY_KEY["files.nodeConfig"].default} == paths
    assert all(source["configMap"]["optional"] for source in sources)


def test_the_unit_starts_again_after_anything_but_refused_settings_and_keeps_the_gpus():
    unit = dict(re.findall(r"(?m)^(\w+)=(.*)$", tree.text("systemd/hami-agent.service")))

    assert {
        "Type": "notify",
        "Restart": "always",
        # Besides, where systemd itself cannot have the unit's group or user.
        "RestartPreventExitStatus": "78 216 217",
        "StartLimitIntervalSec": "0",
    }.items() <= unit.items()
    # Each makes a list of the devices that are allowed; ProtectClock= does before systemd 252.
    assert not {"ProtectClock", "PrivateDevices", "DeviceAllow", "DevicePolicy"} & unit.keys()

"""The manifests ask for what the agent needs and for nothing more."""

import re
from typing import Any

import pytest
import yaml

from agent import __version__
from agent.ledger import SourceFile
from agent.settings.reading import Sources, make_plan
from agent.settings.schema import BY_KEY, FIELDS
from tests.shape import tree

MANIFESTS = [path for path in tree.files() if path.is_relative_to("deploy/manifests")]
RIGHTS = {
    "nodes": {"get", "watch", "patch"},
    "pods": {"get", "list", "watch"},
    "pods/status": {"patch"},
    "events": {"create", "patch"},
}
HOST_PATHS = {
    "/run/hami-agent",
    "/sys/fs/cgroup",
    "/usr/local/vgpu",
    "/var/lib/hami-agent",
    "/var/lib/kubelet/device-plugins",
    "/var/lib/kubelet/pod-resources",
}
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount"  # noqa: S105 -- where it is mounted


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    documents = [d for path in MANIFESTS for d in yaml.safe_load_all(tree.text(path))]
    return {document["kind"]: document for document in documents}


@pytest.fixture
def pod(objects: dict[str, Any]) -> dict[str, Any]:
    return objects["DaemonSet"]["spec"]["template"]["spec"]


@pytest.fixture
def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["containers"]
    return only


def test_the_pods_account_has_the_list_of_rights_and_no_other(
    objects: dict[str, Any], pod: dict[str, Any]
):
    role, binding = objects["ClusterRole"], objects["ClusterRoleBinding"]
    granted = {name: set(rule["verbs"]) for rule in role["rules"] for name in rule["resources"]}
    (subject,) = binding["subjects"]
    account = objects["ServiceAccount"]["metadata"]

    assert RIGHTS == granted
    assert [[""]] * len(role["rules"]) == [rule["apiGroups"] for rule in role["rules"]]
    assert role["metadata"]["name"] == binding["roleRef"]["name"]
    assert pod["serviceAccountName"] == subject["name"] == account["name"]
    assert subject["namespace"] == account["namespace"] == "kube-system"


def test_the_container_has_no_right_of_root_and_no_namespace_of_the_host(
    pod: dict[str, Any], container: dict[str, Any]
):
    assert not {"hostPID", "hostNetwork", "hostIPC"} & {key for key in pod if pod[key]}
    context = container["securityContext"]
    seccomp = context.pop("seccompProfile")
    assert "RuntimeDefault" == seccomp["type"]
    assert {
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }.items() <= context.items()


def test_only_these_paths_of_the_host_are_mounted(pod: dict[str, Any], container: dict[str, Any]):
    paths = {v["name"]: v["hostPath"]["path"] for v in pod["volumes"] if "hostPath" in v}
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    read_only = {m["name"] for m in container["volumeMounts"] if m.get("readOnly")}

    assert HOST_PATHS == set(paths.values())
    assert "/host/sys/fs/cgroup" == mounts.pop("cgroup")
    assert mounts == {"config": "/etc/hami-agent", "hami": "/etc/hami", "token": TOKEN} | {
        name: paths[name] for name in mounts if name in paths
    }
    assert {"cgroup", "config", "hami", "pod-resources", "token"} == read_only


def test_the_commented_settings_are_the_defaults(objects: dict[str, Any]):
    lines = objects["ConfigMap"]["data"]["config.yaml"].splitlines()
    setting = re.compile(r"^( *)# (\w+: \S+)$")
    content = "\n".join(setting.sub(r"\1\2", line) for line in lines)

    settings = make_plan(Sources(own=SourceFile("config.yaml", content.encode()))).base

    assert len(settings) > 8
    assert {one.field.key: one.field.default for one in settings} == {
        one.field.key: one.value for one in settings
    }


def test_what_the_document_allows_on_openshift_is_what_the_pod_needs(
    objects: dict[str, Any], pod: dict[str, Any]
):
    *_, block = re.findall(r"^```yaml\n(.*?)^```", tree.text("GUIDE.md"), re.MULTILINE | re.DOTALL)
    allowed = yaml.safe_load(block)
    account = objects["ServiceAccount"]["metadata"]

    # The monitor's volumes and the Job's account, too: tests/chart/test_guide.py.
    assert {key for one in pod["volumes"] for key in one if key != "name"} <= set(
        allowed["volumes"]
    )
    assert f"system:serviceaccount:{account['namespace']}:{account['name']}" in allowed["users"]
    assert ["ALL"] == allowed["requiredDropCapabilities"]
    assert {"allowHostDirVolumePlugin"} == {
        key for key, value in allowed.items() if key.startswith("allow") and value
    }


def test_the_settings_as_shipped_are_accepted(objects: dict[str, Any]):
    shipped = SourceFile("config.yaml", objects["ConfigMap"]["data"]["config.yaml"].encode())

    found = make_plan(Sources(own=shipped)).resolve()

    assert {"default"} == {setting.origin for setting in found.values()}


def test_every_variable_that_is_set_is_a_setting(container: dict[str, Any]):
    names = {variable["name"] for variable in container["env"]}
    names |= set(
        re.findall(r"^#?(\w+)=", tree.text("systemd/hami-agent.env.example"), re.MULTILINE)
    )
    known = {name for field in FIELDS for name in field.variables}

    assert {"NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"} == names - known


def test_hamis_files_are_mounted_where_the_agent_looks_for_them(pod: dict[str, Any]):
    (sources,) = [v["projected"]["sources"] for v in pod["volumes"] if v["name"] == "hami"]
    paths = {f"/etc/hami/{item['path']}" for s in sources for item in s["configMap"]["items"]}

    assert {BY_KEY["files.deviceConfig"].default, BY_KEY["files.nodeConfig"].default} == paths
    assert all(source["configMap"]["optional"] for source in sources)


def test_the_image_is_of_this_version_and_the_probes_ask_its_open_port(container: dict[str, Any]):
    probes = {kind: container[kind]["httpGet"] for kind in container if kind.endswith("Probe")}

    assert f"hami-agent:{__version__}" == container["image"]
    assert [{"name": "http", "containerPort": 9394}] == container["ports"]
    assert {
        "startupProbe": {"path": "/livez", "port": "http"},
        "livenessProbe": {"path": "/livez", "port": "http"},
        "readinessProbe": {"path": "/readyz?standby", "port": "http"},
    } == probes


def test_the_unit_starts_again_after_anything_but_refused_settings_and_keeps_the_gpus():
    unit = dict(re.findall(r"^(\w+)=(.*)$", tree.text("systemd/hami-agent.service"), re.MULTILINE))

    assert {
        "Type": "notify",
        "Restart": "always",
        # Besides, where systemd itself cannot have the unit's group or user.
        "RestartPreventExitStatus": "78 216 217",
        "StartLimitIntervalSec": "0",
    }.items() <= unit.items()
    # Each makes a list of the devices that are allowed; ProtectClock= does before systemd 252.
    assert not {"ProtectClock", "PrivateDevices", "DeviceAllow", "DevicePolicy"} & unit.keys()

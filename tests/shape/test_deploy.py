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


def test_the_role_is_the_list_of_rights(objects: dict[str, Any]):
    granted = {
        resource: set(rule["verbs"])
        for rule in objects["ClusterRole"]["rules"]
        for resource in rule["resources"]
    }

    assert RIGHTS == granted
    assert {""} == {
        group for rule in objects["ClusterRole"]["rules"] for group in rule["apiGroups"]
    }


def test_the_account_of_the_pod_holds_the_role(objects: dict[str, Any], pod: dict[str, Any]):
    (subject,) = objects["ClusterRoleBinding"]["subjects"]
    account = objects["ServiceAccount"]["metadata"]

    assert pod["serviceAccountName"] == subject["name"] == account["name"]
    assert subject["namespace"] == account["namespace"] == "kube-system"
    assert (
        objects["ClusterRole"]["metadata"]["name"]
        == (objects["ClusterRoleBinding"]["roleRef"]["name"])
    )


@pytest.mark.parametrize("right", ["hostPID", "hostNetwork", "hostIPC"])
def test_the_pod_shares_no_namespace_of_the_host(pod: dict[str, Any], right: str):
    assert not pod.get(right)


def test_the_container_has_no_right_of_root(container: dict[str, Any]):
    context = container["securityContext"]

    assert not context["privileged"]
    assert not context["allowPrivilegeEscalation"]
    assert context["readOnlyRootFilesystem"]
    assert {"drop": ["ALL"]} == context["capabilities"]
    assert "RuntimeDefault" == context["seccompProfile"]["type"]


def test_only_these_paths_of_the_host_are_mounted(pod: dict[str, Any], container: dict[str, Any]):
    paths = {v["name"]: v["hostPath"]["path"] for v in pod["volumes"] if "hostPath" in v}
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}

    assert HOST_PATHS == set(paths.values())
    assert "/host/sys/fs/cgroup" == mounts.pop("cgroup")
    assert mounts == {"config": "/etc/hami-agent", "hami": "/etc/hami", "token": TOKEN} | {
        name: paths[name] for name in mounts if name in paths
    }


def test_what_the_agent_only_reads_it_cannot_write(container: dict[str, Any]):
    read_only = {m["name"] for m in container["volumeMounts"] if m.get("readOnly")}

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


def test_the_image_is_of_this_version(container: dict[str, Any]):
    assert f"hami-agent:{__version__}" == container["image"]


def test_the_probes_ask_the_port_that_is_open(container: dict[str, Any]):
    (port,) = container["ports"]
    asked = {kind: container[kind]["httpGet"] for kind in container if kind.endswith("Probe")}

    assert {"name": "http", "containerPort": 9394} == port
    assert {"http"} == {probe["port"] for probe in asked.values()}
    assert {
        "startupProbe": "/livez",
        "livenessProbe": "/livez",
        "readinessProbe": "/readyz?standby",
    } == {kind: probe["path"] for kind, probe in asked.items()}


def test_the_unit_starts_again_after_anything_but_refused_settings():
    unit = dict(re.findall(r"^(\w+)=(.*)$", tree.text("systemd/hami-agent.service"), re.MULTILINE))

    assert "notify" == unit["Type"]
    assert "always" == unit["Restart"]
    # Besides, where systemd itself cannot have the unit's group or user.
    assert "78 216 217" == unit["RestartPreventExitStatus"]
    assert "0" == unit["StartLimitIntervalSec"]


@pytest.mark.parametrize("name", ["ProtectClock", "PrivateDevices", "DeviceAllow", "DevicePolicy"])
def test_the_unit_has_no_line_that_takes_the_gpus_away(name: str):
    # Each makes a list of the devices that are allowed; ProtectClock= does before systemd 252.
    unit = tree.text("systemd/hami-agent.service")

    assert [] == re.findall(rf"^{name}=.*$", unit, re.MULTILINE)

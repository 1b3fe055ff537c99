"""Whatever the values: nothing is privileged, nothing of the host is to be had but named paths, and
a token is only where it is needed."""

import json
from pathlib import PurePosixPath

import pytest

from tests.chart.lab.helm import Helm, Object, container, host_paths, of_kind, pod_of, the
from tests.chart.lab.values import MATRIX, Values, values
from tests.fakes.explain_rig import EXPLAIN_RIGHTS

TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount"  # noqa: S105 -- where it is mounted
HOST_PATHS = {
    "device-plugins": "/var/lib/kubelet/device-plugins",
    "pod-resources": "/var/lib/kubelet/pod-resources",
    "state": "/var/lib/hami-agent",
    "run": "/run/hami-agent",
    "hook": "/usr/local/vgpu",
    "cgroup": "/sys/fs/cgroup",
}
ONLY_READ = {
    "cgroup",
    "config",
    "driver-root",
    "hami",
    "pod-resources",
    "token",
    "validations",
    "visible-devices",
}
PROFILE = {
    "privileged": False,
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
ROOTS = {"agent", "library", "vgpu-monitor"}
ANYBODY = {"namespaceSelector": {}}


@pytest.fixture(params=MATRIX)
def objects(helm: Helm, request: pytest.FixtureRequest) -> tuple[Object, ...]:
    return tuple(helm.objects(values(request.param)))


@pytest.fixture
def pods(objects: tuple[Object, ...]) -> list[Object]:
    jobs = [one["spec"]["template"]["spec"] for one in of_kind(objects, "Job").values()]
    return [pod_of(objects), *jobs]


def containers(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def test_every_container_has_no_right_of_root(pods: list[Object]):
    """And a bound of memory, and no pod a namespace of the host."""
    for pod in pods:
        assert set() == {"hostPID", "hostIPC", "hostNetwork", "hostUsers"} & set(pod)
        for one in containers(pod):
            assert PROFILE.items() <= one["securityContext"].items(), one["name"]
            assert "requests" in one["resources"], one["name"]
            assert "memory" in one["resources"]["limits"], one["name"]


def test_these_containers_are_root_and_no_others(pods: list[Object]):
    roots = {
        one["name"]
        for pod in pods
        for one in containers(pod)
        if one["securityContext"].get("runAsUser", pod["securityContext"].get("runAsUser", 0)) == 0
    }

    assert roots <= ROOTS
    for job in pods[1:]:
        context = job["securityContext"]
        assert (True, 65532) == (context["runAsNonRoot"], context["runAsUser"])


def test_who_waits_for_the_toolkit_is_not_root(helm: Helm):
    pod = pod_of(helm.objects(values("driver root")))
    one = container(pod, "toolkit")
    assert ["toolkit", "library"] == [each["name"] for each in pod["initContainers"]]
    context = one["securityContext"]

    assert (True, 65532) == (context["runAsNonRoot"], context["runAsUser"])
    assert [("validations", True)] == [(m["name"], m["readOnly"]) for m in one["volumeMounts"]]


def test_who_places_the_library_has_one_directory_of_the_host_and_no_gpu(helm: Helm):
    one = container(pod_of(helm.objects(values("least"))), "library")

    assert ["hook"] == [mount["name"] for mount in one["volumeMounts"]]
    assert [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}] == one["env"]


def test_no_pod_names_an_apparmor_profile_by_itself(objects: tuple[Object, ...]):
    # A node without AppArmor refuses a pod that names one, RuntimeDefault as well.
    for kind in ("DaemonSet", "Job"):
        for one in of_kind(objects, kind).values():
            assert "apparmor" not in json.dumps(one["spec"]["template"]).lower()


def test_an_operator_may_name_a_profile_of_apparmor_and_none_of_seccomp_is_lost(helm: Helm):
    wanted = {"appArmorProfile": {"type": "RuntimeDefault"}, "seLinuxOptions": {"type": "spc_t"}}
    pod = pod_of(helm.objects({**values("least"), "podSecurityContext": wanted}))

    assert {**wanted, "seccompProfile": {"type": "RuntimeDefault"}} == pod["securityContext"]


def test_only_what_is_allowed_is_writable(objects: tuple[Object, ...]):
    for one in containers(pod_of(objects)):
        written = {m["name"] for m in one["volumeMounts"] if not m.get("readOnly")}
        assert set() == written & ONLY_READ, one["name"]


def test_a_token_is_only_where_the_api_server_is_asked(objects: tuple[Object, ...]):
    pod = pod_of(objects)
    having = {
        one["name"]
        for one in containers(pod)
        if TOKEN in {mount["mountPath"] for mount in one["volumeMounts"]}
    }

    assert pod["automountServiceAccountToken"] is False
    assert "agent" in having
    assert having <= {"agent", "vgpu-monitor"}
    assert all(
        account["automountServiceAccountToken"] is False
        for account in of_kind(objects, "ServiceAccount").values()
    )


def test_the_host_gives_these_paths_and_no_others(helm: Helm):
    assert HOST_PATHS == host_paths(pod_of(helm.objects(values("least"))))


def test_the_hosts_tmp_and_root_are_never_mounted(objects: tuple[Object, ...]):
    paths = {PurePosixPath(path) for path in host_paths(pod_of(objects)).values()}

    assert set() == {str(path) for path in paths} & {"/", "/sys", "/var", "/run"}
    assert set() == {
        str(path)
        for path in paths - {PurePosixPath("/dev/null"), PurePosixPath("/etc/cdi")}
        for place in ("/tmp", "/var/tmp", "/etc", "/dev", "/proc", "/root", "/home")  # noqa: S108 -- HAMi's plugin mounts it
        if path.is_relative_to(place)
    }


def test_an_update_leaves_no_node_without_an_agent_that_waits(objects: tuple[Object, ...]):
    daemon_set = the(objects, "DaemonSet")["spec"]
    pod = daemon_set["template"]["spec"]
    (agent,) = (one for one in pod["containers"] if one["name"] == "agent")
    rolling = daemon_set["updateStrategy"].get("rollingUpdate")

    assert rolling in (None, {"maxSurge": "10%", "maxUnavailable": 0})
    assert "/readyz?standby" == agent["readinessProbe"]["httpGet"]["path"]
    assert not pod.get("hostNetwork")
    assert [] == [port for port in agent["ports"] if "hostPort" in port]


def test_nothing_listens_on_the_node_unless_asked_for(helm: Helm):
    services = of_kind(helm.objects(values("least")), "Service")

    assert {"agent-hami-agent": "ClusterIP"} == {
        name: service["spec"]["type"] for name, service in services.items()
    }


def policy(helm: Helm, given: Values, end: str = "") -> Object:
    found: Object = of_kind(helm.objects(given), "NetworkPolicy")[f"agent-hami-agent{end}"]["spec"]
    return found


def test_metrics_are_for_those_whom_the_network_policy_names(helm: Helm):
    (rule,) = policy(helm, values("least"))["ingress"]
    theirs = {**values("least"), "networkPolicy": {"namespaces": ["mine"], "from": [ANYBODY]}}
    (other,) = policy(helm, theirs)["ingress"]
    mine, monitoring = rule["from"]

    # Of its own namespace, and of those that the values name.
    assert {"podSelector": {}} == mine == other["from"][0]
    assert [{"port": "http"}] == rule["ports"] == other["ports"]
    assert {"monitoring", "openshift-monitoring"} <= set(namespaces(monitoring))
    assert (["mine"], ANYBODY) == (namespaces(other["from"][1]), other["from"][2])


def namespaces(peer: Object) -> list[str]:
    """Those of a peer that names them by the label that the API server sets itself."""
    (only,) = peer["namespaceSelector"]["matchExpressions"]
    assert ("kubernetes.io/metadata.name", "In") == (only["key"], only["operator"])
    found: list[str] = only["values"]
    return found


def test_values_that_are_taken_away_are_empty(helm: Helm):
    without = {**values("least"), "networkPolicy": {"namespaces": None}, "podSecurityContext": None}

    nobody = {**values("least"), "networkPolicy": {"namespaces": []}}

    for given in (without, nobody):
        assert [{"podSelector": {}}] == policy(helm, given)["ingress"][0]["from"]
    assert PROFILE["seccompProfile"] == pod_of(helm.objects(without))["securityContext"].get(
        "seccompProfile"
    )
    assert "\n  gpu-system\n" in helm.notes(without, "1.36")


def test_the_network_policy_is_for_the_agents_and_all_of_them(objects: tuple[Object, ...]):
    policies = of_kind(objects, "NetworkPolicy")
    agents = the(objects, "DaemonSet")
    labels = agents["spec"]["template"]["metadata"]["labels"]

    assert agents["metadata"]["name"] in policies
    found = policies[agents["metadata"]["name"]]
    assert agents["spec"]["selector"] == found["spec"]["podSelector"]
    assert agents["metadata"]["namespace"] == found["metadata"]["namespace"]
    assert agents["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_one_value_takes_all_network_policies_away(helm: Helm):
    objects = helm.objects({**values("monitor"), "networkPolicy": {"enabled": False}})

    assert {} == of_kind(objects, "NetworkPolicy")


@pytest.mark.parametrize("end", ["", "-uninstall"])
def test_no_way_out_is_closed_unless_the_api_servers_ports_are_named(helm: Helm, end: str):
    for row in MATRIX:
        if not MATRIX[row].get("networkPolicy", {}).get("apiServerPorts"):
            for name, one in of_kind(helm.objects(values(row)), "NetworkPolicy").items():
                assert ["Ingress"] == one["spec"]["policyTypes"], name
                assert "egress" not in one["spec"], name
    named = policy(helm, values("guarded"), end)

    assert ["Ingress", "Egress"] == named["policyTypes"]
    ports = [{"port": 443, "protocol": "TCP"}, {"port": 16443, "protocol": "TCP"}]
    assert [{"ports": ports}] == named["egress"]


def test_a_port_that_is_opened_on_every_node_is_not_closed_again(helm: Helm):
    monitor = {"devicePlugin": {"monitor": {"enabled": True}}}
    (closed,) = policy(helm, {**values("least"), **monitor})["ingress"]
    named, anybody = policy(helm, values("monitor"))["ingress"]

    assert [{"port": "http"}, {"port": "monitor"}] == named["ports"] == closed["ports"]
    assert {"ports": [{"port": "monitor"}]} == anybody


def test_nobody_connects_to_who_cleans_up(helm: Helm):
    objects = helm.objects(values("least"))
    both = of_kind(objects, "NetworkPolicy")
    job = both["agent-hami-agent-uninstall"]
    labels = the(objects, "Job")["spec"]["template"]["metadata"]["labels"]

    assert 2 == len(both)
    assert job["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    agents = the(objects, "DaemonSet")["spec"]["selector"]["matchLabels"]
    assert not agents.items() <= labels.items()  # it is not taken for an agent
    assert [] == job["spec"]["ingress"]
    assert "post-delete" == job["metadata"]["annotations"]["helm.sh/hook"]


def test_who_cleans_up_is_confined_before_it_may_do_anything(helm: Helm):
    weights: dict[int, set[str]] = {}
    for one in helm.objects(values("guarded")):
        notes = one["metadata"].get("annotations", {})
        if "helm.sh/hook" in notes:
            weights.setdefault(int(notes["helm.sh/hook-weight"]), set()).add(one["kind"])
            gone = set(notes["helm.sh/hook-delete-policy"].split(","))
            # One that failed shows its log, and is in nobody's way.
            kept = set() if one["kind"] == "Job" else {"hook-failed"}
            assert {"before-hook-creation", "hook-succeeded"} | kept == gone

    assert {
        -2: {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"},
        -1: {
            *("ClusterRole", "ClusterRoleBinding", "NetworkPolicy"),
            *("Role", "RoleBinding", "ServiceAccount"),
        },
        0: {"Job"},
    } == weights


def test_who_cleans_up_may_do_nothing_else(helm: Helm):
    objects = helm.objects(values("least"))
    role, inside = of_kind(objects, "ClusterRole"), the(objects, "Role")
    hooks = {
        one["metadata"]["annotations"]["helm.sh/hook"]
        for one in objects
        if one["metadata"]["name"] == "agent-hami-agent-uninstall"
    }

    assert [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "patch"]},
        {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]},
    ] == role["agent-hami-agent-uninstall"]["rules"]
    assert [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}] == inside["rules"]
    assert {"post-delete"} == hooks


def test_who_explains_may_read_and_is_bound_to_nobody(helm: Helm):
    objects = helm.objects(values("least"))
    role = of_kind(objects, "ClusterRole")["agent-hami-agent-explain"]
    granted = {
        (verb, resource)
        for rule in role["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
    }
    bound = {one["roleRef"]["name"] for one in objects if "roleRef" in one}

    assert EXPLAIN_RIGHTS == granted
    assert role["metadata"]["name"] not in bound


def test_the_driver_root_brings_no_right_to_device_files(helm: Helm):
    pod = pod_of(helm.objects(values("driver root")))
    mounts = {m["name"]: m for m in container(pod)["volumeMounts"]}

    assert "/run/nvidia/driver" == host_paths(pod)["driver-root"]
    assert ("/driver-root", True) == (
        mounts["driver-root"]["mountPath"],
        mounts["driver-root"]["readOnly"],
    )

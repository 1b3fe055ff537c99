"""Whatever the values: nothing is privileged, nothing of the host is to be had but named paths, and
a token is only where it is needed."""

from pathlib import PurePosixPath

import pytest

from tests.chart.lab.helm import Helm, Object, container, host_paths, of_kind, pod_of, the
from tests.chart.lab.values import MATRIX, values

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


@pytest.fixture(params=MATRIX)
def objects(helm: Helm, request: pytest.FixtureRequest) -> tuple[Object, ...]:
    return tuple(helm.objects(values(request.param)))


@pytest.fixture
def pods(objects: tuple[Object, ...]) -> list[Object]:
    jobs = [one["spec"]["template"]["spec"] for one in of_kind(objects, "Job").values()]
    return [pod_of(objects), *jobs]


def containers(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def test_no_pod_shares_a_namespace_of_the_host(pods: list[Object]):
    for pod in pods:
        assert set() == {"hostPID", "hostIPC", "hostNetwork", "hostUsers"} & set(pod)


def test_every_container_has_no_right_of_root(pods: list[Object]):
    for one in (one for pod in pods for one in containers(pod)):
        assert PROFILE.items() <= one["securityContext"].items(), one["name"]


def test_what_needs_no_sockets_of_the_kubelet_is_not_root(objects: tuple[Object, ...]):
    for job in of_kind(objects, "Job").values():
        context = job["spec"]["template"]["spec"]["securityContext"]
        assert (True, 65532) == (context["runAsNonRoot"], context["runAsUser"])


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
        for path in paths - {PurePosixPath("/dev/null")}
        for place in ("/tmp", "/var/tmp", "/etc", "/dev", "/proc", "/root", "/home")  # noqa: S108 -- HAMi's plugin mounts it
        if path.is_relative_to(place)
    }


def test_two_agents_never_meet_on_one_node(objects: tuple[Object, ...]):
    strategy = the(objects, "DaemonSet")["spec"]["updateStrategy"]

    assert 0 == (strategy.get("rollingUpdate") or {"maxSurge": 0})["maxSurge"]


def test_nothing_listens_on_the_node_unless_asked_for(helm: Helm):
    services = of_kind(helm.objects(values("least")), "Service")

    assert {"agent-hami-agent": "ClusterIP"} == {
        name: service["spec"]["type"] for name, service in services.items()
    }


def test_metrics_are_for_those_whom_the_network_policy_names(helm: Helm):
    nobody = of_kind(helm.objects(values("guarded")), "NetworkPolicy")["agent-hami-agent"]["spec"]
    some = of_kind(helm.objects(values("monitor")), "NetworkPolicy")["agent-hami-agent"]["spec"]

    assert ["Ingress", "Egress"] == nobody["policyTypes"] == some["policyTypes"]
    assert [] == nobody["ingress"]
    assert [
        {
            "from": [{"namespaceSelector": {}}],
            "ports": [{"port": "http"}, {"port": "monitor"}],
        }
    ] == some["ingress"]
    assert [{"port": 443, "protocol": "TCP"}, {"port": 6443, "protocol": "TCP"}] == [
        port for rule in some["egress"] for port in rule["ports"]
    ]


def test_who_cleans_up_reaches_the_api_server_and_nothing_else(helm: Helm):
    objects = helm.objects(values("guarded"))
    both = of_kind(objects, "NetworkPolicy")
    agents, job = (both[f"agent-hami-agent{end}"] for end in ("", "-uninstall"))
    labels = the(objects, "Job")["spec"]["template"]["metadata"]["labels"]

    assert 2 == len(both)
    assert job["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert ["Ingress", "Egress"] == job["spec"]["policyTypes"]
    assert [] == job["spec"]["ingress"]
    assert agents["spec"]["egress"] == job["spec"]["egress"]
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
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "patch"]},
        {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]},
    ] == role["agent-hami-agent-uninstall"]["rules"]
    assert [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}] == inside["rules"]
    assert {"post-delete"} == hooks


def test_who_cleans_up_is_not_taken_for_an_agent(helm: Helm):
    objects = helm.objects(values("least"))
    selector = the(objects, "DaemonSet")["spec"]["selector"]["matchLabels"]
    labels = the(objects, "Job")["spec"]["template"]["metadata"]["labels"]

    assert not selector.items() <= labels.items()


def test_the_driver_root_brings_no_right_to_device_files(helm: Helm):
    pod = pod_of(helm.objects(values("driver root")))
    mounts = {m["name"]: m for m in container(pod)["volumeMounts"]}

    assert "/run/nvidia/driver" == host_paths(pod)["driver-root"]
    assert ("/driver-root", True) == (
        mounts["driver-root"]["mountPath"],
        mounts["driver-root"]["readOnly"],
    )

"""Whatever the values: nothing is privileged, nothing of the host is to be had but named paths, and
a token is only where it is needed."""

import json
from pathlib import PurePosixPath

import pytest

from tests.chart.lab.helm import Helm, Object, host_paths, of_kind, pod_of, the
from tests.chart.lab.values import LEAST, MATRIX, values
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


@pytest.fixture(params=MATRIX)
def objects(helm: Helm, request: pytest.FixtureRequest) -> tuple[Object, ...]:
    return tuple(helm.objects(values(request.param)))


@pytest.fixture
def pods(objects: tuple[Object, ...]) -> list[Object]:
    jobs = [one["spec"]["template"]["spec"] for one in of_kind(objects, "Job").values()]
    return [pod_of(objects), *jobs]


def containers(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def test_every_container_has_no_right_of_root(pods):
    """And a bound of memory, and no pod a namespace of the host."""
    for pod in pods:
        assert set() == {"hostPID", "hostIPC", "hostNetwork", "hostUsers"} & set(pod)
        for one in containers(pod):
            assert PROFILE.items() <= one["securityContext"].items(), one["name"]
            assert "requests" in one["resources"], one["name"]
            assert "memory" in one["resources"]["limits"], one["name"]


def test_these_containers_are_root_and_no_others(pods):
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


def test_only_what_is_allowed_is_writable_and_no_pod_names_an_apparmor_profile(objects):
    for one in containers(pod_of(objects)):
        written = {m["name"] for m in one["volumeMounts"] if not m.get("readOnly")}
        assert set() == written & ONLY_READ, one["name"]
    # A node without AppArmor refuses a pod that names a profile, RuntimeDefault as well.
    pods = [one for kind in ("DaemonSet", "Job") for one in of_kind(objects, kind).values()]
    assert "apparmor" not in json.dumps([one["spec"]["template"] for one in pods]).lower()


def test_a_token_is_only_where_the_api_server_is_asked(objects):
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


def test_the_host_gives_these_paths_and_no_others(helm):
    assert HOST_PATHS == host_paths(pod_of(helm.objects(values("least"))))


def test_the_hosts_tmp_and_root_are_never_mounted(objects):
    paths = {PurePosixPath(path) for path in host_paths(pod_of(objects)).values()}

    assert set() == {str(path) for path in paths} & {"/", "/sys", "/var", "/run"}
    assert set() == {
        str(path)
        for path in paths - {PurePosixPath("/dev/null"), PurePosixPath("/etc/cdi")}
        for place in ("/tmp", "/var/tmp", "/etc", "/dev", "/proc", "/root", "/home")  # noqa: S108 -- HAMi's plugin mounts it
        if path.is_relative_to(place)
    }


def test_an_update_leaves_no_node_without_an_agent_that_waits(objects):
    daemon_set = the(objects, "DaemonSet")["spec"]
    pod = daemon_set["template"]["spec"]
    (agent,) = (one for one in pod["containers"] if one["name"] == "agent")
    rolling = daemon_set["updateStrategy"].get("rollingUpdate")

    assert rolling in (None, {"maxSurge": "10%", "maxUnavailable": 0})
    assert "/readyz?standby" == agent["readinessProbe"]["httpGet"]["path"]
    assert not pod.get("hostNetwork")
    assert [] == [port for port in agent["ports"] if "hostPort" in port]


def test_the_network_policy_is_for_the_agents_and_all_of_them(objects):
    policies = of_kind(objects, "NetworkPolicy")
    agents = the(objects, "DaemonSet")
    labels = agents["spec"]["template"]["metadata"]["labels"]

    assert agents["metadata"]["name"] in policies
    found = policies[agents["metadata"]["name"]]
    assert agents["spec"]["selector"] == found["spec"]["podSelector"]
    assert agents["metadata"]["namespace"] == found["metadata"]["namespace"]
    assert agents["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_who_explains_may_read_and_is_bound_to_nobody(helm):
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


@pytest.mark.parametrize("mode", [{}, {"takeover": True}, {"observe": True}], ids=str)
@pytest.mark.parametrize("given", [[], [{"topologyKey": "an-operators"}]], ids=len)
def test_agents_keep_off_nodes_of_another_plugin_but_where_they_are_to_meet_it(helm, mode, given):
    how, hamis = "requiredDuringSchedulingIgnoredDuringExecution", "hami-device-plugin"
    affinity = {"podAntiAffinity": {how: given}} if given else {}

    pod = pod_of(helm.objects({**LEAST, "affinity": affinity, **mode}))

    terms = pod.get("affinity", {}).get("podAntiAffinity", {}).get(how, [])
    assert given == terms[: len(given)]
    assert (not mode) == (hamis in json.dumps(terms))

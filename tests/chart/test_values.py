"""A value means what it says; HAMi's names mean what they mean in HAMi's chart."""

import json

import pytest
import yaml

from agent.ledger import SourceFile
from agent.settings.reading import Sources, make_plan
from tests.chart.lab.helm import (
    CHART,
    Helm,
    Object,
    container,
    environment,
    host_paths,
    of_kind,
    pod_of,
    the,
)
from tests.chart.lab.values import LEAST, MATRIX, values

NAME = "agent-hami-agent"
POLICIES = ["events", "node", "pods", "uninstall"]


def own_file(objects: tuple[Object, ...], name: str = NAME) -> str:
    text: str = of_kind(objects, "ConfigMap")[name]["data"]["config.yaml"]
    return text


def written(text: str) -> dict[str, object]:
    plan = make_plan(Sources(own=SourceFile("c", text.encode())))
    return {one.field.key: one.value for one in plan.base}


@pytest.mark.parametrize("name", MATRIX)
def test_the_agent_takes_its_file_whatever_the_values(helm: Helm, name: str):
    objects = helm.objects(values(name))
    full = the(objects, "DaemonSet")["metadata"]["name"]
    (mounted,) = [
        volume["configMap"]["name"]
        for volume in pod_of(objects)["volumes"]
        if volume["name"] == "config"
    ]
    text = own_file(tuple(objects), mounted)

    assert full == mounted
    make_plan(Sources(own=SourceFile("config.yaml", text.encode()))).resolve()


def test_hamis_names_are_the_agents_settings(helm: Helm):
    found = written(own_file(tuple(helm.objects(values("hami")))))

    assert {
        "sharing.resourceName": "example.com/gpu",
        "sharing.memoryResourceName": "example.com/gpumem",
        "sharing.memoryPercentResourceName": "example.com/gpumem-percentage",
        "sharing.coreResourceName": "example.com/gpucores",
        "allocation.schedulerName": "our-scheduler",
        "sharing.splitCount": 20,
        "sharing.memoryScaling": 1.5,
        "sharing.coreScaling": 2.0,
        "sharing.preconfiguredMemoryMiB": 1024,
        "sharing.numaTopology": False,
        "allocation.passDeviceSpecs": True,
        "allocation.deviceListStrategy": ("envvar", "cdi-cri"),
        "allocation.gdrcopy": True,
        "allocation.gds": False,
        "allocation.mofed": True,
        "library.corePolicy": "force",
        "library.cudaLogLevel": "2",
        "library.disableCoreLimit": False,
    } == found


CDI_DEFAULT = ["/etc/cdi", "/var/run/cdi"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, []),
        ({"devicePlugin": {"deviceListStrategy": "volume-mounts"}}, []),
        ({"devicePlugin": {"deviceListStrategy": "envvar,cdi-annotations"}}, CDI_DEFAULT),
        ({"config": {"allocation": {"deviceListStrategy": ["cdi-cri"]}}}, CDI_DEFAULT),
        (
            {
                "config": {
                    "allocation": {
                        "deviceListStrategy": ["cdi-cri"],
                        "cdiSpecDirs": ["/var/cdi/static"],
                    }
                }
            },
            ["/var/cdi/static"],
        ),
        (
            {
                "config": {
                    "profiles": [
                        {
                            "name": "a",
                            "match": {"nodes": ["a"]},
                            "allocation": {"deviceListStrategy": ["cdi-cri"]},
                        }
                    ]
                }
            },
            CDI_DEFAULT,
        ),
        ({"devicePlugin": {"extraEnvs": {"DEVICE_LIST_STRATEGY": "cdi-cri"}}}, CDI_DEFAULT),
        ({"extraArgs": ["--device-list-strategy=cdi-cri"]}, CDI_DEFAULT),
    ],
)
def test_the_directories_of_cdi_specifications_are_mounted_where_a_strategy_needs_them(
    helm: Helm, given: dict[str, object], expected: list[str]
):
    pod = pod_of(tuple(helm.objects({**values("least"), **given})))
    volumes = {one["name"]: one.get("hostPath") for one in pod["volumes"]}
    mounts = [
        (one["mountPath"], one.get("readOnly"), volumes[one["name"]])
        for one in container(pod, "agent")["volumeMounts"]
        if one["name"].startswith("cdi-")
    ]

    create = "DirectoryOrCreate"
    assert [(one, True, {"path": one, "type": create}) for one in expected] == mounts


def test_a_scaling_may_be_a_text_as_helms_set_gives_a_fraction(helm: Helm):
    """Of HAMi's names, of the agent's own, and of a profile."""
    scales = ("devicePlugin.deviceMemoryScaling", "devicePlugin.deviceCoreScaling")
    own = ("config.sharing.memoryScaling", "config.sharing.coreScaling")
    for names in (scales, own):
        given = ["image.repository=kept", f"{names[0]}=1.5", f"{names[1]}=0.05"]
        found = written(own_file(tuple(helm.told("agent", CHART, given))))
        assert {"sharing.memoryScaling": 1.5, "sharing.coreScaling": 0.05} == found

    profile = ["name=p", "match.nodes[0]=a", "sharing.memoryScaling=1.5", "sharing.splitCount=7"]
    given = ["image.repository=kept", *(f"config.profiles[0].{one}" for one in profile)]
    (one,) = yaml.safe_load(own_file(tuple(helm.told("agent", CHART, given))))["profiles"]
    assert {"memoryScaling": 1.5, "splitCount": 7} == one["sharing"]


def test_what_is_not_said_is_left_to_hamis_files(helm: Helm):
    assert {} == written(own_file(tuple(helm.objects(values("least")))))


def test_the_agents_own_words_win_over_hamis(helm: Helm):
    found = written(own_file(tuple(helm.objects(values("settings")))))

    assert {"sharing.splitCount": 3, "sharing.memoryScaling": 2.0} == found


def sources(objects: tuple[Object, ...]) -> dict[str, str]:
    projected = [v["projected"] for v in pod_of(objects)["volumes"] if v["name"] == "hami"]
    maps = [source["configMap"] for one in projected for source in one["sources"]]
    assert all(one["optional"] for one in maps)
    return {item["path"]: one["name"] for one in maps for item in one["items"]}


def test_hamis_files_are_those_of_its_release(helm: Helm):
    theirs = {"nodeConfiguration": {"config": "{}", "externalConfigName": "theirs"}}
    external = tuple(helm.objects({**values("least"), "devicePlugin": theirs}))

    assert {
        "device-config.yaml": "hami-scheduler-device",
        "config.json": "hami-device-plugin",
    } == sources(tuple(helm.objects(values("least"))))
    assert {} == sources(tuple(helm.objects(values("no hami"))))
    assert "theirs" == sources(external)["config.json"]
    assert f"{NAME}-hami" not in of_kind(external, "ConfigMap")


def test_own_files_take_their_place(helm: Helm):
    objects = tuple(helm.objects(values("hami")))
    held = of_kind(objects, "ConfigMap")[f"{NAME}-hami"]["data"]

    assert {"device-config.yaml": f"{NAME}-hami", "config.json": f"{NAME}-hami"} == sources(objects)
    assert {"nvidia": {"deviceSplitCount": 7}} == yaml.safe_load(held["device-config.yaml"])
    assert {"nodeconfig": [{"name": "a"}]} == json.loads(held["config.json"])


def test_the_driver_comes_through_the_runtime(helm: Helm):
    pod = pod_of(helm.objects(values("runtime")))
    variables = environment(container(pod))

    assert "nvidia" == pod["runtimeClassName"]
    assert ("all", "utility") == (
        variables["NVIDIA_VISIBLE_DEVICES"],
        variables["NVIDIA_DRIVER_CAPABILITIES"],
    )
    assert "void" == environment(container(pod, "library"))["NVIDIA_VISIBLE_DEVICES"]


@pytest.mark.parametrize("name", ["agent", "vgpu-monitor"])
def test_a_runtime_that_heeds_no_variable_is_told_by_a_mount(helm: Helm, name: str):
    monitor = {"devicePlugin": {"monitor": {"enabled": True}}}
    driver = {"driver": {"visibleDevices": "volume-mounts"}}
    told, untold = ({**values("least"), **monitor, **more} for more in (driver, {}))
    pod = pod_of(helm.objects(told))
    one = container(pod, name)
    mounts = {mount["name"]: mount for mount in one["volumeMounts"]}

    assert "/var/run/nvidia-container-devices" == environment(one)["NVIDIA_VISIBLE_DEVICES"]
    assert "/var/run/nvidia-container-devices/all" == mounts["visible-devices"]["mountPath"]
    assert "/dev/null" == host_paths(pod)["visible-devices"]
    assert "visible-devices" not in host_paths(pod_of(helm.objects(untold)))


def test_who_may_read_at_the_port_is_chosen_by_a_value(helm: Helm):
    def readers(given: dict[str, object]) -> str | None:
        pod = pod_of(helm.objects({**values("least"), **given}))
        return environment(container(pod)).get("HAMI_AGENT_WEB_READERS")

    assert readers({}) is None
    assert "all" == readers({"web": {"readers": "all"}})


def test_the_monitor_keeps_its_port_and_the_agent_gives_way(helm: Helm):
    objects = helm.objects(values("monitor"))
    pod, services = pod_of(objects), of_kind(objects, "Service")
    ports = {p["name"]: p["containerPort"] for one in pod["containers"] for p in one["ports"]}

    assert {"http": 9395, "monitor": 9394} == ports
    assert "9395" == environment(container(pod))["HAMI_AGENT_WEB_PORT"]
    assert "false" == environment(container(pod))["HAMI_AGENT_USAGE_FEEDBACK"]
    assert "none" == environment(container(pod))["HAMI_AGENT_METRICS_HAMI"]
    assert "/usr/local/vgpu" == environment(container(pod, "vgpu-monitor"))["HOOK_PATH"]
    assert ("NodePort", 31992, "monitor") == (
        services[f"{NAME}-monitor"]["spec"]["type"],
        services[f"{NAME}-monitor"]["spec"]["ports"][0]["nodePort"],
        services[f"{NAME}-monitor"]["spec"]["ports"][0]["targetPort"],
    )


def test_hamis_port_is_the_agents_where_there_is_no_monitor(helm: Helm):
    ports = {"devicePlugin": {"service": {"type": "NodePort"}}}
    objects = helm.objects({**LEAST, **ports})
    rules = of_kind(objects, "NetworkPolicy")[NAME]["spec"]["ingress"]
    port = {"name": "monitorport", "port": 31992, "targetPort": "http", "nodePort": 31992}

    assert port in of_kind(objects, "Service")[f"{NAME}-monitor"]["spec"]["ports"]
    assert {"ports": [{"port": "http"}]} in rules
    assert "HAMI_AGENT_METRICS_HAMI" not in environment(container(pod_of(objects)))


@pytest.mark.parametrize("more", [{"config": {"metrics": {"hami": "none"}}}, {"observe": True}])
def test_no_port_is_opened_where_hamis_series_are_not_served(helm: Helm, more: dict[str, object]):
    ports = {"devicePlugin": {"service": {"type": "NodePort"}}}

    assert [NAME] == list(of_kind(helm.objects({**LEAST, **ports, **more}), "Service"))


@pytest.mark.parametrize(
    ("name", "hook", "plugins", "resources"),
    [
        ("elsewhere", "/opt/hami", "/data/kubelet/device-plugins", "/data/kubelet/pod-resources"),
        (
            *("rooted elsewhere", "/usr/local"),
            *("/var/lib/kubelet/device-plugins", "/data/root/pod-resources"),
        ),
    ],
)
def test_other_directories_have_one_name_inside_and_outside(
    helm: Helm, name: str, hook: str, plugins: str, resources: str
):
    pod = pod_of(helm.objects(values(name)))
    one = container(pod)
    mounts = {mount["name"]: mount["mountPath"] for mount in one["volumeMounts"]}
    variables = environment(one)

    places = {"hook": f"{hook}/vgpu", "device-plugins": plugins, "pod-resources": resources}
    assert places.items() <= mounts.items()
    assert places.items() <= host_paths(pod).items()
    assert hook == variables.get("HOOK_PATH", "/usr/local")
    usual = None if plugins.startswith("/var/lib") else f"{plugins}/kubelet.sock"
    assert usual == variables.get("HAMI_AGENT_PATHS_KUBELET_SOCKET")
    assert f"{resources}/kubelet.sock" == variables["HAMI_AGENT_PATHS_POD_RESOURCES_SOCKET"]
    assert f"{hook}/vgpu" == container(pod, "library")["args"][-1]


def test_other_plugins_are_kept_away_beside_what_the_operator_wants(helm: Helm):
    wants = pod_of(helm.objects(values("guarded")))["affinity"]["podAntiAffinity"]
    terms = wants["requiredDuringSchedulingIgnoredDuringExecution"]

    assert [
        {"app": "mine"},
        {"app.kubernetes.io/component": "hami-device-plugin"},
        {"app.kubernetes.io/name": "nvidia-device-plugin"},
        {"app": "nvidia-device-plugin-daemonset"},
    ] == [term["labelSelector"]["matchLabels"] for term in terms]


def test_who_observes_places_nothing_and_is_beside_other_plugins(helm: Helm):
    pod = pod_of(helm.objects({**values("observed"), "extraArgs": ["--simulate=h100:8"]}))
    one = container(pod)

    assert ["run", "--observe", "--simulate=h100:8"] == one["args"]
    assert "9395" == environment(one)["HAMI_AGENT_WEB_PORT"]
    assert ["agent"] == [
        one["name"] for one in (*pod.get("initContainers", ()), *pod["containers"])
    ]
    assert not pod["affinity"]
    # Alone it would take any port that is free if nobody named one.
    alone = container(pod_of(helm.objects({**LEAST, "observe": True})))
    assert "9394" == environment(alone)["HAMI_AGENT_WEB_PORT"]
    assert 9394 == alone["ports"][0]["containerPort"]


@pytest.mark.parametrize(("kubernetes", "count"), [("1.26", 0), ("1.29.9", 0), ("1.30", 4)])
def test_the_policies_are_there_where_kubernetes_has_them(helm: Helm, kubernetes: str, count: int):
    objects = helm.objects(values("least"), kubernetes)
    names = sorted(of_kind(objects, "ValidatingAdmissionPolicy"))
    bound = {
        one["spec"]["policyName"]
        for one in of_kind(objects, "ValidatingAdmissionPolicyBinding").values()
    }

    assert [f"{NAME}-{name}" for name in POLICIES][: count or 0] == names
    assert set(names) == bound


def test_the_policies_are_about_the_account_of_the_pod(helm: Helm):
    objects = helm.objects(values("names"))
    agents = pod_of(objects)["serviceAccountName"]
    jobs = the(objects, "Job")["spec"]["template"]["spec"]["serviceAccountName"]
    conditions = {
        name: policy["spec"]["matchConditions"][0]["expression"]
        for name, policy in of_kind(objects, "ValidatingAdmissionPolicy").items()
    }

    assert ("gpu-account", "gpus-uninstall") == (agents, jobs)
    is_from = 'request.userInfo.username == "system:serviceaccount:elsewhere:'
    assert {
        f"gpus-{name}": f'{is_from}{jobs if name == "uninstall" else agents}"' for name in POLICIES
    } == conditions


def test_an_account_of_somebody_else_gets_no_rights_here(helm: Helm):
    objects = helm.objects(values("foreign account"))

    assert "present" == pod_of(objects)["serviceAccountName"]
    assert {"DaemonSet", "ConfigMap", "NetworkPolicy"} == {one["kind"] for one in objects}


def test_the_notes_say_what_is_missing(helm: Helm):
    old, new = helm.notes(values("least"), "1.29"), helm.notes(values("monitor"), "1.36")

    assert "31992" in old
    assert "older than 1.30" in old
    assert "labels, taints" in old
    assert "31992" not in new
    assert "older than" not in new
    assert "With observe=false they serve" in helm.notes(values("observed"), "1.36")


def test_the_notes_say_who_may_scrape_and_what_lets_another_one_in(helm: Helm):
    notes = helm.notes(values("monitor"), "1.36")
    told = notes[notes.index("\n  networkPolicy:") :]
    found = helm.objects({**values("monitor"), **yaml.safe_load(told)})
    rules = of_kind(found, "NetworkPolicy")[NAME]["spec"]["ingress"]
    off = {**values("monitor"), "networkPolicy": {"enabled": False}}

    assert "\n  gpu-system, cattle-monitoring-system, " in notes
    assert "serviceMonitor.enabled=true does not let a Prometheus in" in notes
    assert "serviceMonitor" not in helm.notes(values("least"), "1.36")
    # Who was let in stays so, and NAME comes in.
    assert [
        {"namespaceSelector": {}},
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "NAME"}}},
    ] == rules[0]["from"][2:]
    assert "etworkPolic" not in helm.notes(off, "1.36")


def test_the_right_to_a_condition_comes_with_the_setting_alone(helm: Helm):
    def rights(given: dict[str, object]) -> list[str]:
        role = of_kind(helm.objects({**values("least"), **given}), "ClusterRole")[NAME]
        return [name for rule in role["rules"] for name in rule["resources"]]

    assert "nodes/status" not in rights({})
    assert "nodes/status" in rights({"config": {"report": {"nodeCondition": True}}})

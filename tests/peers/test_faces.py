"""What people and programs meet at a real API server: commands of the documents, rights, series.

First what the documents tell to type with kubectl, as it stands there. There is no kubelet: what
waits for a container is not typed here.
"""

import asyncio
import os
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from agent import cluster as annotations
from agent.ledger import container_directory
from agent.model import MIB
from agent.sandbox.hami_core import HAMI_2_9_0, HamiCoreRegion
from tests.chart.lab.helm import CHART, Helm, of_kind
from tests.peers.lab.agents import RESOURCE, SOURCE
from tests.peers.lab.api import STRATEGIC
from tests.peers.lab.cluster import Cluster, kept
from tests.peers.lab.faces import page
from tests.peers.lab.grants import expected_environment, grants
from tests.peers.lab.guarded import COLLECTIONS, IN_FORCE, open_guarded
from tests.peers.lab.identities import ADMIN, NODE
from tests.peers.lab.node_state import gpu_uuids, notes_of
from tests.peers.lab.placement import now
from tests.peers.lab.pods import a_container, a_pod, as_seen, key, run, until_settled
from tests.peers.lab.servers import NODE_PATH, NODES, OTHER_NODE, OWN_POD, PODS, marks, real_server
from tests.peers.lab.site import NAMESPACE as SITE_NAMESPACE
from tests.peers.lab.space import until, until_answer
from tests.shape.typed import runs_of

BLOCKS = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SYSTEM = "/api/v1/namespaces/kube-system"
APPS = "/apis/apps/v1/namespaces/kube-system/daemonsets"
PATIENCE = 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(binaries):
    async with kept(real_server(binaries)) as made:
        yield made


@pytest.fixture
def typed(server, binaries, tmp_path):
    """Types a line of a document in the repository's root, and returns what it says."""
    environ = {
        "PATH": f"{binaries}:{os.defpath}",
        "HOME": str(tmp_path),
        "KUBECONFIG": str(server.plane.kubeconfig(ADMIN)),
    }

    async def type_line(line):
        shell = await asyncio.create_subprocess_exec(
            *("/bin/bash", "-euo", "pipefail", "-c", line),
            cwd=SOURCE,
            env=environ,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(PATIENCE):
            out, err = await shell.communicate()
        assert 0 == shell.returncode, err.decode()
        return out.decode()

    return type_line


def lines(document):
    """The lines of its blocks, those that go on put together."""
    found = BLOCKS.findall((SOURCE / document).read_text())
    text = "".join(block for language, block in found if language in {"", "sh"})
    return text.replace("\\\n", " ").splitlines()


def line(document, *words):
    """The one line with all these words."""
    (found,) = [one for one in lines(document) if all(word in one for word in words)]
    return found


async def names(server, path):
    return {one["metadata"]["name"] for one in (await server.admin.have("GET", path))["items"]}


async def until_gone(server, path, name):
    async def is_gone():
        return name not in await names(server, path)

    await until_answer(is_gone, PATIENCE, lambda: f"{name} is still there")


OWN = ("hami",)
"""`kubectl hami` is this program itself, by kubectl's way with plugins."""


@pytest.mark.parametrize("words", [one for one in runs_of("kubectl") if one != OWN], ids=" ".join)
async def test_kubectl_has_the_command_and_its_flags(typed, words):
    said = await typed(shlex.join(("kubectl", *words, "--help")))

    (usage,) = re.findall(r"^Usage:\n  kubectl ([\w-]+)", said, re.MULTILINE)
    assert usage in words


async def test_the_manifests_are_applied_started_anew_and_deleted(server, typed):
    await typed(line("GUIDE.md", "kubectl apply -f deploy/manifests"))
    before = await server.admin.have("GET", f"{APPS}/hami-agent")
    assert "hami-agent" in await names(server, f"{SYSTEM}/serviceaccounts")

    await typed(line("GUIDE.md", "rollout restart"))
    after = await server.admin.have("GET", f"{APPS}/hami-agent")
    assert after["metadata"]["generation"] == before["metadata"]["generation"] + 1

    text = (SOURCE / "GUIDE.md").read_text()
    (delete,) = re.findall(r"`(kubectl delete -f deploy/manifests)`", text)
    await typed(delete)
    assert "hami-agent" not in await names(server, APPS)


async def test_the_doctor_is_sent_to_a_node_and_leaves_nothing(server, typed):
    send = line("GUIDE.md", "deploy/doctor.yaml", "kubectl apply")

    said = await typed(send)

    assert 4 == said.count("created")
    pod = await server.admin.have("GET", f"{SYSTEM}/pods/hami-agent-doctor")
    assert "gpu-1" == pod["spec"]["nodeName"]
    (container,) = pod["spec"]["containers"]
    assert "registry.example:5000/gpu/hami-agent:0.1.0" == container["image"]

    # Nobody is there to confirm that the container ended.
    await typed(f"{line('GUIDE.md', 'delete -f deploy/doctor.yaml')} --wait=false")
    await server.admin.ask("DELETE", f"{SYSTEM}/pods/hami-agent-doctor", {"gracePeriodSeconds": 0})
    await until_gone(server, f"{SYSTEM}/pods", "hami-agent-doctor")
    assert "hami-agent-doctor" not in await names(server, f"{SYSTEM}/serviceaccounts")


async def test_what_stays_on_a_node_is_taken_off_it(server, typed):
    written = (annotations.REGISTER, annotations.SCORE, annotations.HANDSHAKE)
    notes = dict.fromkeys(written, "Reported")
    await server.admin.have("PATCH", NODE_PATH, marks(**notes, kept="1"))

    remove = line("GUIDE.md", "kubectl annotate node NAME")
    await typed(remove.replace("NAME", NODE))

    held = notes_of(await server.admin.have("GET", NODE_PATH))
    assert "1" == held["kept"]
    assert not notes.keys() & held.keys()


@pytest.mark.parametrize("document", ["RUNBOOK.md", "GUIDE.md"])
async def test_a_condition_that_stayed_is_removed(server, typed, document):
    condition = {"type": "GpuDegraded", "status": "True", "reason": "r", "message": "m"}
    ready = {"type": "Ready", "status": "True", "reason": "r", "message": "m"}
    body = {"status": {"conditions": [condition, ready]}}
    kind = "application/strategic-merge-patch+json"
    await server.admin.have("PATCH", f"{NODE_PATH}/status", body, kind=kind)

    text = (SOURCE / document).read_text().replace("\n", " ")
    (remove,) = re.findall(r"(kubectl patch node (?:NODE|NAME) [^`]+)`", text)
    await typed(re.sub("NODE|NAME", NODE, remove, count=1))

    left = (await server.admin.have("GET", NODE_PATH))["status"]["conditions"]
    assert ["Ready"] == [one["type"] for one in left]


# The Node's status on the real API server: the agent's account may change its condition alone.
#
# The right comes with `report.nodeCondition`; the policies are as helm renders them then.

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
        f"namespaceOverride={SITE_NAMESPACE}",
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


# What containers use, with no container of HAMi beside the agent: its series.

GPU = "device_index device_uuid device_type zone"
CONTAINER = "namespace pod container vdevice_index device_uuid zone"
OLD_GPU = "nodeid deviceidx deviceuuid devicetype zone"
OLD_CONTAINER = "podnamespace podname ctrname vdeviceid deviceuuid zone"
PARTS = f"{OLD_CONTAINER} context module data offset"
BUILD = "build_date compiler go_version platform revision version"
SERIES = {
    "hami_host_gpu_memory_used_bytes": f"node {GPU}",
    "hami_host_gpu_utilization_ratio": f"node {GPU}",
    "hami_host_gpu_memory_controller_utilization_ratio": f"node {GPU}",
    "hami_host_gpu_temperature_celsius": f"node {GPU}",
    "hami_host_gpu_power_usage_watts": f"node {GPU}",
    "hami_host_gpu_ecc_errors_total": f"error_type node {GPU}",
    "hami_vgpu_memory_used_bytes": CONTAINER,
    "hami_vgpu_memory_limit_bytes": CONTAINER,
    "hami_container_device_memory_bytes": CONTAINER,
    "hami_container_device_utilization_ratio": CONTAINER,
    "hami_container_last_kernel_elapsed_seconds": CONTAINER,
    "hami_vgpu_memory_context_bytes": CONTAINER,
    "hami_vgpu_memory_module_bytes": CONTAINER,
    "hami_vgpu_memory_buffer_bytes": CONTAINER,
    "hami_build_info": BUILD,
    "HostGPUMemoryUsage": OLD_GPU,
    "HostCoreUtilization": OLD_GPU,
    "vGPU_device_memory_usage_in_bytes": OLD_CONTAINER,
    "vGPU_device_memory_limit_in_bytes": OLD_CONTAINER,
    "Device_memory_desc_of_container": PARTS,
    "Device_utilization_desc_of_container": OLD_CONTAINER,
    "Device_last_kernel_of_container": OLD_CONTAINER,
}
"""All that HAMi's monitor has of a node without MIG. Source: HAMi v2.10 cmd/vGPUmonitor/metrics.go
and pkg/metrics/metrics.go, with --legacy-metrics. Since 2.11 the memory controller's names its
node, and temperature, power and errors of memory are told."""
HOW_MANY = {CONTAINER: 3, OLD_CONTAINER: 3, PARTS: 3, BUILD: 1, f"error_type node {GPU}": 16}
"""Three GPUs of containers, one build, eight GPUs, two types of errors of each."""
OURS = ("hami_agent_", "process_", "python_")

PLACE = "/usr/local/vgpu/made"
USES = (
    f"until mv {PLACE} $CUDA_DEVICE_MEMORY_SHARED_CACHE 2>/dev/null; do sleep 0.1; done;"
    " exec sleep 3600"
)
"""A process of the container puts its region where its variable says."""


def a_using_pod(name, *, gpus=1, memory=3000):
    return a_pod(name, a_container(gpus=gpus, memory=memory, script=USES))


async def use_gpus(cluster: Cluster, name: str, used: int) -> Path:
    """The container's first process uses so many MiB of each GPU, with HAMi-core; its region."""
    pod, gpus = as_seen(cluster, name), gpu_uuids(cluster)
    given = grants(pod)["main"]
    directory = container_directory(pod["metadata"]["uid"], "main")
    made = cluster.hook / "containers" / directory / "made"
    region = HamiCoreRegion(made.with_name("next"), HAMI_2_9_0)
    process = region.start(1, expected_environment(given, gpus), now())
    uuids = [one.uuid for one in given]
    region.name_gpus([uuid for uuid in gpus if uuid in uuids])
    for gpu in range(len(given)):
        process.allocate(gpu, used * MIB)
        process.watch(gpu, 20)
    process.launch(now())
    region.path.rename(made)
    await until(lambda: any(made.parent.glob("*.cache")), 10.0, lambda: f"{name} moves nothing")
    (path,) = made.parent.glob("*.cache")
    return path


async def told(agent):
    """How many there are of each foreign series, with its labels; MiB in use by pod and GPU."""
    _, text = await page(agent, "/metrics")
    families = text_string_to_metric_families(text)
    samples = [one for family in families for one in family.samples]
    theirs = [one for one in samples if not one.name.startswith(OURS)]
    series = Counter((one.name, frozenset(one.labels)) for one in theirs)
    used = [
        (one.labels["pod"], one.labels["device_uuid"], one.value / MIB)
        for one in theirs
        if one.name == "hami_vgpu_memory_used_bytes"
    ]
    return series, sorted(used)


async def test_the_agent_alone_tells_all_that_hamis_monitor_told_of_node_and_containers(cluster):
    path = cluster.root / "both-names.yaml"
    path.write_text("metrics: {hami: both}\n")
    agent = await cluster.start_registered_agent("--config", str(path))
    pods = a_using_pod("one"), a_using_pod("pair", gpus=2, memory=2000)
    names = await run(cluster, *pods)
    await until_settled(cluster, *names)
    for name, used in zip(names, (500, 700), strict=True):
        await use_gpus(cluster, name, used)

    async def is_complete() -> bool:
        return 3 == len((await told(agent))[1])

    await until_answer(is_complete, 20.0, agent.part.tail)
    series, used = await told(agent)

    expected = {
        (name, frozenset(one.split())): HOW_MANY.get(one, 8) for name, one in SERIES.items()
    }
    assert expected == series
    given = {name: grants(as_seen(cluster, name))["main"] for name in names}
    mib = {"one": 500, "pair": 700}
    assert sorted((name, gpu.uuid, mib[name]) for name in names for gpu in given[name]) == used
    assert {key(name) for name in names} == set(cluster.pods.objects)

"""From pod object and devices text to the answer, against HAMi v2.10's Allocate."""

import copy
from typing import Any

import pytest

from agent.allocate.edits import LOCK_DIRECTORY, cache_file, container_edits
from agent.allocate.match import pair_groups
from agent.cluster import TO_ALLOCATE, PodView
from agent.errors import AgentError
from agent.hami.annotations import consume, decode_pod_devices
from agent.kube.objects import decode_pod
from agent.ledger import ContainerEdits, ContainerKey, EditSettings, HookFacts
from tests.builders import G1, G2, NODE, a_granted_share
from tests.hami_vectors import Vector, cases

GPU = "nvidia.com/gpu"
REGISTERED_MIB = 81559
PLACES = {G1: ("0000:10:00.0", 0), G2: ("0000:20:00.0", 1)}

DIFFERENT = {
    "allocate-160": "what is served decides, not what is consumed: see container order",
    "allocate-164": "the annotation names the GPU; the kubelet's ids only count",
    "allocate-165": "who may be answered without a lock is a setting, decided before",
    "allocate-166": "who may be answered beside a lock is decided before",
    "allocate-167": "no memory means all of it",
    "allocate-168": "the kubelet's ids only count",
    "allocate-179": "device nodes alone, tested below",
}


def pod_of(given: dict[str, Any]) -> PodView:
    """The vector's pod; the k-th container asks for as many slices as the k-th call brings."""
    calls = iter(given["kubeletCalls"])
    spec: dict[str, list[Any]] = {"initContainers": [], "containers": []}
    for part, items in spec.items():
        for item in given[part]:
            limits = {GPU: str(len(next(calls)))}
            items.append({**item, "resources": {"limits": limits}})
    metadata = {"uid": given["podUID"], "name": "p", "annotations": given["podAnnotations"]}
    return decode_pod({"metadata": metadata, "spec": {"nodeName": NODE, **spec}}, GPU)


def answers(given: dict[str, Any]) -> tuple[list[ContainerEdits], str]:
    """All answers to the vector's calls, and the devices text afterwards."""
    settings = EditSettings(
        memory_scaling=given["deviceMemoryScaling"],
        cuda_log_level=given["libCudaLogLevel"],
        disable_core_limit=given["disableCoreLimit"],
        mode=given["mode"],
        device_list_strategies=tuple(given["deviceListStrategy"]),
    )
    facts = HookFacts(
        library="/usr/local/vgpu/libvgpu.so",
        has_license=given["licenseFilePresent"],
        hook_path=given["HOOK_PATH"],
    )
    pod = pod_of(given)
    text = pod.annotations[TO_ALLOCATE]
    pairs = pair_groups(decode_pod_devices(text), pod.containers)
    found: list[ContainerEdits] = []
    for (name, (place, paired)), _ in zip(pairs.items(), given["kubeletCalls"], strict=False):
        view = next(view for view in pod.containers if view.name == name)
        shares = tuple(
            a_granted_share(share, PLACES[share.uuid][0], REGISTERED_MIB, PLACES[share.uuid][1])
            for share in paired
        )
        key, is_disabled = ContainerKey(pod.uid, name), view.control_disabled
        found.append(container_edits(key, shares, settings, facts, control_disabled=is_disabled))
        text = consume(text, {place})
    return found, text


def expected_edits(response: dict[str, Any], edits: ContainerEdits) -> dict[str, Any]:
    """HAMi's response with what differs on purpose put in its place.

    The cache file has no random name, the lock directory is the container's own, and CUDA is told
    how to number several GPUs.
    """
    wanted = copy.deepcopy(response)
    if "," in wanted["envs"]["NVIDIA_VISIBLE_DEVICES"]:
        wanted["envs"]["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    own = next(m.host_path for m in edits.mounts if "/containers/" in m.host_path)
    own = own.rpartition("/")[2]
    uid, _, container = own.partition("_")
    wanted["envs"]["CUDA_DEVICE_MEMORY_SHARED_CACHE"] = (
        f"/usr/local/vgpu/{cache_file(uid, container)}"
    )
    for mount in wanted["mounts"]:
        if mount["container"] == LOCK_DIRECTORY:
            mount["host"] = f"/usr/local/vgpu/containers/{own}"
    return wanted


def as_response(edits: ContainerEdits) -> dict[str, Any]:
    """The edits in the vectors' form."""
    mounts = [
        {"container": one.container_path, "host": one.host_path, "readOnly": one.read_only}
        for one in edits.mounts
    ]
    return {"annotations": None, "envs": dict(edits.envs), "mounts": mounts}


def responses(vector: Vector) -> list[dict[str, Any]]:
    calls = vector.expected["calls"]
    return [response for call in calls for response in call["containerResponses"] or ()]


@pytest.mark.parametrize("vector", cases("allocate", without=DIFFERENT), ids=str)
def test_a_container_gets_what_hami_gives_it_or_is_refused_as_there(vector: Vector):
    if not responses(vector):
        with pytest.raises(AgentError):
            answers(vector.given)
        return
    found, text = answers(vector.given)
    expected = [expected_edits(r, e) for r, e in zip(responses(vector), found, strict=True)]
    assert expected == [as_response(edits) for edits in found]
    # HAMi's text grows by one separator with every container; ours keeps its length.
    after = vector.expected["podAnnotationsAfter"][TO_ALLOCATE]
    assert after == text + ";" * len(found)

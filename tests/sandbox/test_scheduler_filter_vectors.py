"""The filter against what HAMi v2.10's own code answered."""

import pytest

from agent import cluster as annotations
from agent.errors import MalformedText
from agent.hami.pod import decode_pod_devices, encode_pod_devices
from agent.sandbox.scheduler.filter import filter_pod
from agent.sandbox.scheduler.model import RegisteredNode, SchedulerSettings
from agent.sandbox.scheduler.registry import read_offer
from agent.sandbox.scheduler.requests import pod_requests, read_steering
from agent.sandbox.scheduler.usage import Quotas, Usage
from agent.sandbox.scheduler.verbs import placement_patch
from tests.fakes.chance import Seeded
from tests.fakes.scheduler_vectors import Case, build_pod, load_cases

NOT_MODELLED = {
    "F50": "MIG",
    "F51": "MIG",
    "F52": "MIG",
    "F53": "MIG",
    "F54": "MIG",
    "F67": "MIG",
    "F68": "MIG",
}
CASES = load_cases("filter")


def build_usage(case: Case) -> Usage:
    usage = Usage()
    for given in case.get("existing_pods", []):
        inits = given.get("numInitContainers", 0)
        pod = build_pod({}, given["name"])
        pod["spec"]["initContainers"] = [{"name": f"i{number}"} for number in range(inits)]
        pod["status"]["phase"] = given.get("phase", "Running")
        if given.get("terminating"):
            pod["metadata"]["deletionTimestamp"] = "2026-08-21T06:20:39Z"
        pod["metadata"]["annotations"] = {
            "hami.io/vgpu-node": given["node"],
            "hami.io/vgpu-devices-allocated": given["vgpu_devices_allocated"],
        }
        usage.observe(pod)
        if given.get("initContainersSucceeded"):
            ended = {"state": {"terminated": {"exitCode": 0}}}
            pod["status"]["initContainerStatuses"] = [ended] * inits
            usage.observe(pod)
    return usage


def build_nodes(case: Case, usage: Usage) -> dict[str, RegisteredNode]:
    nodes = {}
    for given in case["nodes"]:
        noted = {annotations.REGISTER: given["register"]}
        keys = {"cordon": annotations.CORDON, "score": annotations.SCORE}
        noted |= {key: given[name] for name, key in keys.items() if name in given}
        offer = read_offer(noted)
        if offer is not None:
            nodes[given["name"]] = offer.state(given["name"], usage.loads(given["name"]))
    return nodes


def build_quotas(case: Case, usage: Usage) -> Quotas:
    quotas = Quotas(usage, build_settings(case).memory_factor)
    for number, given in enumerate(case.get("resource_quotas", [])):
        metadata = {"namespace": given["namespace"], "name": f"q{number}"}
        quotas.see("ADDED", {"metadata": metadata, "spec": {"hard": given["hard"]}})
    return quotas


def build_settings(case: Case) -> SchedulerSettings:
    config = case.get("config") or {}
    return SchedulerSettings(
        default_memory_mib=config.get("defaultMemory", 0),
        default_core_percent=config.get("defaultCores", 0),
        memory_factor=config.get("memoryFactor", 1),
    )


MODELLED = sorted(CASES.keys() - NOT_MODELLED.keys())


@pytest.mark.parametrize("case_id", MODELLED)
def test_the_filter_answers_as_hami(case_id: str) -> None:
    case = CASES[case_id]
    expected, pod, settings = case["expect"], build_pod(case["pod"]), build_settings(case)
    usage = build_usage(case)
    nodes, quotas = build_nodes(case, usage), build_quotas(case, usage)
    candidates = case.get("candidate_nodes") or [given["name"] for given in case["nodes"]]

    filtered = filter_pod(pod, candidates, nodes, settings, Seeded(), quotas)

    assert (expected.get("NodeNames") or []) == list(filtered.nodes)
    if not filtered.nodes:
        assert (expected.get("FailedNodes") or {}) == filtered.failed
    assert expected.get("error", "") == filtered.error
    assert expected["events"] == [
        f"{notice.type} {notice.reason} {notice.message}" for notice in filtered.notices
    ]
    patch = expected.get("patched_annotations")
    if filtered.groups is None:
        assert patch is None
    else:
        written = placement_patch(filtered.nodes[0], filtered.groups, 1787293239)["metadata"]
        stamped = patch | {"hami.io/vgpu-time": "1787293239"}
        assert stamped == written["annotations"]
        assert expected["patched_labels"] == written["labels"]


@pytest.mark.parametrize("case_id", MODELLED)
def test_the_requests_are_read_as_hami_reads_them(case_id: str) -> None:
    case = CASES[case_id]

    requests = pod_requests(build_pod(case["pod"]), build_settings(case))

    assert case["expect"]["requests"] == [
        request
        and {
            "coresreq": request.core_percent,
            "mempercentage": request.memory_percent,
            "memreq": request.memory_mib,
            "nums": request.count,
        }
        for request in requests
    ]


SORTED = [name for name in MODELLED if CASES[name]["expect"].get("devices_sorted_first_request")]


@pytest.mark.parametrize("case_id", SORTED)
def test_gpus_are_scored_and_ordered_as_by_hami(case_id: str) -> None:
    case = CASES[case_id]
    nodes = build_nodes(case, build_usage(case))
    wishes = case["pod"].get("annotations", {})
    if case["expect"].get("error"):
        pytest.skip("the weights cannot be read: nothing is ordered")
    steering = read_steering(wishes, build_settings(case))

    for name, expected in case["expect"]["devices_sorted_first_request"].items():
        ordered = steering.order(nodes[name].gpus)

        assert [entry["id"] for entry in expected] == [gpu.capacity.uuid for gpu in ordered]
        for entry, gpu in zip(expected, ordered, strict=True):
            assert entry["score"] == pytest.approx(gpu.score(steering.weights), abs=1e-4)
            assert (entry["used"], entry["usedmem"], entry["usedcores"]) == (
                gpu.load.slots,
                gpu.load.memory_mib,
                gpu.load.core_percent,
            )


def test_every_vector_is_covered_or_named_with_its_reason() -> None:
    assert 73 == len(CASES)
    assert 66 == len(MODELLED)
    assert NOT_MODELLED.keys() <= CASES.keys()


def test_groups_are_written_as_they_are_read() -> None:
    text = "GPU-a,NVIDIA,1000,30:;;GPU-b,NVIDIA,500,10:;"

    assert text == encode_pod_devices(decode_pod_devices(text)[:-1])


DECODED = load_cases("decode_pod_annotation")


@pytest.mark.parametrize("case_id", sorted(DECODED))
def test_a_pods_annotation_is_read_as_by_hami(case_id: str) -> None:
    case = DECODED[case_id]
    if "error" in case:
        with pytest.raises(MalformedText):
            decode_pod_devices(case["annotation"])
        return

    groups = decode_pod_devices(case["annotation"])

    assert case["containers"] == [
        [
            {"uuid": s.uuid, "type": "NVIDIA", "mem": s.memory_mib, "cores": s.core_percent}
            for s in group
        ]
        for group in groups
    ]

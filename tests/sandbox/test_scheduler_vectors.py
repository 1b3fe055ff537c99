"""Bind and node lock against what HAMi v2.10's own code answered."""

import asyncio
import datetime as dt
import re
from typing import Any

import pytest

from agent import cluster as annotations
from agent.allocate.room import RequestRules
from agent.errors import MalformedText
from agent.hami.annotations import decode_pod_devices
from agent.model import GpuUuid, Share
from agent.sandbox.scheduler.filter import filter_pod
from agent.sandbox.scheduler.model import RegisteredNode, SchedulerSettings, read_steering
from agent.sandbox.scheduler.registry import (
    Quotas,
    Registry,
    Reservation,
    Usage,
    check_node,
    read_offer,
)
from agent.sandbox.scheduler.verbs import BindError, HamiVerbs, StoreCluster, placement_patch
from agent.sandbox.scheduler.webhook import DeniedError, admit_pod, review_pod
from agent.sandbox.store import ConflictError, Json, ObjectStore, StatusError
from tests.fakes.chance import Seeded
from tests.fakes.clock import START, ManualClock
from tests.fakes.scheduler_vectors import Case, build_pod, load_cases

CASES = load_cases("bind")
LOCK = "hami.io/mutex.lock"
ONE_GPU = [{"name": "c0", "limits": {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000"}}]


class RefusingStore(ObjectStore):
    """A store whose bindings are refused, as in the vector BI."""

    def bind(
        self, namespace: str, name: str, node_name: str, *, uid: str | None = None, **_more: object
    ) -> Json:
        raise ConflictError("apiserver said no")


def resolve(text: str, form: str = "%Y-%m-%dT%H:%M:%SZ") -> str:
    """Fill in `<now-6m0s>`."""

    def fill(found: re.Match[str]) -> str:
        ago = dt.timedelta(minutes=int(found[1] or 0), seconds=int(found[2] or 0))
        return (START - ago).strftime(form)

    return re.sub(r"<now-?(?:(?:(\d+)m)?(\d+)s)?>", fill, text)


def build_store(case: Case) -> ObjectStore:
    kind = RefusingStore if case["id"] == "BI" else ObjectStore
    store = kind(ManualClock(), Seeded())
    if case["id"] != "BJ":
        lock = resolve(case["lock_before"])
        store.create(
            "nodes", {"metadata": {"name": "n1", "annotations": {LOCK: lock} if lock else {}}}
        )
    if case["id"] != "BK":
        init = case["id"] == "BL"
        spec: Case = {"initContainers": ONE_GPU, "containers": [{"name": "c", "limits": {}}]}
        store.create("pods", build_pod(spec if init else {"containers": ONE_GPU}))
    store.create("pods", build_pod({"containers": []}, "other"))
    return store


async def bind(store: ObjectStore) -> tuple[str, bool]:
    """The error of the bind ("" for none), and whether the pod's shares still count."""
    found = store.select("pods", fields={"metadata.name": "p"})
    uid = found[0]["metadata"]["uid"] if found else "uid-of-p"
    settings = SchedulerSettings().quick()
    hami = HamiVerbs(StoreCluster(store), ManualClock(), Seeded(), settings)
    hami.usage.reserve(uid, Reservation("n1", [[Share(GpuUuid("GPU-aaaa"), 1000, 0)]], 0))
    for node in store.select("nodes"):
        await hami.see_node("MODIFIED", node)  # which writes nothing, unlike a new one
    for pod in store.select("pods"):
        hami.see_pod("ADDED", pod)
    error = ""
    async with asyncio.TaskGroup() as group:
        sending = group.create_task(hami.run())
        try:
            await hami.bind("default", "p", uid, "n1")
        except BindError as failure:
            error = str(failure)
        await asyncio.sleep(1)  # Events are sent beside the verbs
        sending.cancel()
    return error, bool(hami.usage.loads("n1"))


def lock_of(store: ObjectStore) -> str | None:
    lock: str | None = store.get("nodes", "", "n1")["metadata"]["annotations"].get(LOCK)
    return lock


def annotations_of(store: ObjectStore) -> dict[str, Any]:
    marks: dict[str, Any] = store.get("pods", "default", "p")["metadata"]["annotations"]
    return {
        key: "<unix seconds>" if value == str(int(START.timestamp())) else value
        for key, value in marks.items()
    }


@pytest.mark.parametrize("case_id", sorted(CASES))
async def test_a_pod_is_bound_as_by_hami(case_id: str) -> None:
    case = CASES[case_id]
    store = build_store(case)
    before = lock_of(store) if case_id != "BJ" else None

    error, still_counts = await bind(store)

    # Of a lock that cannot be read HAMi gives the words of Go.
    is_malformed = case["Error"].startswith("parsing time")
    assert error.startswith("malformed lock annotation") if is_malformed else case["Error"] == error
    assert case["usage_still_cached"] == still_counts
    assert [text.replace(case["Error"] or "-", error) for text in case["events"]] == [
        f"{event['type']} {event['reason']} {event['message']}" for event in store.select("events")
    ]
    if "lock_after" in case:
        after = case["lock_after"]
        expected = before if after == "unchanged" else after and resolve(after)
        assert expected == lock_of(store)
    if case_id != "BK":
        assert case["pod_annotations"] == annotations_of(store)


# The filter against what HAMi v2.10's own code answered.

NOT_MODELLED = {"F50", "F51", "F52", "F53", "F54", "F67", "F68"} | {
    *("F39", "F40", "F41", "F60", "F61")
}
"""They are about MIG; then about the policies topology-aware and numa, and weights of the score."""
FILTER_CASES = load_cases("filter")


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
        noted |= {annotations.CORDON: given["cordon"]} if "cordon" in given else {}
        offer = read_offer(noted)
        if offer is not None:
            nodes[given["name"]] = offer.with_loads(usage.loads(given["name"]))
    return nodes


def build_quotas(case: Case, usage: Usage) -> Quotas:
    quotas = Quotas(usage, build_settings(case).rules.memory_factor)
    for number, given in enumerate(case.get("resource_quotas", [])):
        metadata = {"namespace": given["namespace"], "name": f"q{number}"}
        quotas.see("ADDED", {"metadata": metadata, "spec": {"hard": given["hard"]}})
    return quotas


def build_settings(case: Case) -> SchedulerSettings:
    config = case.get("config") or {}
    rules = RequestRules(
        default_memory_mib=config.get("defaultMemory", 0),
        default_core_percent=config.get("defaultCores", 0),
        memory_factor=config.get("memoryFactor", 1),
        known=True,
    )
    return SchedulerSettings(rules=rules)


MODELLED = sorted(FILTER_CASES.keys() - NOT_MODELLED)


@pytest.mark.parametrize("case_id", MODELLED)
def test_the_filter_answers_as_hami(case_id: str) -> None:
    case = FILTER_CASES[case_id]
    expected, pod, settings = case["expect"], build_pod(case["pod"]), build_settings(case)
    usage = build_usage(case)
    nodes, quotas = build_nodes(case, usage), build_quotas(case, usage)
    candidates = case.get("candidate_nodes") or [given["name"] for given in case["nodes"]]

    filtered = filter_pod(pod, candidates, nodes, settings, Seeded(), quotas)

    assert (expected.get("NodeNames") or []) == list(filtered.nodes)
    if not filtered.nodes:
        assert (expected.get("FailedNodes") or {}) == filtered.failed
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


SORTED = [
    name for name in MODELLED if FILTER_CASES[name]["expect"].get("devices_sorted_first_request")
]


@pytest.mark.parametrize("case_id", SORTED)
def test_gpus_are_scored_and_ordered_as_by_hami(case_id: str) -> None:
    case = FILTER_CASES[case_id]
    nodes = build_nodes(case, build_usage(case))
    wishes = case["pod"].get("annotations", {})
    steering = read_steering(wishes, build_settings(case))

    for name, expected in case["expect"]["devices_sorted_first_request"].items():
        ordered = steering.order(nodes[name].gpus)

        assert [entry["id"] for entry in expected] == [gpu.capacity.uuid for gpu in ordered]
        for entry, gpu in zip(expected, ordered, strict=True):
            assert entry["score"] == pytest.approx(gpu.score, abs=1e-4)
            assert (entry["used"], entry["usedmem"], entry["usedcores"]) == (
                gpu.load.slots,
                gpu.load.memory_mib,
                gpu.load.core_percent,
            )


def test_every_vector_is_covered_or_named_with_its_reason() -> None:
    assert 73 == len(FILTER_CASES)
    assert 61 == len(MODELLED)


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


# When a register annotation is read again, against what HAMi v2.10's own code answered.

REGISTRY_CASES = load_cases("check_health")
STAMP = "%Y-%m-%d %H:%M:%S"


def a_node(handshake: str, register: str, allocatable: str) -> dict[str, Any]:
    annotations = {"hami.io/node-nvidia-register": register}
    if handshake:
        annotations["hami.io/node-handshake"] = handshake
    return {
        "metadata": {"name": "n1", "annotations": annotations},
        "status": {"allocatable": {"nvidia.com/gpu": allocatable}},
    }


@pytest.mark.parametrize("case_id", sorted(REGISTRY_CASES))
def test_a_node_is_judged_as_by_hami(case_id: str) -> None:
    seen: dict[str, object] = {}
    for step in REGISTRY_CASES[case_id]["steps"]:
        node = a_node(resolve(step["handshake"], STAMP), step["register"], step["allocatable"])

        checkup = check_node(seen, node, START)

        assert step["healthy"] == checkup.healthy
        assert step["needUpdate"] == checkup.refresh
        assert step["scheduler_wrote_Requesting"] == checkup.asks


GPU = '[{"id":"GPU-aaaa","count":10,"devmem":16384,"devcore":100,"type":"NVIDIA-Tesla T4"%s}]'
HEALTHY = GPU % ',"health":true'
RECENT = START.strftime(f"Requesting_{STAMP}")


def offered(registry: Registry) -> str:
    """The vector's words for what a filter would say of the only GPU."""
    state = registry.state("n1", {})
    if state is None:
        return "node unregistered"
    if not state.gpus[0].capacity.healthy:
        return "1/1 CardNotHealth"
    return "1/1 CardCordoned" if "GPU-aaaa" in state.cordoned else ""


def test_the_steps_of_one_node_lead_where_hami_leads() -> None:
    registry = Registry()
    cordoned, unasked = (a_node(stamp, HEALTHY, "10") for stamp in (RECENT, "Reported_x"))
    for node in (cordoned, unasked):
        node["metadata"]["annotations"]["hami.io/device-cordon"] = "GPU-aaaa"
    nodes = (
        a_node(RECENT, HEALTHY, "10"),
        cordoned,
        unasked,
        a_node(RECENT, HEALTHY, "10"),
        a_node(RECENT, "{", "10"),
        a_node(RECENT, GPU % "", "10"),
        a_node(RECENT, GPU % "", "0"),
        a_node(RECENT, HEALTHY, "10"),
    )
    steps = load_cases("registration_steps")["C1"]["steps"]

    for node, step in zip(nodes, steps, strict=True):
        registry.ingest(node, START)

        expected = (step["FailedNodes"] or {}).get("n1", "")
        assert expected == offered(registry), step["step"]


# The webhook against what HAMi v2.10's own code answered.

WEBHOOK_CASES = {
    name: case
    for name, case in load_cases("webhook").items()
    if not case["config"] and "quota" not in case
}
"""Those with HAMi's defaults: no other value of its device-config.yaml is modelled, nor quotas."""


def patched(pod: Json, patches: list[Json]) -> Json:
    """The pod after additions of a JSON patch."""
    for patch in patches:
        *parts, last = (part.replace("~1", "/") for part in patch["path"].split("/")[1:])
        holder: Any = pod
        for part in parts:
            holder = holder[int(part) if part.isdecimal() else part]
        holder[last] = patch["value"]
    return pod


@pytest.mark.parametrize("case_id", sorted(WEBHOOK_CASES))
def test_a_pod_is_admitted_and_filled_in_as_by_hami(case_id: str) -> None:
    case = WEBHOOK_CASES[case_id]
    pod = build_pod(case["pod"])
    patches = sorted(case["patches"], key=lambda patch: patch["path"])

    if not case["allowed"]:
        with pytest.raises(DeniedError) as denied:
            review_pod(pod, SchedulerSettings())
        assert (case["message"], case["code"]) == (str(denied.value), denied.value.code)
        return

    admitted = review_pod(pod, SchedulerSettings())

    assert patched(build_pod(case["pod"]), patches) == admitted


DENIED = 'admission webhook "vgpu.hami.io" denied the request: container side is privileged'


@pytest.mark.parametrize(("case_id", "code", "message"), [("WL", 403, DENIED), ("WE", 500, None)])
def test_a_denied_pod_and_an_invalid_percentage_are_refused_as_by_the_api_server(
    case_id: str, code: int, message: str | None
) -> None:
    with pytest.raises(StatusError) as refusal:
        admit_pod(build_pod(WEBHOOK_CASES[case_id]["pod"]), SchedulerSettings())

    assert code == refusal.value.code
    assert message is None or message == str(refusal.value)


MEMORY = {"nvidia.com/gpumem": "1000"}
COUNT = {"nvidia.com/gpu": "1"}


@pytest.mark.parametrize(
    ("requests", "limits", "expected"),
    [
        (COUNT, {}, {"nvidia.com/gpucores": "100"}),
        (COUNT | MEMORY, {}, None),
        (COUNT | {"nvidia.com/gpucores": "10"}, {}, None),
        (COUNT, {"nvidia.com/gpumem-percentage": "50"}, {"nvidia.com/gpu": "1"}),
        # A fraction of a percent counts as the next whole one: this is the whole GPU.
        (*({}, COUNT | {"nvidia.com/gpumem-percentage": "99500m"}), {"nvidia.com/gpucores": "100"}),
    ],
)
def test_a_count_in_the_requests_alone_counts_for_the_default_of_the_cores_only(
    requests: dict[str, str], limits: dict[str, str], expected: dict[str, str] | None
) -> None:
    pod = build_pod({"containers": [{"name": "c", "limits": limits}]})
    pod["spec"]["containers"][0]["resources"]["requests"] = requests

    admitted = admit_pod(pod, SchedulerSettings())

    assert ("schedulerName" in admitted["spec"]) == (expected is not None)
    got = admitted["spec"]["containers"][0]["resources"]["limits"]
    assert limits | (expected or {}) == got


@pytest.mark.parametrize(
    ("labels", "namespace_labels", "is_changed"),
    [
        ({"hami.io/webhook": "ignore"}, {}, False),
        ({}, {"hami.io/webhook": "ignore", "team": "a"}, False),
        ({"hami.io/webhook": "use"}, {"hami.io/webhook": ""}, True),
        ({"webhook": "ignore"}, {"team": "ignore"}, True),
        (None, None, True),
    ],
)
def test_a_label_of_the_pod_or_of_its_namespace_excludes_it(
    labels: Any, namespace_labels: Any, *, is_changed: bool
) -> None:
    pod = build_pod(WEBHOOK_CASES["WA"]["pod"])
    pod["metadata"]["labels"] = labels

    admitted = admit_pod(pod, SchedulerSettings(), namespace_labels)

    assert is_changed == (admitted != pod)

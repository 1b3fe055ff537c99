"""What schedulers, kubelets, runtimes and agents said decides over what the objects allow."""

import pytest
from msgspec.structs import replace

from agent.kube.reader import Taint
from agent.sandbox.explain.story import agent_events
from tests.fakes.explain_rig import a_gpu
from tests.sandbox.explained import (
    CORES,
    GPU,
    MEMORY,
    Json,
    a_holder,
    a_node,
    a_pod,
    blocked,
    event,
    gate_of,
    said,
    told,
    words,
)

REFUSED = "0/9 nodes are available: 7 3/8 CardNotHealth, 2 5/8 CardInsufficientCore."
CORDONED = "0/1 nodes are available: 1 node(s) were unschedulable."


def unplaced(why: str) -> Json:
    return said(f"0/4 nodes are available: {why}.")


NOT_A_TO_C = {"annotations": {"nvidia.com/nouse-gpuuuid": "GPU-a,GPU-b,GPU-c"}}
PODS = {
    "50 s old": a_pod(age=50),
    "70 s old": a_pod(age=70),
    "without a GPU": a_pod(limits={GPU: 0}, age=999),
    "great": a_pod(said("EOF"), limits={MEMORY: "99999"}),
    "huge": a_pod(said(REFUSED), limits={MEMORY: "99999"}),
    "bound in vain": a_pod(said("running Bind extender: EOF", "SchedulerError")),
    "plain": a_pod(),
    "deleted": a_pod(metadata={"deletionTimestamp": "2026-01-02T11:58:00Z"}),
    "refused": a_pod(said(REFUSED)),
    "locked out": a_pod(said("running PreBind plugin: node n1 has been locked within 5m0s")),
    "of memory": a_pod(unplaced("2 Insufficient memory")),
    "of slices": a_pod(unplaced("4 Insufficient nvidia.com/gpu")),
    "of an unknown reason": a_pod(unplaced("1 1/1 CardFoo")),
    "of a type": a_pod(unplaced("1 1/1 CardTypeMismatch")),
    "choosy": a_pod(metadata=NOT_A_TO_C),
    "unregistered": a_pod(unplaced("1 node unregistered")),
    "gated": a_pod(schedulingGates=[{"name": "queue/admission"}]),
    "bad weights": a_pod(said('invalid hami.io/device-scoring-weights annotation "slot=1"', "x")),
}
EVENTS = {
    "a Node, then none": (
        event("FilteringSucceed", "find fit node(n1)", 90),
        event("FilteringFailed", "1 nodes CardFoo(n1)", 20),
    ),
    "HAMi binds not": (event("BindingFailed", "pods is forbidden: not yours", 5),),
    "no answer": (event("FailedScheduling", "x509: expired"),),
    "no Node": (event("FilteringFailed", "no available node, 1 nodes do not meet"),),
    "another reason": (
        event("FailedScheduling", "0/1 nodes are available: 1 Insufficient cpu.", 5),
    ),
    "three bindings": tuple(
        event("BindingFailed", f"{text} words", age)
        for text, age in {"older": 90, "newest": 5, "old": 50}.items()
    ),
    "-": (),
}
OF_NODE = (
    event("ConfigRejected", "old text", 90, "hami-agent", "n1"),
    event("ConfigRejected", "splitCount is no number", 40, "hami-agent", "n1"),
    event("Rebooted", "not ours", 10, "kubelet", "n1"),
)
FOUR = (*map(a_gpu, ("GPU-a", "GPU-b", "GPU-c")), a_gpu("GPU-d", 3, 500))
WORLDS: dict[str, Json] = {
    "one namespace": {"nodes": (), "unread": {"nodes": "no right", "pods": "no right"}},
    "MIG": {"nodes": (a_node("n1", a_gpu("GPU-m", mode="mig")),)},
    "MPS": {"nodes": (a_node("n1", a_gpu("GPU-m", mode="mps")),)},
    "a small GPU": {"nodes": (a_node("n1", *FOUR),)},
    "an ill GPU": {"nodes": (a_node("n1", a_gpu("GPU-a", healthy=False)),)},
    "no slice": {"nodes": (a_node(slices=0),), "node_events": OF_NODE},
    "-": {},
}
SAID = """
70 s old      | -                 | -             | placement E-UNTRIED | in 70 s; by what the Nodes
50 s old      | -                 | -             |                     | has said anything about
70 s old      | -                 | one namespace | placement E-UNTRIED | hami-scheduler runs
without a GPU | -                 | -             | placement E-UNTRIED | hami-scheduler runs
plain         | a Node, then none | -             |                     | has not tried since
great         | -                 | -             | placement E-ERROR   | the scheduler failed
bound in vain | HAMi binds not    | -             | binding E-BIND      | not yours
plain         | no answer         | -             | placement E-ERROR   | x509
deleted       | -                 | -             | admission E-DELETED | was deleted 2 min ago
refused       | -                 | one namespace | placement CardInsufficientCore | 9 nodes
locked out    | -                 | one namespace | binding E-LOCK      | has been locked
of memory     | -                 | one namespace | placement E-NODE    | 2 Insufficient memory
of slices     | -                 | -             | placement E-NODE    | too few slices (4 In
of an unknown reason | -          | MPS           | placement E-UNJUDGED | 1/1 CardFoo
of a type     | -                 | MIG           | placement CardTypeMismatch | not judged
gated         | -                 | -             | admission E-GATED   | gates: queue/admission
unregistered  | another reason    | -             |                     | 5 s ago: 0/4 nodes are
bad weights   | -                 | -             | placement E-ERROR   | annotation "slot=
plain         | three bindings    | -             | binding E-BIND      | 5 s ago: newest words
choosy        | no Node     | a small GPU | placement CardInsufficientMemory | no available node
choosy        | no Node     | a small GPU | placement CardInsufficientMemory | the pod may use
huge          | -                 | an ill GPU    | placement CardInsufficientMemory | or not
unregistered  | -                 | no slice      | placement NodeUnregistered | 40 s ago: Config
"""
"""Pod, its Events, world, what blocks it with which id, and which words are quoted.

- Without a word of a scheduler nothing is called well for longer than a minute.
- A Node that was chosen before the last refusal is history.
- Nothing that the pod asks for is changed where the scheduler itself fails.
- With rights in one namespace the last attempt decides, by its greatest number.
- Of a repeated Event the condition has what the last attempt said.
- A GPU in a mode that the model does not have is not judged.
- The reason is that of the GPUs that the pod itself does not exclude.
- A GPU that is too small is no cause less for being unhealthy.
"""


@pytest.mark.parametrize("row", SAID.strip().splitlines())
def test_the_words_of_schedulers_and_agents_decide_and_are_quoted(row: str):
    pod, events, world, gate, quoted = (part.strip() for part in row.split("|"))
    found = told(PODS[pod], *EVENTS[events], **WORLDS[world])

    assert gate == " ".join(blocked(found)).strip()
    assert quoted in words(found)
    assert "old text" not in words(found)
    assert "not ours" not in words(found)
    assert bool(found.changes) is (pod == "choosy")


def of_main(waiting: Json | None = None, **state: Json) -> Json:
    one = {"name": "main", "state": {"waiting": waiting} if waiting else {}} | state
    return {"containerStatuses": [one]}


AGENT = "hami-agent"
OWNER = {"kind": "ReplicaSet", "name": "web-1", "controller": True}
RUNS = {"phase": "Running"}
REJECTED: Json = {"phase": "Failed", "reason": "UnexpectedAdmissionError"}
NVML = "Failed to initialize NVML: Unknown Error"
TEXTS = f"""
failed | Allocate failed due to no healthy devices present | no healthy slice
failed | requested number of devices unavailable. Requested: 2, Available: 1 | all slices of the
failed | Allocate failed due to rpc error: code = Unavailable desc = EOF | plugin of the node ended
failed | due to rpc error: code = Internal desc = device 3 not found | another device plugin
waiting | unresolvable CDI devices k8s.device-plugin.nvidia.com/gpu=GPU-2 | no CDI specification
waiting | nvml error: driver/library version mismatch: unknown | files were replaced
waiting | stderr: nvidia-container-cli: device error: 1: unknown device | NVIDIA's container runtime
waiting | {NVML} | has lost its GPU devices
"""


def test_each_known_text_of_kubelets_and_runtimes_has_a_cause_and_a_remedy_of_its_own():
    rows = [[part.strip() for part in row.split("|")] for row in TEXTS.strip().splitlines()]
    cases = [
        (text, {**REJECTED, "message": text}, cause)
        if how == "failed"
        else (text, of_main({"reason": "x", "message": text}), cause)
        for how, text, cause in rows
    ]
    topology = {"phase": "Failed", "reason": "TopologyAffinityError", "message": "Resources cannot"}
    remedies = set()
    for text, status, cause in [*cases, ("Resources cannot", topology, "no NUMA node")]:
        found = told(a_pod(status, "n1"))
        assert text in words(found)
        assert cause in words(found), text
        remedies |= {gate.advice for gate in found.gates if gate.verdict.value == "blocked"}

    assert 9 == len(remedies)
    crash = {"reason": "CrashLoopBackOff", "message": "back-off"}
    ended = of_main(crash, lastState={"terminated": {"exitCode": 1, "message": NVML}})
    assert "has lost its GPU devices" in words(told(a_pod(ended, "n1")))


def test_what_the_agent_said_of_the_pod_is_quoted_the_newest_first():
    events = [
        event("MemoryLimitReached", f"container c{n} uses 99 %", n, "hami-agent") for n in (9, 3)
    ] + [event("GpuDegradedForPod", "GPU 0: XID 94 [H-094]", 7, "hami-agent")]
    held = "GPU-a,NVIDIA,1000,0:;"
    metadata = {"annotations": {"hami.io/vgpu-devices-allocated": held}}
    running = gate_of(
        told(a_pod({"phase": "Running"}, "n1", metadata=metadata), *events), "running"
    )

    assert ("noted", "") == (running.verdict.value, running.reason)
    assert [
        "the agent, 3 s ago: MemoryLimitReached: container c3 uses 99 %",
        "the agent, 7 s ago: GpuDegradedForPod: GPU 0: XID 94 [H-094]",
        "its node reports all of its GPUs as healthy now",
    ] == [*running.facts[1:]]


def test_a_fault_that_is_over_is_not_told_of_a_pod_whose_node_offers_nothing():
    of_node = (
        event("GpuRecovered", "GPU 0 (GPU-a): healthy again", 60, AGENT, "n1"),
        event("NothingOffered", "no slice is on offer [HA-5001]", 5, AGENT, "n1"),
    )
    over = event("GpuDegradedForPod", "GPU 0 (GPU-a): XID 79", 500, AGENT)
    metadata = {"annotations": {"hami.io/vgpu-devices-allocated": "GPU-a,NVIDIA,1000,0:;"}}
    pod = a_pod({"phase": "Running"}, "n1", metadata=metadata)
    nodes = (a_node("n1", a_gpu("GPU-a", healthy=False)),)
    facts = " ".join(gate_of(told(pod, over, nodes=nodes, node_events=of_node), "running").facts)

    assert "NothingOffered" in facts
    assert "XID 79" not in facts


def test_a_node_that_offers_slices_again_does_not_offer_none():
    events = [
        event("NothingOffered", "so no slice is on offer", 30, AGENT, "n1"),
        event("SlicesOffered", "The node's slices are on offer.", 9, AGENT, "n1"),
    ]
    assert ["SlicesOffered"] == [one.reason for one in agent_events(events)]


WELL = "GpuRecovered"
BAD = event("GpuUnhealthy", "GPU 0 (GPU-a): XID 48", 900, AGENT, "n1")


@pytest.mark.parametrize(
    ("later", "is_quoted"),
    [
        # What an operator does with other GPUs is later, and no fault.
        (
            [("GpuReleased", "GPU 1 (GPU-b): released"), ("GpuRecovered", "GPU 2 (GPU-c): well")],
            True,
        ),
        ([(f"Gpu{n}", f"GPU {n} (GPU-{n}): x") for n in range(5)], True),
        ([("GpuUnhealthy", f"GPU {n} (GPU-{n}): x") for n in (1, 2)], True),
        # The same GPU, which is released or well again.
        ([("GpuReleased", "GPU 0 (GPU-a): released")], False),
        ([("GpuRecovered", "GPU 0 (GPU-a): healthy again")], False),
        ([("GpuUnhealthy", "GPU 0 (GPU-a): XID 79")], False),
        # It is taken back and recovers in one second; the list may have either first.
        ([("GpuUnhealthy", "GPU 0 (GPU-a): again"), (WELL, "GPU 0 (GPU-a): well")], False),
        ([(WELL, "GPU 0 (GPU-a): well"), ("GpuUnhealthy", "GPU 0 (GPU-a): again")], False),
    ],
)
def test_a_fault_of_a_gpu_is_quoted_until_the_agent_says_something_newer_of_it(later, is_quoted):
    said_later = (event(reason, text, 5, AGENT, "n1") for reason, text in later)
    events = [
        replace(one, kind="Normal") if one.reason != "GpuUnhealthy" else one
        for one in (BAD, *said_later)
    ]
    gpus = (a_gpu("GPU-a", healthy=False), a_gpu("GPU-b", 1, 10))
    found = told(a_pod(said(REFUSED)), nodes=(a_node("n1", *gpus),), node_events=tuple(events))

    assert is_quoted is ("GpuUnhealthy: GPU 0 (GPU-a): XID 48" in words(found))
    assert "GpuUnhealthy: GPU 0 (GPU-a): again" not in words(found)


def test_an_unhealthy_gpu_that_has_room_is_offered_as_a_change_and_no_other():
    gpus = (a_gpu("GPU-a", 3, healthy=False), a_gpu("GPU-b", 1, 10, healthy=False))
    found = told(a_pod(said(REFUSED)), nodes=(a_node("n1", *gpus),))

    (change,) = [one for one in found.changes if "GPU-" in one.said]
    assert change.said == "repair GPU 3 (GPU-a) of n1, which is unhealthy"
    assert change.paste.startswith("hami-agent status --node n1")


@pytest.mark.parametrize(
    ("owner", "phase", "advice"),
    [
        ({}, "Pending", "create the pod again where"),
        ({}, "Failed", "do what it says; then create the pod again"),
        (OWNER, "Pending", "delete the pod, so that its ReplicaSet web-1 creates another where"),
        (OWNER, "Failed", "do what it says; then its ReplicaSet web-1 creates another"),
        (
            OWNER | {"kind": "Node"},
            "Failed",
            "a static pod, which gets no GPUs: make it a DaemonSet",
        ),
        (OWNER | {"controller": False}, "Pending", "create the pod again where"),
    ],
)
def test_what_to_do_about_a_pod_depends_on_who_makes_another(owner, phase, advice):
    metadata = {"ownerReferences": [owner]} if owner else {}
    status = {**REJECTED, "message": "no [HA-2001]"} if phase == "Failed" else None
    scheduler = "hami-scheduler" if status else "default-scheduler"
    pod = a_pod(status, "n1" if status else "", metadata=metadata, schedulerName=scheduler)

    assert advice in words(told(pod))


@pytest.mark.parametrize("refusal", ["no lock [HA-2005]", "no healthy devices present"])
@pytest.mark.parametrize(
    ("reason", "message", "age", "is_shown"),
    [
        ("GpuUnhealthy", "GPU 0 (GPU-a): XID 79", 9000, True),
        ("GpuUnhealthy", "GPUs 0, 2: XID 79", 9000, False),
        ("GpuInventoryChanged", "no longer shared: GPU 0 (GPU-a)", 20, True),
        ("GpuUnhealthy", "GPU 1 (GPU-b): XID 79", 20, False),
        ("GpuUnhealthy", "GPUs 1, 2: XID 79", 20, True),
        ("GpuDegradedForPod", "GPU 1 (GPU-b), which pod d/x holds: lost", 20, False),
        ("AllocationRefused", "it has no lock [HA-2005]", 20, False),
        ("PluginConflict", "another plugin took the resource", 20, True),
        ("NothingOffered", "No GPU slice is on offer: no HAMi-core [HA-5005]", 20, True),
        ("ConfigRejected", "splitCount is no number", 9000, False),
    ],
)
def test_under_a_refusal_only_events_of_its_node_that_concern_the_pod_are_quoted(
    refusal, reason, message, age, is_shown
):
    held = {"annotations": {"hami.io/vgpu-devices-allocated": "GPU-a,NVIDIA,1000,0:;"}}
    pod = a_pod({**REJECTED, "message": refusal}, "n1", metadata=held)
    nodes = (a_node("n1", *(a_gpu(f"GPU-{name}", index) for index, name in enumerate("abc"))),)
    of_node = event(reason, message, age, "hami-agent", "n1")
    found = gate_of(told(pod, nodes=nodes, node_events=(of_node,)), "allocation")

    assert ("blocked", is_shown) == (
        found.verdict.value,
        any(f"{reason}: {message}" in fact for fact in found.facts),
    )


@pytest.mark.parametrize(
    ("containers", "shares", "holders"),
    [
        (("", "web", "gpu"), "GPU-a,NVIDIA,2000,0:;", ["gpu"]),
        (("gpu", "", "gpu2"), "GPU-a,NVIDIA,1,0:;GPU-b,NVIDIA,2,0:;", ["gpu", "gpu2"]),
        (("", "", "gpu"), ";;GPU-a,NVIDIA,1,0:;", ["gpu"]),
    ],
)
def test_shares_are_told_with_the_containers_that_ask_for_slices(containers, shares, holders):
    limits = {"limits": {GPU: "1"}}
    made = [
        {"name": name or f"plain{place}", "resources": limits if "gpu" in name else {}}
        for place, name in enumerate(containers)
    ]
    pod = a_pod(
        {"phase": "Running"},
        "n1",
        initContainers=made[:1],
        containers=made[1:],
        metadata={"annotations": {"hami.io/vgpu-devices-allocated": shares}},
    )

    nodes = (a_node("n1", a_gpu("GPU-a"), a_gpu("GPU-b", 1)),)
    facts = gate_of(told(pod, nodes=nodes), "running").facts

    assert holders == [fact.partition(":")[0] for fact in facts]


def a_quota(hard: Json) -> Json:
    return {"metadata": {"name": "team", "namespace": "d"}, "spec": {"hard": hard}}


def test_a_quota_is_raised_to_what_is_enough_and_its_holders_are_named():
    hard = {f"limits.{MEMORY}": "3000", f"limits.{CORES}": "60"}
    holder = a_holder("held", "GPU-b,NVIDIA,2500,40:;", chosen="n2")
    pod = a_pod(limits={MEMORY: "1000", CORES: "30"})

    found = told(pod, holders=(holder,), quotas=(a_quota(hard),))

    assert ("quota", "ResourceQuotaNotFit") == blocked(found)
    assert "most is held by held 2,500 MiB" in words(found)
    (change,) = found.changes
    assert 'limits.nvidia.com/gpumem: "3500", limits.nvidia.com/gpucores: "70"' == change.paste
    raised = {key: value for key, _, value in (p.partition(": ") for p in change.paste.split(", "))}
    enough = a_quota({key: value.strip('"') for key, value in raised.items()})
    assert "placement E-UNTRIED" == " ".join(
        blocked(told(pod, holders=(holder,), quotas=(enough,)))
    )


@pytest.mark.parametrize(
    ("key", "form"),
    [
        ("requests.nvidia.com/gpumem", "limits.nvidia.com/gpumem"),
        ("limits.nvidia.com/gpumemory", "limits.nvidia.com/gpumem"),
        ("nvidia.com/gpucores", "limits.nvidia.com/gpucores"),
        ("limits.nvidia.com/gpu", "requests.nvidia.com/gpu"),
        ("requests.nvidia.com/gpu", ""),
        ("limits.cpu", ""),
    ],
)
def test_a_quota_in_a_form_that_hami_does_not_read_is_named_with_the_form_that_counts(key, form):
    gate = gate_of(told(a_pod(), quotas=(a_quota({key: "5"}),)), "quota")

    assert ("E-QUOTA" if form else "") == gate.reason
    assert form in "".join(gate.facts)
    assert ("what counts is" in "".join(gate.facts)) == bool(form)


def test_a_cordoned_node_is_opened_with_its_taint_where_that_places_the_pod():
    taint = Taint("node.kubernetes.io/unschedulable", "", "NoSchedule")
    nodes = (a_node("n7", is_closed=True, taints=(taint,)), a_node("n8", is_closed=True))

    (change, *_) = told(a_pod(said(CORDONED)), nodes=nodes).changes

    assert ("uncordon the Node n7", "kubectl uncordon n7") == (change.said, change.paste)


IN_MIB = "write MiB without a unit: `nvidia.com/gpumem: 2048`"


@pytest.mark.parametrize(
    ("limit", "scheduler", "advice", "reason"),
    [
        ("2Gi", "hami-scheduler", IN_MIB, "E-REQUEST"),
        ("2Gi", "default-scheduler", IN_MIB, "E-REQUEST"),
        (
            "2048",
            "volcano",
            "leave schedulerName out, or write `schedulerName: hami-scheduler`",
            "E-SCHEDULER",
        ),
    ],
)
def test_of_a_request_that_fails_each_time_only_its_cause_is_advised(
    limit, scheduler, advice, reason
):
    status = {**REJECTED, "message": "no share [HA-3001]"}
    found = told(a_pod(status, "n1", limits={MEMORY: limit}, schedulerName=scheduler))

    assert [advice] == [gate.advice for gate in found.gates if gate.advice]
    assert [reason, reason] == [gate_of(found, name).reason for name in ("admission", "placement")]
    assert (limit in words(found)) is (reason == "E-REQUEST")


def test_a_pod_that_asks_for_one_mib_too_much_is_told_the_greatest_that_fits():
    found = told(a_pod(limits={MEMORY: "16001"}))

    assert [f"{MEMORY}: 16000"] == [change.paste for change in found.changes]


def test_the_pod_that_is_in_the_way_is_named_first_if_it_is_being_deleted():
    holders = (
        a_holder("small", "GPU-a,NVIDIA,1000,0:;"),
        a_holder("big", "GPU-a,NVIDIA,14000,0:;", is_deleted=True),
    )
    found = told(a_pod(limits={MEMORY: "9000"}), holders=holders)

    assert "wait for d/big, which is being deleted" in found.changes[0].said

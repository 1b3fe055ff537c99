"""What the gates after the search say: lock, answer of the device plugin, start, holdings."""

import datetime as dt
from typing import Any

import pytest

from agent.hami.annotations import encode_register_colon
from agent.kube.reader import ClusterNode, ListedPod, Taint
from agent.sandbox.explain.placement import refuse_node
from agent.sandbox.explain.story import Explanation
from agent.sandbox.scheduler.verbs import encode_node_lock
from tests.fakes.explain_rig import LOCK, REGISTER, a_gpu
from tests.sandbox import explained
from tests.sandbox.explained import NOW, Json, a_holder, a_node, event, gate_of

CHOSEN = event("FilteringSucceed", "find fit node(n1), 0 nodes not fit")


def a_pod(node: str = "", status: Json | None = None, **marks: str) -> Json:
    noted = {f"hami.io/{key.replace('_', '-')}": text for key, text in marks.items()}
    return explained.a_pod(status, node, metadata={"annotations": noted})


def told(pod: Json, lock: str | None = None, **parts: Any) -> Explanation:
    """The explanation of a pod for which the scheduler chose n1; nobody else is there."""
    marks = {} if lock is None else {LOCK: lock}
    parts = {"nodes": (a_node(marks=marks),)} | parts
    return explained.told(pod, *parts.pop("events", (CHOSEN,)), **parts)


def locked(owner: str, age: float) -> str:
    return encode_node_lock(NOW - dt.timedelta(seconds=age), "d", owner)


def holder(phase: str) -> ListedPod:
    return a_holder("other", "GPU-a,NVIDIA,1,0:;", phase)


def of_main(**state: Json) -> Json:
    return {"containerStatuses": [{"name": "main", "state": state}]}


ANSWERING: Json = {"bind_phase": "allocating", "bind_time": "1767355140"}
BOOKED = {"reason": "CreateContainerConfigError", "message": "other GPU booked [HA-4006]"}
CREATING = {"reason": "ContainerCreating"}
BOUND: Json = {"bind_phase": "success"}
PODS: dict[str, Json] = {
    "unbound": a_pod(),
    "asked": a_pod("n1", **ANSWERING),
    "refused": a_pod("n1", bind_phase="failed"),
    "bound": a_pod("n1"),
    "answered": a_pod("n1", **BOUND),
    "started": a_pod("n1", of_main(running={}), **ANSWERING),
    "booked": a_pod("n1", of_main(waiting=BOOKED), **BOUND),
    "creating": a_pod("n1", of_main(waiting=CREATING), **BOUND),
    "ended": a_pod("n1", {"phase": "Succeeded"}, **BOUND),
    "spoilt": a_pod("n1", {"phase": "Running"}, vgpu_devices_allocated="GPU-a,NVIDIA", **BOUND),
}
PENDING, ENDED = {"holders": (holder("Pending"),)}, {"holders": (holder("Failed"),)}
CONTENDED = event("BindingFailed", "node n1 has been locked within 5m0s: contention")
LATE = event("UnexpectedAdmissionError", "no room [HA-4003], which is unexpected")
WORLDS: dict[str, Json] = {
    "own lock": {"lock": locked("p", 3)},
    "new lock": {"lock": locked("other", 3)},
    "old lock": {"lock": locked("other", 90)},
    "new lock, its pod waits": {"lock": locked("other", 3), **PENDING},
    "old lock, its pod waits": {"lock": locked("other", 90), **PENDING},
    "new lock, its pod ended": {"lock": locked("other", 3), **ENDED},
    "new lock of nobody": {"lock": "2026-01-02T11:59:50Z"},
    "old lock of nobody": {"lock": "2026-01-02T11:50:00Z"},
    "odd lock": {"lock": "soon,d,other"},
    "lock that went": {"events": (CONTENDED,)},
    "late Event": {"events": (LATE,)},
    "": {},
}
SAID = """
unbound  | own lock                | binding WAITING E-LOCK        | the pod itself holds the lock
unbound  | new lock, its pod waits | binding WAITING E-LOCK        | normal for seconds
unbound  | old lock, its pod waits | binding BLOCKED E-LOCK        | too long
unbound  | new lock, its pod ended | binding BLOCKED E-LOCK        | has ended (Failed)
unbound  | new lock                | binding WAITING E-LOCK        | normal for seconds
unbound  | old lock                | binding BLOCKED E-LOCK        | too long
unbound  | new lock of nobody      | binding WAITING E-LOCK        | no pod (it names none) for 10 s
unbound  | old lock of nobody      | binding BLOCKED E-LOCK        | for 10 min, too long
unbound  | odd lock                | binding BLOCKED E-LOCK        | cannot be read
unbound  |                         | binding PASSED                | no lock on n1
unbound  | lock that went          | binding PASSED                | no lock on n1
asked    |                         | binding PASSED                | bound to n1, 60 s ago
asked    |                         | allocation WAITING E-ALLOCATE | not asked
refused  |                         | allocation BLOCKED E-ALLOCATE | refused it
answered |                         | allocation PASSED             | has the agent's answer
started  |                         | allocation PASSED             | has the agent's answer
booked   |                         | allocation BLOCKED HA-4006    | other GPU booked
bound    | late Event              | allocation BLOCKED HA-4003    | no room
unbound  |                         | placement PASSED              | it fits
unbound  |                         | start NOT_REACHED             | not reached
bound    |                         | start WAITING E-START         | pulls images
creating |                         | start WAITING E-START         | pulls images
ended    |                         | running PASSED                | it has ended (Succeeded)
spoilt   |                         | running PASSED                | annotation cannot be read
"""
"""Pod, world, what its gate says, with which words. A lock is judged by its owner and its age."""


@pytest.mark.parametrize("row", SAID.strip().splitlines())
def test_a_gate_after_the_search_says_what_is_known_and_guesses_nothing(row: str):
    pod, world, verdict, words = (part.strip() for part in row.split("|"))
    found = gate_of(told(PODS[pod], **WORLDS[world]), verdict.split()[0])

    assert verdict == f"{found.name} {found.verdict.name} {found.reason}".strip()
    assert words in " ".join((found.said, *found.facts))


@pytest.mark.parametrize(
    ("age", "advice"),
    [
        (2, "its agent frees it within 5 s, else look at its pod; HAMi's scheduler takes it over"),
        (299, "HAMi's scheduler takes it over when it is 5 min old;"),
        (360, "HAMi's scheduler takes it over at its next attempt;"),
    ],
)
def test_what_is_said_of_a_lock_of_an_ended_pod_fits_its_age(age: float, advice: str):
    assert advice in gate_of(told(a_pod(), locked("other", age), **ENDED), "binding").advice


@pytest.mark.parametrize(
    ("marks", "words"),
    [
        ({"nvidia.com/nouse-gputype": "T4"}, "NVIDIA-Tesla T4 found, T4 excluded"),
        ({"nvidia.com/vgpu-mode": "mig"}, "NVIDIA-Tesla T4 found, mode mig wanted"),
        ({"nvidia.com/use-gpuuuid": "GPU-x,GPU-y"}, "GPU-x or GPU-y wanted"),
        ({"nvidia.com/nouse-gpuuuid": "GPU-a"}, "GPU-a excluded"),
    ],
)
def test_what_the_pod_asks_of_a_gpu_stands_beside_what_was_found(marks: dict[str, str], words: str):
    pod = a_pod()
    pod["metadata"]["annotations"] = marks

    explanation = told(pod)

    assert [words] == [gpu.said for gpu in explanation.nodes[0].gpus]
    assert [f"drop the annotation {key}" for key in marks] == [
        change.said for change in explanation.changes
    ]


def test_a_report_for_schedulers_before_2_8_is_read_too():
    node = a_node(marks={REGISTER: encode_register_colon([a_gpu("GPU-a")])})

    assert "it fits" in gate_of(told(a_pod(), nodes=(node,)), "placement").said


def test_init_containers_that_passed_free_what_only_they_held():
    shares = "GPU-a,NVIDIA,16000,0:;GPU-a,NVIDIA,1000,0:;"
    passed = a_holder("h", shares, inits=1, has_passed_init=True)
    waiting = a_holder("h", shares, inits=1)

    assert "PASSED" == gate_of(told(a_pod(), holders=(passed,)), "placement").verdict.name
    assert (
        "CardInsufficientMemory" == gate_of(told(a_pod(), holders=(waiting,)), "placement").reason
    )


KEY = "node.kubernetes.io/unschedulable"
TOLERATED = f"""
NoSchedule       |                                             | no
NoSchedule       | key=gpu operator=Exists                     | yes
NoSchedule       | key=gpu value=x                             | yes
NoSchedule       | key=gpu operator=Equal value=y              | no
NoSchedule       | key=other operator=Exists                   | no
NoSchedule       | operator=Exists                             | yes
NoSchedule       | value=x                                     | no
NoSchedule       | key=gpu operator=Exists effect=NoExecute    | no
NoSchedule       | key=gpu operator=Exists effect=NoSchedule   | yes
PreferNoSchedule |                                             | yes
closed           |                                             | no
closed           | key={KEY} operator=Exists | yes
"""


def is_offered(spec: Json, **node: Any) -> bool:
    labels = {"zone": "a", "gpus": "8"}
    found = ClusterNode("n1", labels=labels, **node)
    return not refuse_node(spec, found)


@pytest.mark.parametrize("row", TOLERATED.strip().splitlines())
def test_a_taint_keeps_a_pod_out_that_does_not_tolerate_it(row: str):
    effect, text, expected = (part.strip() for part in row.split("|"))
    toleration = dict(part.split("=") for part in text.split())
    node: Json = {"taints": (Taint("gpu", "x", effect),)}

    offered = is_offered(
        {"tolerations": [toleration]}, **({"is_closed": True} if effect == "closed" else node)
    )

    assert (expected == "yes") is offered


def affinity(*terms: tuple[str, ...]) -> Json:
    """Terms of rules, each as `label operator values`."""
    words = [[rule.split() for rule in term] for term in terms]
    made = [
        {"matchExpressions": [{"key": k, "operator": o, "values": v} for k, o, *v in term]}
        for term in words
    ]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": made}}
    return {"affinity": {"nodeAffinity": required}}


HOLD = "zone In a b; none NotIn a; zone Exists; none DoesNotExist; gpus Gt 7; gpus Lt 9"
FAIL = "zone In b; none In a; zone NotIn a; none Exists; zone DoesNotExist; gpus Gt 8; gpus Lt 8"
NEVER = "zone Gt 7; none Lt 7; gpus Gt 1 2; zone Like a"


def test_the_selector_and_one_term_of_the_affinity_with_all_of_its_rules_must_hold():
    assert is_offered({"nodeSelector": {"zone": "a"}})
    assert not is_offered({"nodeSelector": {"zone": "a", "gpus": "4"}})
    for rule in HOLD.split(";"):
        assert is_offered(affinity((rule,))), rule
        assert not is_offered(affinity((rule, "zone In b"))), rule
    for rule in f"{FAIL}; {NEVER}".split(";"):
        assert not is_offered(affinity((rule,))), rule
        assert is_offered(affinity((rule,), ("zone In a",))), rule
    assert not is_offered(affinity(()))
    assert not is_offered(affinity())
    of_name = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [of_name]}}
    assert is_offered({"affinity": {"nodeAffinity": required}})

"""`explain`: what blocks a pod, at which gate, with which id; and what would place it."""

import dataclasses
import datetime as dt
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from agent.hami.pod import encode_stamp
from tests.fakes.explain_rig import CORDON, REGISTER, ExplainRig, a_gpu, explain_rig, report_of

pytestmark = pytest.mark.looptime(False)
GPU, MEMORY, CORES = "nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores"
WEIGHTS = "hami.io/device-scoring-weights"
PRIVILEGED = {
    "name": "main",
    "resources": {"limits": {GPU: 1, MEMORY: 1000}},
    "securityContext": {"privileged": True},
}
PLUGINS = {"name": "p", "hostPath": {"path": "/var/lib/kubelet/device-plugins"}}
TAINT = {"key": "gpu", "value": "x", "effect": "NoSchedule"}
WITHOUT_NAME = "create the pod again without schedulerName, where HAMi's webhook sees it"


@pytest_asyncio.fixture
async def rig(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[ExplainRig]:
    async with explain_rig(tmp_path, capsys) as made:
        yield made


@dataclasses.dataclass(frozen=True)
class Case:
    """A pod `p` in a cluster, and what is said of it.

    `blocked`: the gate that says no, with its id. `words` and `unsaid`: what the answer has and has
    not. `verdicts`: of other gates. `tried`: the scheduler's model has refused the pod before.
    """

    arrange: Callable[[ExplainRig], object]
    blocked: tuple[str, str] | None
    words: Sequence[str] = ()
    changes: Sequence[str] = ()
    unsaid: Sequence[str] = ()
    verdicts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    options: Sequence[str] = ()
    tried: bool = False


def one_gpu(rig: ExplainRig, limits: Mapping[str, object], **parts: object) -> object:
    """A Node with one free GPU, and the pod."""
    return rig.node("n1", a_gpu("GPU-a")), rig.submit("p", limits, **parts)


def held_gpu(rig: ExplainRig, mib: int, limits: Mapping[str, object], cores: int = 0) -> None:
    """The same, and another pod that holds this much of the GPU."""
    one_gpu(rig, limits)
    rig.holder("busy", "n1", "GPU-a", mib, cores)


def bound(rig: ExplainRig, **status: object) -> None:
    """The pod holds a share of a Node, and has this status."""
    rig.node("n1", a_gpu("GPU-a", 3))
    rig.holder("p", "n1", "GPU-a", 3000, 20)
    rig.edit_pod("p", {"status": status})


def unregistered(rig: ExplainRig, *gpus: object, slices: int = 10) -> None:
    rig.node("n1", *gpus, slices=slices)  # type: ignore[arg-type]
    rig.submit("p", {GPU: 1, MEMORY: 1000})
    rig.event("p", "FilteringFailed", "no available node, 1 nodes do not meet")


def crashed_agent(rig: ExplainRig) -> None:
    unregistered(rig)
    labels, spec = (
        {"app.kubernetes.io/name": "hami-agent"},
        {"nodeName": "n1", "volumes": [PLUGINS]},
    )
    rig.submit("agent-x", {}, metadata={"labels": labels}, spec=spec, admitted=False)
    waiting = {"name": "main", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    rig.edit_pod("agent-x", {"status": {"phase": "Running", "containerStatuses": [waiting]}})


def full_quota(rig: ExplainRig) -> None:
    held_gpu(rig, 3000, {GPU: 1, MEMORY: 2000, CORES: 10})
    hard = {"limits.nvidia.com/gpumem": "4000"}
    metadata = {"name": "team", "namespace": "default"}
    rig.store.create("resourcequotas", {"metadata": metadata, "spec": {"hard": hard}})


def kept_out(rig: ExplainRig, node: Mapping[str, object], spec: Mapping[str, object]) -> None:
    """kube-scheduler keeps the pod from the Node."""
    rig.node("n1", a_gpu("GPU-a"), spec=node)
    rig.submit("p", {GPU: 1, MEMORY: 1000}, spec=spec)


REFUSED = {"phase": "Failed", "reason": "UnexpectedAdmissionError"}
FROM_AGENT = (
    "Allocate failed due to rpc error: code = FailedPrecondition desc = GPU GPU-a is bad: choose "
    "another [HA-4002], which is unexpected"
)
NO_IMAGE = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}

CASES = {
    "a wrong type": Case(
        lambda rig: one_gpu(
            rig, {GPU: 1, MEMORY: 1000}, annotations={"nvidia.com/use-gputype": "A100"}
        ),
        ("placement", "CardTypeMismatch"),
        ["NVIDIA-Tesla T4 found, A100 wanted"],
        ["drop the annotation nvidia.com/use-gputype"],
        tried=True,
    ),
    "missing memory": Case(
        lambda rig: held_gpu(rig, 9000, {GPU: 1, MEMORY: 8000}),
        ("placement", "CardInsufficientMemory"),
        [
            "'registeredMib': 16000, 'promisedMib': 9000, 'askedMib': 8000",
            "'biggest': ['default/busy 9,000 MiB']",
        ],
        [
            "ask for at most 7,000 MiB (nvidia.com/gpumem) instead of 8,000 MiB",
            "wait for default/busy to end, or end it (it holds 9,000 MiB on n1)",
        ],
        unsaid=["no GPU of the cluster has so much memory"],
        tried=True,
    ),
    "more memory than a GPU has": Case(
        lambda rig: held_gpu(rig, 500, {GPU: 1, MEMORY: 20_000}),
        ("placement", "CardInsufficientMemory"),
        ["no GPU of the cluster has so much memory, even without other pods"],
        ["ask for at most 15,500 MiB (nvidia.com/gpumem) instead of 20,000 MiB"],
    ),
    "exhausted cores": Case(
        lambda rig: held_gpu(rig, 100, {GPU: 1, MEMORY: 1000, CORES: 50}, 70),
        ("placement", "CardInsufficientCore"),
        ["30 % of cores free"],
        [
            "ask for at most 30 % of the cores (nvidia.com/gpucores) instead of 50 %",
            "wait for default/busy to end, or end it (it holds 100 MiB on n1)",
        ],
        tried=True,
    ),
    "a GPU wanted alone": Case(
        lambda rig: held_gpu(rig, 100, {GPU: 1, MEMORY: 1000, CORES: 100}),
        ("placement", "ExclusiveDeviceAllocateConflict"),
        ["the pod wants it alone, and 1 of its slices is held"],
        [
            "ask for at most 99 % of the cores (nvidia.com/gpucores) instead of 100 %",
            "wait for default/busy to end, or end it (it holds 100 MiB on n1)",
        ],
    ),
    "more cores than a GPU has": Case(
        lambda rig: one_gpu(rig, {GPU: 1, MEMORY: 1000, CORES: 150}),
        None,
        ["150 % of the cores (which counts as 100 %)."],
    ),
    "a full GPU beside a cordoned one": Case(
        lambda rig: (
            rig.node("n1", a_gpu("GPU-a"), a_gpu("GPU-b", 1), annotations={CORDON: "GPU-b"}),
            rig.holder("full", "n1", "GPU-a", 15_000),
            rig.submit("p", {GPU: 1, MEMORY: 8000}),
        ),
        ("placement", "CardCordoned"),
        ["'reason': 'CardCordoned'", "'reason': 'CardInsufficientMemory'"],
        [
            "uncordon the GPU GPU-b of n1",
            "ask for at most 1,000 MiB (nvidia.com/gpumem) instead of 8,000 MiB",
            "wait for default/full to end, or end it (it holds 15,000 MiB on n1)",
        ],
        tried=True,
    ),
    "a cordoned GPU": Case(
        lambda rig: (
            rig.node("n1", a_gpu("GPU-a"), annotations={CORDON: "GPU-a"}),
            rig.submit("p", {GPU: 1, MEMORY: 8000}),
        ),
        ("placement", "CardCordoned"),
        changes=["uncordon the GPU GPU-a of n1"],
        tried=True,
    ),
    "a bad GPU": Case(
        lambda rig: (
            rig.node("n1", a_gpu("GPU-a", healthy=False)),
            rig.submit("p", {GPU: 1, MEMORY: 1000}),
        ),
        ("placement", "CardNotHealth"),
        tried=True,
    ),
    "no report": Case(
        unregistered,
        ("placement", "NodeUnregistered"),
        ["its register annotation is missing or cannot be read"],
    ),
    "no slices": Case(
        lambda rig: unregistered(rig, a_gpu("GPU-a"), slices=0),
        ("placement", "NodeUnregistered"),
        ["its kubelet offers 0 slices"],
    ),
    "an agent that crashes": Case(
        crashed_agent,
        ("placement", "NodeUnregistered"),
        ["; its agent default/agent-x is CrashLoopBackOff'"],
    ),
    "a full quota": Case(
        full_quota,
        ("quota", "ResourceQuotaNotFit"),
        ["'team: 3,000 MiB of 4,000 MiB are held'"],
        [
            "ask for at most 1,000 MiB (nvidia.com/gpumem) instead of 2,000 MiB",
            "raise the namespace's ResourceQuota",
        ],
        tried=True,
    ),
    "the webhook did not see it": Case(
        lambda rig: one_gpu(rig, {GPU: 1, MEMORY: 1000}, admitted=False),
        ("admission", "E-WEBHOOK"),
        changes=[WITHOUT_NAME],
    ),
    "a label keeps the webhook out": Case(
        lambda rig: one_gpu(
            rig,
            {GPU: 1, MEMORY: 1000},
            admitted=False,
            metadata={"labels": {"hami.io/webhook": "ignore"}},
        ),
        ("admission", "E-WEBHOOK"),
        ["its label hami.io/webhook=ignore excludes it"],
        [WITHOUT_NAME],
    ),
    "another value of that label": Case(
        lambda rig: one_gpu(
            rig,
            {GPU: 1, MEMORY: 1000},
            admitted=False,
            metadata={"labels": {"hami.io/webhook": "use"}},
        ),
        ("admission", "E-WEBHOOK"),
        ["its namespace may be excluded (label hami.io/webhook=ignore)"],
        [WITHOUT_NAME],
    ),
    "the webhook would refuse it": Case(
        lambda rig: one_gpu(rig, {}, spec={"containers": [PRIVILEGED]}, admitted=False),
        ("admission", "E-WEBHOOK"),
        ["it would refuse the pod: container main is privileged"],
    ),
    "another scheduler": Case(
        lambda rig: one_gpu(
            rig, {GPU: 1, MEMORY: 1000}, spec={"schedulerName": "volcano"}, admitted=False
        ),
        ("admission", "E-SCHEDULER"),
        changes=[WITHOUT_NAME],
    ),
    "another scheduler that is HAMi's": Case(
        lambda rig: one_gpu(
            rig, {GPU: 1, MEMORY: 1000}, spec={"schedulerName": "volcano"}, admitted=False
        ),
        None,
        options=["--scheduler-name", "volcano"],
    ),
    "no defaults": Case(
        lambda rig: one_gpu(
            rig, {GPU: 1}, spec={"schedulerName": "hami-scheduler"}, admitted=False
        ),
        None,
        ["'reason': 'E-WEBHOOK'", "'facts': ['main: nvidia.com/gpucores: 100 is missing']"],
        verdicts={"admission": "noted"},
    ),
    "a request that HAMi drops": Case(
        lambda rig: one_gpu(rig, {GPU: 1, MEMORY: "3Gi"}), ("admission", "E-REQUEST")
    ),
    "bad weights": Case(
        lambda rig: one_gpu(rig, {GPU: 1, MEMORY: 1000}, annotations={WEIGHTS: "slot=1"}),
        ("placement", "E-REQUEST"),
        changes=[f"drop the annotation {WEIGHTS}"],
    ),
    "a cordoned Node": Case(
        lambda rig: kept_out(rig, {"unschedulable": True}, {}),
        ("placement", "E-NODE"),
        ["the Node is cordoned"],
        ["uncordon the Node n1"],
    ),
    "a selector": Case(
        lambda rig: kept_out(rig, {}, {"nodeSelector": {"zone": "b"}}),
        ("placement", "E-NODE"),
        ["the pod's nodeSelector wants the label zone=b"],
        ["drop nodeSelector, which excludes other Nodes"],
    ),
    "a taint": Case(
        lambda rig: kept_out(rig, {"taints": [TAINT]}, {}),
        ("placement", "E-NODE"),
        ["the pod does not tolerate the taint gpu=x:NoSchedule"],
    ),
    "what kube-scheduler alone knows": Case(
        lambda rig: (
            one_gpu(rig, {GPU: 1, MEMORY: 1000}),
            rig.event("p", "FailedScheduling", "0/1 nodes are available: 1 Insufficient cpu."),
        ),
        ("placement", "E-NODE"),
        ["Insufficient cpu"],
    ),
    "no single change is enough": Case(
        lambda rig: one_gpu(rig, {GPU: 2, MEMORY: 20_000}),
        ("placement", "NodeInsufficientDevice"),
        ["'it has 1 GPU, and one container asks for 2'", "'gpus': []"],
        unsaid=[" -> "],
    ),
    "more GPUs than a Node has": Case(
        lambda rig: (
            rig.node("n1", a_gpu("GPU-a"), a_gpu("GPU-b", 1)),
            rig.submit("p", {GPU: 3, MEMORY: 1000}),
        ),
        ("placement", "NodeInsufficientDevice"),
        changes=["ask for at most 2 GPUs in one container (nvidia.com/gpu) instead of 3"],
    ),
    "a GPU that fits alone is not the reason": Case(
        lambda rig: (
            rig.node("n1", a_gpu("GPU-a"), a_gpu("GPU-b", 1, healthy=False)),
            rig.submit("p", {GPU: 2, MEMORY: 1000}),
        ),
        ("placement", "CardNotHealth"),
        changes=["ask for at most 1 GPU in one container (nvidia.com/gpu) instead of 2"],
    ),
    "a lock of a dead pod": Case(
        lambda rig: (one_gpu(rig, {GPU: 1, MEMORY: 1000}), rig.lock_node("n1", "gone", age=240)),
        ("binding", "E-LOCK"),
        [
            "the lock of n1 is held by default/gone for 4 min, and that pod does not exist",
            "kubectl annotate node n1 hami.io/mutex.lock-",
        ],
    ),
    "it fits": Case(
        lambda rig: one_gpu(rig, {GPU: 1, MEMORY: 1000}), None, ["it fits on 1 Node now (n1)"]
    ),
    "it runs": Case(
        bound,
        None,
        [
            "'main: GPU 3 (GPU-a), 3,000 MiB, 20 % of the cores'",
            "no pod of the agent is on the node n1",
        ],
    ),
    "its GPU falls ill": Case(
        lambda rig: (
            rig.node("n1", a_gpu("GPU-a", healthy=False)),
            rig.holder("p", "n1", "GPU-a", 3000),
        ),
        None,
        ["CardNotHealth"],
        verdicts={"running": "noted"},
    ),
    "the agent refused it": Case(
        lambda rig: bound(rig, **REFUSED, message=FROM_AGENT, containerStatuses=None),
        ("allocation", "HA-4002"),
        ["'the agent refused the GPUs: GPU GPU-a is bad: choose another'"],
    ),
    "another plugin refused it": Case(
        lambda rig: bound(rig, **REFUSED, message="no binding pod"), ("allocation", "E-ALLOCATE")
    ),
    "a container does not start": Case(
        lambda rig: bound(
            rig, phase="Pending", containerStatuses=[{"name": "main", "state": NO_IMAGE}]
        ),
        ("start", "E-START"),
        ["'container main waits: ImagePullBackOff: no such image'"],
    ),
    "the kubelet rejects it for another reason": Case(
        lambda rig: bound(
            rig,
            phase="Failed",
            reason="OutOfcpu",
            message="Node didn't have enough cpu",
            containerStatuses=None,
        ),
        ("start", "E-START"),
        ["no container has started: Node didn't have enough cpu"],
    ),
    "its containers failed": Case(
        lambda rig: bound(
            rig,
            phase="Failed",
            containerStatuses=[{"name": "main", "state": {"terminated": {"exitCode": 1}}}],
        ),
        ("running", "E-START"),
    ),
    "it asks for no GPU": Case(
        lambda rig: one_gpu(rig, {"cpu": 1}),
        None,
        ["the pod asks for no GPU of HAMi"],
        verdicts={"start": "not-reached"},
    ),
    "no HAMi in the cluster": Case(
        lambda rig: (
            rig.node("n1", slices=10),
            rig.submit("p", {GPU: 1}, admitted=False),
            rig.event("p", "FailedScheduling", "0/1 nodes are available: 1 Insufficient gpu."),
        ),
        ("placement", "E-NODE"),
        verdicts={"admission": "noted"},
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_the_gate_that_blocks_the_pod_is_named_with_what_would_place_it(
    rig: ExplainRig, case: Case
):
    case.arrange(rig)
    if case.tried:
        async with rig.scheduling():
            await rig.until_told("p", "FilteringFailed")

    answer = await rig.explain("p", *case.options)

    verdicts = {gate["name"]: gate["verdict"] for gate in answer.data["gates"]}
    assert (0 if case.blocked is None else 1) == answer.code
    if case.blocked is not None:
        assert case.blocked == answer.blocked
        later = list(verdicts.values())[list(verdicts).index(case.blocked[0]) + 1 :]
        assert {"not-reached"} >= set(later)
    assert list(case.changes) == answer.changes
    assert case.verdicts.items() <= verdicts.items()
    said = str(answer.data)
    assert [] == [words for words in case.words if words not in said]
    assert [] == [words for words in case.unsaid if words in said]


async def test_a_scheduler_with_an_older_report_is_told_from_one_that_has_not_tried_since(
    rig: ExplainRig,
):
    rig.node("n1", a_gpu("GPU-a"))
    rig.submit("p", {GPU: 1, MEMORY: 30_000})
    async with rig.scheduling(eager=False):
        await rig.until_told("p", "FilteringFailed")
    rig.annotate_node("n1", {REGISTER: report_of(a_gpu("GPU-a", memory_mib=40_000))})

    waits = await rig.explain("p")
    gate = waits.gate("placement")
    assert ("waiting", "E-RETRY", 0) == (gate["verdict"], gate["reason"], waits.code)
    assert "it fits on 1 Node now (n1)" in gate["said"]

    fields = {"f:metadata": {"f:annotations": {f"f:{REGISTER}": {}}}}
    hour_ago = encode_stamp(rig.now() - dt.timedelta(hours=1))
    entry = {"manager": "hami-agent", "time": hour_ago, "fieldsV1": fields}
    since = {"managedFields": [entry]}  # its agent wrote the report then
    rig.store.update("nodes", "", "n1", lambda node: node | {"metadata": node["metadata"] | since})
    for refusal in rig.store.select("events"):
        rig.store.delete("events", "default", refusal["metadata"]["name"])
    rig.event("p", "FilteringFailed", "1 nodes CardInsufficientMemory(n1)", age=40)

    answer = await rig.explain("p")

    assert (1, ("placement", "E-STALE"), []) == (answer.code, answer.blocked, answer.changes)
    assert "restart HAMi's scheduler" in answer.gate("placement")["advice"]


async def test_a_lock_of_a_living_pod_is_normal_for_seconds(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"))
    rig.holder("other", "n1", "GPU-a")
    rig.lock_node("n1", "other", age=3)
    rig.submit("p", {GPU: 1, MEMORY: 1000})
    async with rig.scheduling():
        await rig.until_told("p", "BindingFailed")

    answer = await rig.explain("p")

    assert (0, "waiting") == (answer.code, answer.gate("binding")["verdict"])
    assert "default/other" in answer.gate("binding")["said"]
    rig.lock_node("n1", "other", age=200)
    assert ("binding", "E-LOCK") == (await rig.explain("p")).blocked


async def test_gpus_of_which_the_same_is_said_stand_on_one_line(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"), a_gpu("GPU-b", 1), a_gpu("GPU-c", 2, healthy=False))
    rig.submit("p", {GPU: 3, MEMORY: 1000})

    answer = await rig.explain("p", "-o", "table")

    assert "GPU 0, 1 AllocatedCardsInsufficientRequest: it fits, but 3 GPUs" in answer.out


async def test_the_last_refusals_are_listed_with_their_ids(rig: ExplainRig):
    empty = await rig.explain("--recent", "-o", "table")
    assert (0, True) == (empty.code, empty.out.startswith("No kubelet has refused a pod"))

    rig.node("n1", a_gpu("GPU-a"))
    for name, reason, message, day in (
        ("old", REFUSED["reason"], "no such plugin\x1b[0m", 1),
        ("new", REFUSED["reason"], "the GPU is bad [HA-4002]", 2),
        ("evicted", "Evicted", "low on memory", 3),
    ):
        rig.holder(name, "n1", "GPU-a")
        status = {"phase": "Failed", "reason": reason, "message": message}
        rig.edit_pod(name, {"status": {**status, "startTime": f"2026-01-0{day}T00:00:00Z"}})

    text = (await rig.explain("--recent", "-o", "table")).out.splitlines()

    assert ["default/new on n1", "  the GPU is bad [HA-4002]"] == [text[0][:17], text[1]]
    assert text[0].endswith("[RUNBOOK HA-4002]")
    assert ["default/old on n1", "  no such plugin\ufffd[0m"] == [text[2][:17], text[3]]
    assert 5 == len(text)
    answer = await rig.explain("--recent")
    assert (0, ["HA-4002", ""]) == (answer.code, [pod["id"] for pod in answer.data])
    assert not (await rig.explain("--recent", "-n", "other")).data


async def test_a_pod_and_recent_do_not_go_together(rig: ExplainRig):
    assert [2, 2] == [(await rig.explain("p", "--recent")).code, (await rig.explain()).code]

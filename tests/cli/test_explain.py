"""`explain`: what blocks a pod, at which gate, with which id; and what would place it."""

import datetime as dt
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agent.hami.pod import encode_stamp
from tests.fakes.explain_rig import (
    CORDON,
    LOCK,
    REGISTER,
    ExplainAnswer,
    ExplainRig,
    a_gpu,
    explain_rig,
    report_of,
)

pytestmark = pytest.mark.looptime(False)
GPU, MEMORY, CORES = "nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores"
PERCENT = "nvidia.com/gpumem-percentage"


@pytest_asyncio.fixture
async def rig(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[ExplainRig]:
    async with explain_rig(tmp_path, capsys) as made:
        yield made


async def after_the_scheduler(rig: ExplainRig, name: str = "p") -> ExplainAnswer:
    """The answer about a pod that the scheduler model has refused."""
    async with rig.scheduling():
        await rig.until_told(name, "FilteringFailed")
    return await rig.explain(name)


async def test_a_wrong_type_is_told_with_what_was_found_and_wanted(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"))
    rig.submit("p", {GPU: 1, MEMORY: 1000}, annotations={"nvidia.com/use-gputype": "A100"})

    answer = await after_the_scheduler(rig)

    assert (1, ("placement", "CardTypeMismatch")) == (answer.code, answer.blocked)
    (gpu,) = answer.data["nodes"][0]["gpus"]
    assert "NVIDIA-Tesla T4 found, A100 wanted" == gpu["said"]
    assert ["drop the annotation nvidia.com/use-gputype"] == answer.changes


async def test_missing_memory_is_told_with_the_sum_and_the_pod_in_the_way(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"))
    rig.holder("batch-3", "n1", "GPU-a", 9000)
    rig.submit("p", {GPU: 1, MEMORY: 8000})

    answer = await after_the_scheduler(rig)

    assert ("placement", "CardInsufficientMemory") == answer.blocked
    (node,) = answer.data["nodes"]
    assert (16_000, 9000, 8000) == (
        *(node["gpus"][0]["registeredMib"], node["gpus"][0]["promisedMib"]),
        node["gpus"][0]["askedMib"],
    )
    assert ["default/batch-3 9,000 MiB"] == node["biggest"]
    assert [
        "ask for at most 7,000 MiB (nvidia.com/gpumem) instead of 8,000 MiB",
        "wait for default/batch-3 to end, or end it (it holds 9,000 MiB on n1)",
    ] == answer.changes


async def test_exhausted_cores_are_told_with_the_greatest_share_that_fits(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"))
    rig.holder("busy", "n1", "GPU-a", 100, cores=70)
    rig.submit("p", {GPU: 1, MEMORY: 1000, CORES: 50})

    answer = await after_the_scheduler(rig)

    assert ("placement", "CardInsufficientCore") == answer.blocked
    assert "30 % of cores free" in answer.data["nodes"][0]["gpus"][0]["said"]
    assert (
        "ask for at most 30 % of the cores (nvidia.com/gpucores) instead of 50 %"
        == (answer.changes[0])
    )


async def test_a_cordoned_gpu_is_named_and_to_uncordon_it_is_the_smallest_change(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"), a_gpu("GPU-b", 1), annotations={CORDON: "GPU-b"})
    rig.holder("full", "n1", "GPU-a", 15_000)
    rig.submit("p", {GPU: 1, MEMORY: 8000})

    answer = await after_the_scheduler(rig)

    reasons = {gpu["uuid"]: gpu["reason"] for gpu in answer.data["nodes"][0]["gpus"]}
    assert {"GPU-a": "CardInsufficientMemory", "GPU-b": "CardCordoned"} == reasons
    assert "uncordon the GPU GPU-b of n1" == answer.changes[0]


async def test_a_pod_that_only_meets_a_cordon_is_blocked_by_it(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"), annotations={CORDON: "GPU-a"})
    rig.submit("p", {GPU: 1, MEMORY: 8000})

    answer = await after_the_scheduler(rig)

    assert ("placement", "CardCordoned") == answer.blocked
    assert ["uncordon the GPU GPU-a of n1"] == answer.changes


async def test_a_bad_gpu_is_told_and_no_change_of_the_pod_is_promised(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a", healthy=False))
    rig.submit("p", {GPU: 1, MEMORY: 1000})

    answer = await after_the_scheduler(rig)

    assert ("placement", "CardNotHealth") == answer.blocked
    assert [] == answer.changes


@pytest.mark.parametrize(
    ("gpus", "slices", "why"),
    [
        ((), 10, "its register annotation is missing or cannot be read"),
        ((a_gpu("GPU-a"),), 0, "its kubelet offers 0 slices"),
    ],
)
async def test_an_unregistered_node_is_told_with_the_broken_link(
    rig: ExplainRig, gpus: tuple, slices: int, why: str
):
    rig.node("n1", *gpus, slices=slices)
    rig.submit("p", {GPU: 1, MEMORY: 1000})
    rig.event("p", "FilteringFailed", "no available node, 1 nodes do not meet")

    answer = await rig.explain("p")

    assert ("placement", "NodeUnregistered") == answer.blocked
    assert why in answer.data["nodes"][0]["said"]

    labels = {"app.kubernetes.io/name": "hami-agent"}
    volume = {"name": "p", "hostPath": {"path": "/var/lib/kubelet/device-plugins"}}
    spec = {"nodeName": "n1", "volumes": [volume]}
    rig.submit("agent-x", {}, metadata={"labels": labels}, spec=spec, admitted=False)
    waiting = {"name": "main", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    rig.edit_pod("agent-x", {"status": {"phase": "Running", "containerStatuses": [waiting]}})

    said = (await rig.explain("p")).data["nodes"][0]["said"]

    assert said.endswith("; its agent default/agent-x is CrashLoopBackOff")


def reported(at: dt.datetime) -> dict[str, object]:
    """The metadata of a Node whose agent wrote its report then."""
    fields = {"f:metadata": {"f:annotations": {f"f:{REGISTER}": {}}}}
    entry = {"manager": "hami-agent", "time": encode_stamp(at), "fieldsV1": fields}
    return {"managedFields": [entry]}


async def test_a_scheduler_with_an_older_report_is_told_from_one_that_has_not_tried_since(
    rig: ExplainRig,
):
    rig.node("n1", a_gpu("GPU-a"))
    rig.submit("p", {GPU: 1, MEMORY: 30_000})
    async with rig.scheduling(eager=False):
        await rig.until_told("p", "FilteringFailed")
    rig.annotate_node("n1", {REGISTER: report_of(a_gpu("GPU-a", memory_mib=40_000))})

    waits = await rig.explain("p")
    told = (("waiting", "E-RETRY"), 0)
    gate = waits.gate("placement")
    assert told == ((gate["verdict"], gate["reason"]), waits.code)
    assert "it fits on 1 Node now (n1)" in gate["said"]

    since = reported(rig.now(-3600))
    rig.store.update("nodes", "", "n1", lambda node: node | {"metadata": node["metadata"] | since})
    for refusal in rig.store.select("events"):
        rig.store.delete("events", "default", refusal["metadata"]["name"])
    rig.event("p", "FilteringFailed", "1 nodes CardInsufficientMemory(n1)", age=40)

    answer = await rig.explain("p")

    assert (1, ("placement", "E-STALE")) == (answer.code, answer.blocked)
    assert "restart HAMi's scheduler" in answer.gate("placement")["advice"]
    assert [] == answer.changes


async def test_a_lock_of_a_dead_pod_is_told_with_owner_and_age(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"))
    rig.submit("p", {GPU: 1, MEMORY: 1000})
    rig.lock_node("n1", "gone", age=240)

    answer = await rig.explain("p")

    assert (1, ("binding", "E-LOCK")) == (answer.code, answer.blocked)
    said = answer.gate("binding")["said"]
    assert "the lock of n1 is held by default/gone for 4 min, and that pod does not exist" == said
    assert "kubectl annotate node n1 hami.io/mutex.lock-" in answer.gate("binding")["advice"]


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


async def test_a_lock_that_cannot_be_read_is_told(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"), annotations={LOCK: "yesterday,default,a,b"})
    rig.submit("p", {GPU: 1, MEMORY: 1000})

    answer = await rig.explain("p")

    assert ("binding", "E-LOCK") == answer.blocked
    assert "cannot be read" in answer.gate("binding")["said"]


async def test_a_full_quota_is_told_with_what_is_held(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"))
    rig.holder("held", "n1", "GPU-a", 3000)
    rig.submit("p", {GPU: 1, MEMORY: 2000, CORES: 10})
    hard = {"limits.nvidia.com/gpumem": "4000"}
    metadata = {"name": "team", "namespace": "default"}
    rig.store.create("resourcequotas", {"metadata": metadata, "spec": {"hard": hard}})

    answer = await after_the_scheduler(rig)

    assert (1, ("quota", "ResourceQuotaNotFit")) == (answer.code, answer.blocked)
    assert ["team: 3,000 MiB of 4,000 MiB are held"] == answer.gate("quota")["facts"]
    assert "not-reached" == answer.gate("placement")["verdict"]
    assert "ask for at most 1,000 MiB (nvidia.com/gpumem) instead of 2,000 MiB" in answer.changes
    assert "raise the namespace's ResourceQuota" in answer.changes


async def test_a_pod_that_the_webhook_did_not_see_is_told(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"))
    rig.submit("p", {GPU: 1, MEMORY: 1000}, admitted=False)

    answer = await rig.explain("p")

    assert (1, ("admission", "E-WEBHOOK")) == (answer.code, answer.blocked)
    assert all("not-reached" == gate["verdict"] for gate in answer.data["gates"][1:])
    assert ["create the pod again without schedulerName, where HAMi's webhook sees it"] == (
        answer.changes
    )


async def test_the_label_that_excludes_a_pod_from_the_webhook_is_named(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"))
    labels = {"hami.io/webhook": "ignore"}
    rig.submit("p", {GPU: 1, MEMORY: 1000}, admitted=False, metadata={"labels": labels})

    (fact,) = (await rig.explain("p")).gate("admission")["facts"]

    assert "its label hami.io/webhook=ignore excludes it" == fact


async def test_another_value_of_that_label_excludes_nothing(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"))
    labels = {"hami.io/webhook": "use"}
    rig.submit("p", {GPU: 1, MEMORY: 1000}, admitted=False, metadata={"labels": labels})

    (fact,) = (await rig.explain("p")).gate("admission")["facts"]

    assert fact.startswith("its namespace may be excluded (label hami.io/webhook=ignore)")


async def test_another_scheduler_is_told(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"))
    spec = {"schedulerName": "volcano"}
    rig.submit("p", {GPU: 1, MEMORY: 1000}, spec=spec, admitted=False)

    assert ("admission", "E-SCHEDULER") == (await rig.explain("p")).blocked
    ours = await rig.explain("p", "--scheduler-name", "volcano")
    assert 0 == ours.code


async def test_a_pod_that_got_no_defaults_is_noted_and_not_blocked(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"))
    rig.submit("p", {GPU: 1}, spec={"schedulerName": "hami-scheduler"}, admitted=False)

    answer = await rig.explain("p")

    gate = answer.gate("admission")
    assert (0, "noted", "E-WEBHOOK") == (answer.code, gate["verdict"], gate["reason"])
    assert ["main: nvidia.com/gpucores: 100 is missing"] == gate["facts"]


async def test_a_request_that_hami_drops_is_told_and_no_change_is_promised(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"))
    rig.submit("p", {GPU: 1, MEMORY: "3Gi"})

    answer = await rig.explain("p")

    assert (("admission", "E-REQUEST"), []) == (answer.blocked, answer.changes)


async def test_bad_weights_are_told_with_the_annotation_to_drop(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"))
    key = "hami.io/device-scoring-weights"
    rig.submit("p", {GPU: 1, MEMORY: 1000}, annotations={key: "slot=1"})

    answer = await rig.explain("p")

    assert ("placement", "E-REQUEST") == answer.blocked
    assert [f"drop the annotation {key}"] == answer.changes


@pytest.mark.parametrize(
    ("spec", "node", "said", "change"),
    [
        ({}, {"unschedulable": True}, "the Node is cordoned", "uncordon the Node n1"),
        (
            {"nodeSelector": {"zone": "b"}},
            {},
            "the pod's nodeSelector wants the label zone=b",
            "drop nodeSelector, which excludes other Nodes",
        ),
        (
            {},
            {"taints": [{"key": "gpu", "value": "x", "effect": "NoSchedule"}]},
            "the pod does not tolerate the taint gpu=x:NoSchedule",
            None,
        ),
    ],
)
async def test_what_keeps_kube_scheduler_from_a_node_is_told(
    rig: ExplainRig, spec: dict, node: dict, said: str, change: str | None
):
    rig.node("n1", a_gpu("GPU-a"), spec=node)
    rig.submit("p", {GPU: 1, MEMORY: 1000}, spec=spec)

    answer = await rig.explain("p")

    assert ("placement", "E-NODE") == answer.blocked
    assert said in answer.data["nodes"][0]["said"]
    assert ([change] if change else []) == answer.changes


async def test_what_kube_scheduler_alone_knows_is_taken_from_its_event(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"))
    rig.submit("p", {GPU: 1, MEMORY: 1000})
    rig.event("p", "FailedScheduling", "0/1 nodes are available: 1 Insufficient cpu.")

    answer = await rig.explain("p")

    assert ("placement", "E-NODE") == answer.blocked
    assert "Insufficient cpu" in answer.gate("placement")["facts"][0]


async def test_nothing_is_advised_where_no_single_change_is_enough(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"))
    rig.submit("p", {GPU: 2, MEMORY: 20_000})

    answer = await rig.explain("p")

    assert ("placement", "NodeInsufficientDevice") == answer.blocked
    assert [] == answer.changes
    assert "" == answer.gate("placement")["advice"]


async def test_more_gpus_than_a_node_has_are_told_with_the_number_that_fits(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"), a_gpu("GPU-b", 1))
    rig.submit("p", {GPU: 3, MEMORY: 1000})

    answer = await rig.explain("p")

    assert ("placement", "NodeInsufficientDevice") == answer.blocked
    assert ["ask for at most 2 GPUs in one container (nvidia.com/gpu) instead of 3"] == (
        answer.changes
    )


async def test_a_gpu_that_fits_alone_is_not_the_reason_why_two_do_not(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"), a_gpu("GPU-b", 1, healthy=False))
    rig.submit("p", {GPU: 2, MEMORY: 1000})

    answer = await rig.explain("p")

    assert ("placement", "CardNotHealth") == answer.blocked
    assert ["ask for at most 1 GPU in one container (nvidia.com/gpu) instead of 2"] == (
        answer.changes
    )


async def test_a_pod_that_the_webhook_would_refuse_is_told(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"))
    limits = {"limits": {GPU: 1, MEMORY: 1000}}
    container = {"name": "main", "resources": limits, "securityContext": {"privileged": True}}
    rig.submit("p", {}, spec={"containers": [container]}, admitted=False)

    answer = await rig.explain("p")

    assert (
        "it would refuse the pod: container main is privileged"
        in (answer.gate("admission")["facts"])
    )
    assert [] == answer.changes

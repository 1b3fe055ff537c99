"""`explain` of pods that are past the search for a Node, and of pods that HAMi does not place."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.fakes.explain_rig import ExplainRig, a_gpu, explain_rig

pytestmark = pytest.mark.looptime(False)
GPU, MEMORY = "nvidia.com/gpu", "nvidia.com/gpumem"


@pytest_asyncio.fixture
async def rig(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[ExplainRig]:
    async with explain_rig(tmp_path, capsys) as made:
        yield made


async def test_a_pod_that_fits_is_not_blocked(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"))
    rig.submit("p", {GPU: 1, MEMORY: 1000})

    answer = await rig.explain("p")

    assert 0 == answer.code
    assert "it fits on 1 Node now (n1)" == answer.gate("placement")["said"]


async def test_a_pod_that_runs_is_told_with_what_it_holds(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a", 3))
    rig.holder("p", "n1", "GPU-a", 3000, 20)

    answer = await rig.explain("p")

    assert 0 == answer.code
    held, unread = answer.gate("running")["facts"]
    assert "main: GPU 3 (GPU-a), 3,000 MiB, 20 % of the cores" == held
    assert "no pod of the agent is on the node n1" in unread


async def test_a_gpu_that_falls_ill_below_a_pod_is_noted(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a", healthy=False))
    rig.holder("p", "n1", "GPU-a", 3000)

    gate = (await rig.explain("p")).gate("running")

    assert ("noted", "CardNotHealth") == (gate["verdict"], gate["reason"])


async def test_a_refusal_of_the_agent_is_told_with_its_id(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"))
    rig.holder("p", "n1", "GPU-a", 3000)
    message = (
        "Allocate failed due to rpc error: code = FailedPrecondition desc = GPU GPU-a is bad: "
        "choose another [HA-4002], which is unexpected"
    )
    status = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": message}
    rig.edit_pod("p", {"status": status | {"containerStatuses": None}})

    answer = await rig.explain("p")

    assert (1, ("allocation", "HA-4002")) == (answer.code, answer.blocked)
    said = answer.gate("allocation")["said"]
    assert "the agent refused the GPUs: GPU GPU-a is bad: choose another" == said


async def test_a_refusal_of_another_plugin_is_told_without_an_id_of_the_agent(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"))
    rig.holder("p", "n1", "GPU-a", 3000)
    status = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no binding pod"}
    rig.edit_pod("p", {"status": status})

    assert ("allocation", "E-ALLOCATE") == (await rig.explain("p")).blocked


async def test_a_container_that_does_not_start_is_told(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"))
    rig.holder("p", "n1", "GPU-a", 3000)
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    statuses = [{"name": "main", "state": {"waiting": waiting}}]
    rig.edit_pod("p", {"status": {"phase": "Pending", "containerStatuses": statuses}})

    answer = await rig.explain("p")

    assert ("start", "E-START") == answer.blocked
    assert "container main waits: ImagePullBackOff: no such image" == answer.gate("start")["said"]


async def test_a_pod_that_the_kubelet_rejects_for_another_reason_has_not_started(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"))
    rig.holder("p", "n1", "GPU-a", 3000)
    status = {"phase": "Failed", "reason": "OutOfcpu", "message": "Node didn't have enough cpu"}
    rig.edit_pod("p", {"status": status | {"containerStatuses": None}})

    answer = await rig.explain("p")

    assert (1, ("start", "E-START")) == (answer.code, answer.blocked)
    assert "no container has started: Node didn't have enough cpu" == answer.gate("start")["said"]


async def test_a_pod_whose_containers_failed_has_started(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"))
    rig.holder("p", "n1", "GPU-a", 3000)
    ended = [{"name": "main", "state": {"terminated": {"exitCode": 1}}}]
    rig.edit_pod("p", {"status": {"phase": "Failed", "containerStatuses": ended}})

    assert ("running", "E-START") == (await rig.explain("p")).blocked


async def test_the_start_of_a_pod_without_a_node_is_not_reached(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"))
    rig.submit("p", {"cpu": 1})

    assert "not-reached" == (await rig.explain("p")).gate("start")["verdict"]


async def test_a_pod_without_gpus_is_not_hami_s_matter(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"))
    rig.submit("p", {"cpu": 1})

    answer = await rig.explain("p")

    assert (0, "the pod asks for no GPU of HAMi") == (answer.code, answer.gate("admission")["said"])


async def test_without_hami_kube_scheduler_alone_decides(rig: ExplainRig):
    rig.node("n1", slices=10)
    rig.submit("p", {GPU: 1}, admitted=False)
    rig.event("p", "FailedScheduling", "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")

    answer = await rig.explain("p")

    assert ("placement", "E-NODE") == answer.blocked
    assert "noted" == answer.gate("admission")["verdict"]


def fail(rig: ExplainRig, name: str, reason: str, message: str, start: str) -> None:
    rig.holder(name, "n1", "GPU-a")
    status = {"phase": "Failed", "reason": reason, "message": message, "startTime": start}
    rig.edit_pod(name, {"status": status})


async def test_the_last_refusals_are_listed_with_their_ids(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"))
    fail(rig, "old", "UnexpectedAdmissionError", "no such plugin\x1b[0m", "2026-01-01T00:00:00Z")
    fail(rig, "new", "UnexpectedAdmissionError", "the GPU is bad [HA-4002]", "2026-01-02T00:00:00Z")
    fail(rig, "evicted", "Evicted", "low on memory", "2026-01-03T00:00:00Z")

    text = (await rig.explain("--recent", "-o", "table")).out.splitlines()

    assert ["default/new on n1", "  the GPU is bad [HA-4002]"] == [text[0][:17], text[1]]
    assert text[0].endswith("[RUNBOOK HA-4002]")
    assert ["default/old on n1", "  no such plugin\ufffd[0m"] == [text[2][:17], text[3]]
    assert 5 == len(text)

    answer = await rig.explain("--recent")
    assert (0, ["HA-4002", ""]) == (answer.code, [pod["id"] for pod in answer.data])
    assert not (await rig.explain("--recent", "-n", "other")).data


async def test_without_refusals_one_sentence_says_so(rig: ExplainRig):
    answer = await rig.explain("--recent", "-o", "table")

    assert (0, True) == (answer.code, answer.out.startswith("No kubelet has refused a pod"))


async def test_a_pod_and_recent_do_not_go_together(rig: ExplainRig):
    assert 2 == (await rig.explain("p", "--recent")).code
    assert 2 == (await rig.explain()).code

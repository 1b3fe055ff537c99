"""`explain`: what blocks a pod, at which gate, with which id; and what would place it."""

import asyncio
import io
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from agent.hami.annotations import encode_stamp
from tests.fakes.explain_rig import CORDON, EXPLAIN_RIGHTS, REGISTER, ExplainRig, a_gpu, explain_rig

pytestmark = pytest.mark.looptime(False)
GPU, MEMORY, CORES = "nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores"
PRIVILEGED = {
    "name": "main",
    "resources": {"limits": {GPU: 1, MEMORY: 1000}},
    "securityContext": {"privileged": True},
}
GOLDEN = Path("tests/golden/explain.txt")


def one_gpu(rig: ExplainRig, limits: Mapping[str, object], **parts: object) -> object:
    """A Node with one free GPU, and the pod."""
    return rig.node("n1", a_gpu("GPU-a")), rig.submit("p", limits, **parts)


def labelled(rig: ExplainRig, value: str) -> object:
    metadata = {"labels": {"hami.io/webhook": value}}
    return one_gpu(rig, {GPU: 1, MEMORY: 1000}, admitted=False, metadata=metadata)


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


def full_quota(rig: ExplainRig) -> None:
    held_gpu(rig, 3000, {GPU: 1, MEMORY: 2000, CORES: 10})
    hard = {"limits.nvidia.com/gpumem": "4000"}
    metadata = {"name": "team", "namespace": "default"}
    rig.store.create("resourcequotas", {"metadata": metadata, "spec": {"hard": hard}})


def full_quota_beside_a_bad_gpu(rig: ExplainRig) -> None:
    full_quota(rig)
    rig.node("n2", a_gpu("GPU-b", healthy=False))


def kept_out(rig: ExplainRig, node: Mapping[str, object], spec: Mapping[str, object]) -> None:
    """kube-scheduler keeps the pod from the Node."""
    rig.node("n1", a_gpu("GPU-a"), spec=node)
    rig.submit("p", {GPU: 1, MEMORY: 1000}, spec=spec)


def with_words(rig: ExplainRig, *, healthy: bool) -> None:
    """Too little memory, and what the Node's agent says of its GPU."""
    rig.node("n1", a_gpu("GPU-a", healthy=healthy))
    rig.submit("p", {GPU: 1, MEMORY: 99_000})
    event = {
        "metadata": {"name": "e", "namespace": "default"},
        "involvedObject": {"kind": "Node", "name": "n1"},
        "reason": "GpuUnhealthy",
        "message": "GPU 0: XID 48 [H-048]",
        "source": {"component": "hami-agent"},
        "lastTimestamp": encode_stamp(rig.now(-30)),
    }
    rig.store.create("events", event)


def of_release_2_4(rig: ExplainRig) -> None:
    """The pod that holds the GPU has no label."""
    report = "GPU-a,10,16000,100,NVIDIA-Tesla T4,0,true:"
    rig.node("n1", annotations={REGISTER: report}, slices=10)
    rig.holder("held", "n1", "GPU-a", 15_000)
    rig.edit_pod("held", {"metadata": {"labels": None}})
    rig.submit("p", {GPU: 1, MEMORY: 2000})


def unkept(rig: ExplainRig) -> None:
    bound(rig)
    rig.edit_pod("p", {"spec": {"runtimeClassName": "gvisor"}})


def with_control_characters(rig: ExplainRig) -> None:
    evil = "x\x1b[31mred\x07"
    rig.node(f"n{evil}", a_gpu("GPU-a", type_name=f"NVIDIA-{evil}"))
    marks = {"nvidia.com/use-gputype": evil + "z", "nvidia.com/use-gpuuuid": evil}
    spec = {"containers": [{"name": evil, "resources": {"limits": {GPU: 1, MEMORY: 1}}}]}
    rig.submit("p", {}, annotations=marks, spec=spec)


REFUSED = {"phase": "Failed", "reason": "UnexpectedAdmissionError"}
FROM_AGENT = (
    "Allocate failed due to rpc error: code = FailedPrecondition desc = GPU GPU-a is bad: choose "
    "another [HA-4002], which is unexpected"
)

Arrange = Callable[[ExplainRig], object]
CASES: dict[str, Arrange] = {
    "a wrong type": lambda rig: one_gpu(
        rig, {GPU: 1, MEMORY: 1000}, annotations={"nvidia.com/use-gputype": "A100"}
    ),
    "missing memory": lambda rig: held_gpu(rig, 9000, {GPU: 1, MEMORY: 8000}),
    "more memory than a GPU has": lambda rig: held_gpu(rig, 500, {GPU: 1, MEMORY: 20_000}),
    "exhausted cores": lambda rig: held_gpu(rig, 100, {GPU: 1, MEMORY: 1000, CORES: 50}, 70),
    "more cores than a GPU has": lambda rig: one_gpu(rig, {GPU: 1, MEMORY: 1000, CORES: 150}),
    "a full GPU beside a cordoned one": lambda rig: (
        rig.node("n1", a_gpu("GPU-a"), a_gpu("GPU-b", 1), annotations={CORDON: "GPU-b"}),
        rig.holder("full", "n1", "GPU-a", 15_000),
        rig.submit("p", {GPU: 1, MEMORY: 8000}),
    ),
    "a bad GPU": lambda rig: (
        rig.node("n1", a_gpu("GPU-a", healthy=False)),
        rig.submit("p", {GPU: 1, MEMORY: 1000}),
    ),
    "no report": unregistered,
    "no slices": lambda rig: unregistered(rig, a_gpu("GPU-a"), slices=0),
    "a full quota": full_quota,
    "a full quota beside a bad GPU": full_quota_beside_a_bad_gpu,
    "the webhook did not see it": lambda rig: one_gpu(rig, {GPU: 1, MEMORY: 1000}, admitted=False),
    "a label keeps the webhook out": lambda rig: labelled(rig, "ignore"),
    "the webhook would refuse it": lambda rig: one_gpu(
        rig, {}, spec={"containers": [PRIVILEGED]}, admitted=False
    ),
    "another scheduler": lambda rig: one_gpu(
        rig, {GPU: 1, MEMORY: 1000}, spec={"schedulerName": "volcano"}, admitted=False
    ),
    "no defaults": lambda rig: one_gpu(
        rig, {GPU: 1}, spec={"schedulerName": "hami-scheduler"}, admitted=False
    ),
    "a request that HAMi drops": lambda rig: one_gpu(rig, {GPU: 1, MEMORY: "3Gi"}),
    "a cordoned Node": lambda rig: kept_out(rig, {"unschedulable": True}, {}),
    "a selector": lambda rig: kept_out(rig, {}, {"nodeSelector": {"zone": "b"}}),
    "no single change is enough": lambda rig: one_gpu(rig, {GPU: 2, MEMORY: 20_000}),
    "more GPUs than a Node has": lambda rig: (
        rig.node("n1", a_gpu("GPU-a"), a_gpu("GPU-b", 1)),
        rig.submit("p", {GPU: 3, MEMORY: 1000}),
    ),
    "GPUs of which the same is said": lambda rig: (
        rig.node("n1", a_gpu("GPU-a"), a_gpu("GPU-b", 1), a_gpu("GPU-c", 2, healthy=False)),
        rig.submit("p", {GPU: 3, MEMORY: 1000}),
    ),
    "it fits": lambda rig: one_gpu(rig, {GPU: 1, MEMORY: 1000}),
    "it runs": bound,
    "its GPU falls ill": lambda rig: (
        rig.node("n1", a_gpu("GPU-a", healthy=False)),
        rig.holder("p", "n1", "GPU-a", 3000),
    ),
    "the agent refused it": lambda rig: bound(
        rig, **REFUSED, message=FROM_AGENT, containerStatuses=None
    ),
    "its containers failed": lambda rig: bound(
        rig,
        phase="Failed",
        containerStatuses=[{"name": "main", "state": {"terminated": {"exitCode": 1}}}],
    ),
    "it asks for no GPU": lambda rig: one_gpu(rig, {"cpu": 1}),
    "no HAMi in the cluster": lambda rig: (
        rig.node("n1", slices=10),
        rig.submit("p", {GPU: 1}, admitted=False),
        rig.event("p", "FailedScheduling", "0/1 nodes are available: 1 Insufficient gpu."),
    ),
    "its agent says why": lambda rig: with_words(rig, healthy=False),
    "a Node that offers all": lambda rig: with_words(rig, healthy=True),
    "a pod that release 2.4 placed": of_release_2_4,
    "control characters": with_control_characters,
    "nothing keeps its limits": unkept,
    "no such pod": lambda rig: rig.node("n1", a_gpu("GPU-a")),
    **{
        name: lambda rig: one_gpu(rig, {GPU: 1, MEMORY: 1000})
        for name in ("the rights that the help names", "no rights")
    },
    **{
        f"no right to list {resource}": lambda rig: one_gpu(rig, {GPU: 1, MEMORY: 1000})
        for resource in ("nodes", "pods", "events", "resourcequotas")
    },
}
RIGHTS = {
    "the rights that the help names": EXPLAIN_RIGHTS,
    "no rights": frozenset[tuple[str, str]](),
    **{
        f"no right to list {resource}": EXPLAIN_RIGHTS - {("list", resource)}
        for resource in ("nodes", "pods", "events", "resourcequotas")
    },
}
"""Whose they are has all rights otherwise."""
TRIED = frozenset(
    {
        *("a wrong type", "missing memory", "exhausted cores", "a full GPU beside a cordoned one"),
        *("a bad GPU", "a full quota", "a full quota beside a bad GPU", "control characters"),
    }
)
"""In these the scheduler's model has refused the pod before."""


async def told(rig: ExplainRig, name: str) -> str:
    """Exit code and text of one case, without what differs from run to run."""
    CASES[name](rig)
    if name in TRIED:
        async with rig.scheduling():
            await rig.until_told("p", "FilteringFailed")
    answer = await rig.explain("p", "-o", "table")
    text = re.sub(r"\d+ s ago", "some s ago", answer.out).replace(str(rig.kubeconfig), "KUBECONFIG")
    if name in TRIED:  # which of the scheduler's Events of one second is the last, is chance
        text = re.sub(r"last attempt some s ago: .*nodes.*", "last attempt some s ago", text)
    said = "".join(f"! {line}\n" for line in answer.err.splitlines())
    return f"exit code {answer.code}\n{text}{said}"


def golden() -> dict[str, str]:
    """What is said in each case. `python -m tests.cli.test_explain` writes it."""
    _, *parts = re.split("^=== (.*)\n", GOLDEN.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("name", CASES)
async def test_the_gate_that_blocks_the_pod_is_named_with_what_would_place_it(
    tmp_path, capsys, name
):
    async with explain_rig(tmp_path, capsys, RIGHTS.get(name)) as rig:
        assert golden()[name] == await told(rig, name)


async def test_programs_get_the_figures_and_the_names_of_the_gates(rig):
    CASES["missing memory"](rig)

    answer = await rig.explain("p")

    assert (1, ("placement", "CardInsufficientMemory")) == (answer.code, answer.blocked)
    assert f'"source": "API server by {rig.kubeconfig}' in answer.out
    (node,) = answer.data["nodes"]
    gpu = {key: node["gpus"][0][key] for key in ("registeredMib", "promisedMib", "askedMib")}
    assert {"registeredMib": 16_000, "promisedMib": 9000, "askedMib": 8000} == gpu
    assert (["default/busy 8.8 GiB"], False) == (node["biggest"], node["isFit"])
    assert {"CardInsufficientMemory": 1} == answer.data["nodesByReason"]
    assert "not-reached" == answer.gate("binding")["verdict"]
    assert 2 == len(answer.changes)


async def test_another_scheduler_may_be_hamis(rig):
    CASES["another scheduler"](rig)

    assert 0 == (await rig.explain("p", "--scheduler-name", "volcano")).code


class Printed:
    """Stands for pytest's capture where this file is a program."""

    def readouterr(self) -> tuple[str, str]:
        text, said = (getattr(each, "getvalue", str)() for each in (sys.stdout, sys.stderr))
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
        return text, said


async def write_golden() -> None:
    parts = []
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            capsys = cast("Any", Printed())
            async with explain_rig(Path(folder), capsys, RIGHTS.get(name)) as rig:
                parts.append(f"=== {name}\n{await told(rig, name)}")
    await asyncio.to_thread(GOLDEN.write_text, "".join(parts), encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(write_golden())

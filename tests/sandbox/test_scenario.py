"""The demo judges rightly: rows on disk, answers as written, the cost of a pod, a claim."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from agent.errors import SettingsError
from agent.ledger import Ledger, State
from agent.model import GpuUuid
from agent.sandbox.hardware import described
from agent.sandbox.kubelet import checkpoint
from agent.sandbox.kubelet.checkpoint import Checkpoint, CheckpointEntry
from agent.sandbox.kubelet.pods import KubeletAdmission, KubeletEvent, NodePod, read_pod
from agent.sandbox.lab.child import may_drop
from agent.sandbox.lab.cluster import Places, open_places
from agent.sandbox.scenario.default import pod_requests
from agent.sandbox.scenario.facts import PodFacts, differences
from agent.sandbox.scenario.stage import (
    NOT_REACHED,
    PLACED,
    DiskWatch,
    Moment,
    ScenarioRecord,
    SumWatch,
    Wish,
    Workload,
)
from agent.state import encode_state
from agent.wire.v1beta1 import ContainerAllocateResponse, Mount
from tests.builders import a_gpu, a_row
from tests.fakes.chance import Seeded

ROW = a_row()


def answered(kind="allocated", ids=ROW.slice_ids):
    return KubeletEvent(0.0, kind, pod=ROW.key.pod_uid, container=ROW.key.container, ids=ids)


@pytest.mark.parametrize(
    ("rows", "event", "checks", "problems"),
    [
        ((ROW,), answered(), 1, 0),
        ((), answered(), 1, 1),
        ((ROW,), answered(ids=("GPU-x-1",)), 1, 1),
        ((), answered(kind="admitted"), 0, 0),  # only answers are looked for
        (None, answered(), 1, 1),
        (b"{", answered(), 1, 1),
    ],
    ids=["on disk", "not there yet", "other ids", "no answer", "no file", "torn"],
)
def test_an_answer_whose_row_is_not_on_disk_is_told(tmp_path, rows, event, checks, problems):
    if isinstance(rows, tuple):
        rows = encode_state(State(ledger=Ledger(rows=rows)))
    if rows is not None:
        (tmp_path / "state.json").write_bytes(rows)
    cluster: Any = SimpleNamespace(places=SimpleNamespace(state=tmp_path))
    disk = DiskWatch(cluster)
    disk.hear(event)

    assert (checks, problems) == (disk.checks, len(disk.problems))


# The sum of all answers of a GPU.


@pytest.mark.parametrize(
    ("mib", "percent", "split_count", "problems"),
    [(500, 50, 2, 0), (501, 50, 2, 1), (500, 51, 2, 1), (500, 50, 1, 1), ("x", 50, 2, 1)],
)
def test_a_gpu_that_is_oversold_is_told(places, mib, percent, split_count, problems):
    """Two pods with the same limits on a GPU of 1,000 MiB."""
    envs = {"NVIDIA_VISIBLE_DEVICES": FIRST, "CUDA_DEVICE_SM_LIMIT": str(percent)}
    envs["CUDA_DEVICE_MEMORY_LIMIT_0"] = f"{mib}m"
    entries, pods = [], {}
    for uid in ("one", "two"):
        answer = bytes(ContainerAllocateResponse(envs=envs))
        entries.append(CheckpointEntry(uid, "main", "nvidia.com/gpu", {}, answer))
        pod = {"metadata": {"name": uid, "uid": uid}, "spec": {"containers": [{"name": "main"}]}}
        pods[uid] = NodePod(read_pod(pod), KubeletAdmission(admitted=True))
    places.plugins.mkdir()
    checkpoint.replace(places.plugins, Checkpoint(entries), Seeded())
    node = SimpleNamespace(pods=pods)
    cluster: Any = SimpleNamespace(places=places, kubelet=SimpleNamespace(node=node))
    sums = SumWatch(cluster, {FIRST: a_gpu(uuid=FIRST, memory_mib=1000)}, split_count)
    sums.hear(KubeletEvent(0.0, "admitted"))

    assert (1, problems) == (sums.checks, len(sums.problems))


# The scenario's own judgement: a container that has something else than was written is found.

UID = "0d7c1d3f-6e0f-4f4e-9d6c-4d1b5a0d6a11"
FIRST, SECOND = GpuUuid("GPU-a"), GpuUuid("GPU-b")
GPUS = {
    SECOND: a_gpu(uuid=SECOND, index=0, pci="0000:0a:00.0"),
    FIRST: a_gpu(uuid=FIRST, index=1, pci="0000:1b:00.0"),
}
TEXT = "GPU-a,NVIDIA,1000,30:GPU-b,NVIDIA,2000,30:;"
"""One container with two GPUs, not in the order of their bus ids."""


@pytest.fixture
def places():
    with open_places() as made:
        leaf = made.hook / "vgpu/containers" / f"{UID}_main"
        leaf.mkdir(parents=True)
        leaf.chmod(0o777)
        yield made


def a_placed_pod(text: str = TEXT, *wishes: Wish) -> PodFacts:
    pod = Workload("pair", "", wishes or (Wish("main", 2, 1000),)).pod()
    pod["metadata"] |= {"uid": UID, "annotations": {"hami.io/vgpu-devices-allocated": text}}
    return PodFacts(pod | {"status": {"phase": "Running"}})


def an_answer(places: Places, **envs: str | None) -> ContainerAllocateResponse:
    home = places.hook / "vgpu"
    right = {
        "NVIDIA_VISIBLE_DEVICES": "GPU-b,GPU-a",
        "CUDA_DEVICE_MEMORY_LIMIT_0": "2000m",
        "CUDA_DEVICE_MEMORY_LIMIT_1": "1000m",
        "CUDA_DEVICE_SM_LIMIT": "30",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": f"{home}/x.cache",
    }
    return ContainerAllocateResponse(
        envs={name: value for name, value in (right | envs).items() if value is not None},
        mounts=[
            Mount(f"{home}/libvgpu.so", f"{home}/libvgpu.so", read_only=True),
            Mount(str(home), f"{home}/containers/{UID}_main"),
            Mount("/tmp/vgpulock", f"{home}/containers/{UID}_main"),  # noqa: S108 -- HAMi-core's
            Mount("/etc/ld.so.preload", f"{home}/ld.so.preload", read_only=True),
        ],
    )


def found(places: Places, answer: ContainerAllocateResponse, pod: PodFacts | None = None):
    return differences(pod or a_placed_pod(), {(UID, "main"): bytes(answer)}, GPUS, places)


def test_what_was_written_is_right(places):
    assert [] == found(places, an_answer(places))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NVIDIA_VISIBLE_DEVICES", "GPU-a,GPU-b"),
        ("NVIDIA_VISIBLE_DEVICES", "GPU-b"),
        ("CUDA_DEVICE_MEMORY_LIMIT_0", "1000m"),
        ("CUDA_DEVICE_MEMORY_LIMIT_1", None),
        ("CUDA_DEVICE_MEMORY_LIMIT_2", "1m"),
        ("CUDA_DEVICE_SM_LIMIT", "31"),
        ("CUDA_DEVICE_SM_LIMIT", None),
        ("CUDA_DEVICE_MEMORY_SHARED_CACHE", None),
        ("CUDA_DEVICE_MEMORY_SHARED_CACHE", "/somewhere/else.cache"),
    ],
)
def test_another_value_is_found(places, name, value):
    problems = found(places, an_answer(places, **{name: value}))

    assert problems
    assert all(text.startswith("pair/main: ") for text in problems)


@pytest.mark.parametrize("index", range(4))
def test_a_mount_that_is_missing_or_elsewhere_is_found(places, index):
    less, other = an_answer(places), an_answer(places)
    missing = less.mounts.pop(index)
    other.mounts[index].host_path = "/elsewhere"

    assert [True] == [missing.container_path in text for text in found(places, less)]
    assert [True] == ["/elsewhere" in text for text in found(places, other)]


# A claim is true only if it was checked, and stays false once it was.

PROMISED = {"a": "a holds", "b": "b holds"}


def a_record() -> tuple[ScenarioRecord, list[Moment]]:
    told: list[Moment] = []
    return ScenarioRecord(PROMISED, told.append), told


async def test_a_claim_is_true_once_it_was_checked_without_a_problem_and_never_again_after_one():
    record, told = a_record()
    record.settle("a", "1")
    assert [("a", True, "1"), ("b", False, NOT_REACHED)] == [
        (claim.id, claim.ok, claim.measured) for claim in record.claims
    ]
    assert not record.ok, "one was not reached"
    record.settle("b", "2")
    assert record.ok

    record.settle("a", "1", ["this", "that"])
    record.settle("a", "fine")
    assert not record.ok
    assert ("a holds", "this; that", False) == (told[2].text, told[2].detail, told[2].ok)
    with pytest.raises(KeyError):
        record.settle("c", "1")


# What pods may cost at the API server: each request has a cause, or is named.

USUAL = (*("patch pods", "patch nodes") * 4, *("get pods",) * 10)


def judged(kinds, *pauses):
    return pod_requests(PLACED, Counter(kinds), pauses)


@pytest.mark.parametrize(
    ("more", "pauses", "wrong"),
    [
        ((), (), []),
        (("watch nodes",), (), []),
        (("patch pods",), (1.34,), []),  # a second answer that is late explains one more write
        *(
            ((kind,), (), [f"1 {kind} too many"])
            for kind in (
                *("patch pods", "patch nodes", "get pods", "get nodes"),
                *("list pods", "create events"),
            )
        ),
    ],
)
def test_each_request_has_a_cause_or_is_named(more, pauses, wrong):
    told, found = judged((*USUAL, *more), *pauses)

    assert told.startswith("4 pods with 6 answers: ")
    assert ("1.3 s between two answers" in told) == bool(pauses)
    assert wrong == found


@pytest.mark.parametrize("missing", ["patch pods", "patch nodes"])
def test_a_write_that_never_came_is_named(missing):
    kinds = list(USUAL)
    kinds.remove(missing)
    assert [f"only 3 {missing}"] == judged(kinds)[1]


# Starting the agent: root gives up its capabilities where it has any to give up.

ALL, OF_A_CONTAINER, NONE = "000001ffffffffff", "00000000a80425fb", "0000000000000000"


@pytest.mark.parametrize(
    ("uid", "capabilities", "expected"),
    [
        (0, ALL, True),
        (0, OF_A_CONTAINER, True),
        (0, NONE, False),
        (0, "00000000000000ff", False),
        (1000, NONE, False),
        (1000, ALL, False),
    ],
    ids=["root", "root in a container", "bare root", "no right to", "a user", "a user with all"],
)
def test_only_who_has_the_right_to_gives_up_capabilities(uid, capabilities, expected):
    status = f"Name:\tpython: x\nUid:\t1000\t{uid}\t{uid}\t{uid}\nCapEff:\t{capabilities}\n"

    assert expected == may_drop(status)


# Simulated hardware by the name of a model.


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("h1000:8", "there is no profile `h1000`; use h100, a100, t4, rtx3090"),
        ("node.yaml", "there is no profile `node.yaml`"),
        ("h100:", "`` is not a number up to 64"),
        ("h100:-1", "`-1` is not a number up to 64"),
        ("h100:65", "`65` is not a number up to 64"),
        ("h100:8x", "`8x` is not a number up to 64"),
    ],
)
def test_what_is_no_model_or_no_number_is_refused(spec, words):
    with pytest.raises(SettingsError, match=words):
        described(spec)

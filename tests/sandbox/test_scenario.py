"""The demo's witness of durability: a row that is not in the file yet is told."""

import asyncio
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from agent.errors import SettingsError
from agent.ledger import Ledger, State
from agent.model import GpuUuid, PciPath
from agent.sandbox.apiserver import ApiCall
from agent.sandbox.hardware import described
from agent.sandbox.kubelet.pods import ContainerSpec, KubeletEvent, PodSpec
from agent.sandbox.lab.child import KEPT_LINES, MOST_BYTES, AgentLog, may_drop
from agent.sandbox.lab.cluster import (
    MOST_CHARACTERS,
    RESOURCE,
    Places,
    Pulse,
    open_cluster,
    open_places,
)
from agent.sandbox.scenario import default
from agent.sandbox.scenario.default import pod_requests
from agent.sandbox.scenario.facts import PodFacts, differences, parsed, promised
from agent.sandbox.scenario.stage import (
    NOT_REACHED,
    PLACED,
    DiskWatch,
    Moment,
    ScenarioRecord,
    Wish,
    Workload,
    pod_use,
)
from agent.sandbox.scheduler.model import Load
from agent.state import encode_state
from agent.wire.v1beta1 import ContainerAllocateResponse, Mount
from tests.builders import NOON, a_gpu, a_row
from tests.process.agent_process import options

ROW = a_row()


def answered(kind="allocated", ids=ROW.slice_ids):
    return KubeletEvent(NOON, 0.0, kind, pod=ROW.key.pod_uid, container=ROW.key.container, ids=ids)


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


@pytest.mark.parametrize(
    ("change", "said"), [(lambda leaf: leaf.chmod(0o755), "mode 755"), (Path.rmdir, "is not there")]
)
def test_a_directory_that_is_missing_or_that_not_everybody_may_write_is_found(places, change, said):
    change(places.hook / "vgpu/containers" / f"{UID}_main")

    assert [True] == [said in text for text in found(places, an_answer(places))]


def test_answers_and_mounts_too_many_or_too_few_are_found(places):
    answer = an_answer(places)
    for pod, problem in (
        (a_placed_pod("", Wish("main")), "pair/main has no GPU and got an answer"),
        (a_placed_pod("GPU-a,NVIDIA,1000,30:;"), "pair/main requested 2 GPUs"),
    ):
        assert [problem] == found(places, answer, pod)
    assert ["pair/main got no answer"] == differences(a_placed_pod(), {}, GPUS, places)

    answer.mounts.append(Mount("/root", "/root"))
    assert [True] == ["/root" in text for text in found(places, answer)]


def test_groups_belong_to_the_containers_that_ask_init_containers_first():
    wishes = (Wish("plain"), Wish("app", 1, 2), Wish("load", 1, 1, init=True))
    shares = a_placed_pod("GPU-a,NVIDIA,1,0:;GPU-b,NVIDIA,2,0:;", *wishes).shares()

    assert ["load", "plain", "app"] == list(shares)
    assert [FIRST, None, SECOND] == [given[0].uuid if given else None for given in shares.values()]


@pytest.mark.parametrize(("init", "most"), [(500, 3000), (3000, 4000)])
def test_a_pod_counts_by_its_greatest_moment(init, most):
    """An init container runs beside the sidecar before it; the app containers come later."""
    sizes = {"s": 1000, "i": init, "a": 1500, "b": 500}
    specs = (
        ContainerSpec("s", "sidecar", {}),
        ContainerSpec("i", "init", {}),
        ContainerSpec("a", "app", {}),
        ContainerSpec("b", "app", {}),
    )
    kept = {
        ("u", name): bytes(
            ContainerAllocateResponse(
                envs={"NVIDIA_VISIBLE_DEVICES": FIRST, "CUDA_DEVICE_MEMORY_LIMIT_0": f"{mib}m"}
            )
        )
        for name, mib in sizes.items()
    }

    assert {FIRST: Load(3, most, 0)} == pod_use(PodSpec("u", "d", "p", "", specs, {}), "u", kept)


def test_an_answer_promises_what_its_environment_says(places):
    answer = parsed(bytes(an_answer(places)))

    assert {SECOND: (2000, 30), FIRST: (1000, 30)} == promised(answer)


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


# What a pod may cost at the API server: each request has a cause, or is named.

ONE, PAIR, TRIO, PREPARED = PLACED
USUAL = ("get pods", "patch pods", "patch nodes", "get pods")


def judged(workload, kinds, *pauses):
    calls = [
        ApiCall("agent", verb, resource, "", "", workload.name, 200)
        for verb, resource in map(str.split, kinds)
    ]
    return pod_requests(workload, calls, pauses)


COST = "1 patch pods, 1 patch nodes, 2 get pods"
LATE = " (1 more: 1.3 s between two answers)"


@pytest.mark.parametrize(
    ("workload", "more", "pauses", "cost", "wrong"),
    [
        (ONE, (), (), f"one (1 answer): {COST}", []),
        (PAIR, (), (), f"pair (1 answer): {COST}", []),
        (TRIO, (), (1.2,), f"trio (2 answers): {COST}", []),
        (PREPARED, (), (), f"prepared (2 answers): {COST}", []),
        # Each answer may have a read before it.
        (TRIO, ("get pods",), (), "", []),
        (PREPARED, ("get pods",), (), "", []),
        (TRIO, ("get pods",) * 2, (), "", ["trio: 1 get pods too many"]),
        # A second answer that is late explains one more write.
        (
            PREPARED,
            ("patch pods",),
            (1.34,),
            "prepared (2 answers): 2 patch pods, 1 patch nodes, 2 get pods" + LATE,
            [],
        ),
        *(
            (ONE, (kind,), (), "", [f"one: 1 {kind} too many"])
            for kind in (
                *("patch pods", "patch nodes", "get pods", "get nodes"),
                *("list pods", "create events"),
            )
        ),
    ],
)
def test_each_request_has_a_cause_or_is_named(workload, more, pauses, cost, wrong):
    told, found = judged(workload, (*USUAL, *more), *pauses)

    assert told.startswith(cost)
    assert ("more" in told) == (LATE in cost)
    assert wrong == found


@pytest.mark.parametrize("missing", ["patch pods", "patch nodes"])
def test_a_write_that_never_came_is_named(missing):
    assert [f"pair: no {missing}"] == judged(PAIR, [one for one in USUAL if one != missing])[1]


# What the scenario says of numbers is English for one thing as for several.


class WordJournal:
    """Counts one more of each request whenever it is asked."""

    def __init__(self):
        self.asked = dict.fromkeys(("writes", "reads", "watches"), 0)

    def _count(self, name, step):
        self.asked[name] += step
        return self.asked[name]

    def writes(self, user):
        return self._count("writes", 2)

    def reads(self, user):
        return self._count("reads", 1)

    def watches(self, user):
        return self._count("watches", 1)


@pytest.fixture
def stage(monkeypatch):
    async def is_quiet(stage):
        return True

    monkeypatch.setattr(default, "_is_quiet", is_quiet)
    settled = []
    return SimpleNamespace(
        cluster=SimpleNamespace(
            api=SimpleNamespace(journal=WordJournal(), open_watches=2), user="agent"
        ),
        record=SimpleNamespace(note=lambda text: None),
        settle=lambda claim, found, problems: settled.append(found),
        settled=settled,
    )


async def test_one_request_is_told_in_the_singular(stage):
    await default.idle(stage)

    assert ["2 writes, 1 read, 1 new watch beside 2"] == stage.settled


# The sandbox's copy of the agent's log: bounded, and what is looked up later stays.


def test_log_lines_are_parsed_where_they_are_json_and_cut_and_the_web_door_stays_known():
    heard: list[int] = []
    log = AgentLog(lambda: heard.append(1))
    log.add(0.0, 7, json.dumps({"event": "web.listening", "port": 1}).encode())
    for number in range(KEPT_LINES):
        log.add(float(number), 7, b'{"event": "other"}')
    log.add(1.0, 8, b"Traceback \xff")
    log.add(2.0, 8, b"[1]")
    log.add(3.0, 8, b"x" * (MOST_BYTES + 1))

    assert [1] == [line.fields["port"] for line in log.of("web.listening", 7)]
    assert [] == log.of("web.listening", 8)
    assert ["Traceback �", "[1]", "x" * MOST_BYTES] == log.last(3)
    assert (KEPT_LINES, KEPT_LINES + 4) == (len(list(log)), len(heard))


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


# A sandbox that stays up: places, the agent's log, waiting.


def test_the_directory_is_short_enough_for_sockets_wherever_temporary_files_go(
    monkeypatch, tmp_path
):
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))

    with open_places() as places:
        assert MOST_CHARACTERS >= len(str(places.root))


def test_the_directory_goes_with_the_sandbox_unless_it_is_kept():
    with open_places() as gone:
        assert (gone.hook / "vgpu/libvgpu.so").exists()
    with open_places(keep=True) as kept:
        pass

    assert not gone.root.exists()
    assert kept.state.exists()
    shutil.rmtree(kept.root)


async def test_who_waits_looks_again_at_every_beat_and_once_before():
    pulse, facts = Pulse(), list[int]()
    async with asyncio.timeout(0.1):
        await pulse.until(lambda: True)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5):
            await pulse.until(lambda: False)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(pulse.until(lambda: len(facts) == 2))
        for fact in (1, 2):
            await asyncio.sleep(1)
            assert not waiting.done()
            facts.append(fact)
            pulse.beat()

    assert waiting.done()


@pytest.mark.looptime(False)
async def test_a_namespace_can_be_taken_from_the_webhook():
    async with open_cluster(options(gpus=1)) as cluster, aiohttp.ClientSession() as session:
        session.headers["Authorization"] = f"Bearer {cluster.admin_token}"
        base = f"{cluster.api.url}/api/v1/namespaces"
        label = {"metadata": {"labels": {"hami.io/webhook": "ignore"}}}
        merge = {"Content-Type": "application/merge-patch+json"}
        async with session.post(base, json={"metadata": {"name": "other"}}) as made:
            assert 201 == made.status
        async with session.patch(f"{base}/other", json=label, headers=merge) as labelled:
            assert 200 == labelled.status
        seen = {}
        for space in ("demo", "other", "never-made"):
            pod = {
                "metadata": {"name": "p"},
                "spec": {"containers": [{"name": "c", "resources": {"limits": {RESOURCE: "1"}}}]},
            }
            async with session.post(f"{base}/{space}/pods", json=pod) as created:
                seen[space] = (await created.json())["spec"].get("schedulerName")

    assert {"demo": "hami-scheduler", "other": None, "never-made": "hami-scheduler"} == seen


# Simulated hardware by the name of a model.


@pytest.mark.parametrize(
    ("profile", "name", "memory", "nvlinks"),
    [
        ("h100", "NVIDIA H100 80GB HBM3", 81559, 18),
        ("a100", "NVIDIA A100-SXM4-80GB", 81920, 12),
        ("t4", "Tesla T4", 15360, 0),
        ("rtx3090", "NVIDIA GeForce RTX 3090", 24576, 4),
    ],
)
def test_a_profile_is_as_the_driver_describes_the_model(profile, name, memory, nvlinks):
    gpus = described(f"{profile}:4").gpus

    assert [(name, memory)] * 4 == [(gpu.name, gpu.memory_mib) for gpu in gpus]
    assert [0, 0, 1, 1] == [gpu.numa for gpu in gpus]
    assert nvlinks == gpus[0].links[0].nvlinks
    assert [PciPath.SAME_CPU, PciPath.CROSS_CPU, PciPath.CROSS_CPU] == [
        link.path for link in gpus[0].links
    ]
    assert 4 == len({gpu.uuid for gpu in gpus}) == len({gpu.pci for gpu in gpus})


def test_the_same_words_always_give_the_same_gpus_and_only_neighbours_share_a_bridge():
    assert described("h100:8") == described("h100:8")
    assert described("h100:8").gpus[0].uuid != described("a100:8").gpus[0].uuid
    assert [1, 0] == [len(described(words).gpus) for words in ("t4", "h100:0")]
    assert [4, 0, 0] == [link.nvlinks for link in described("rtx3090:4").gpus[0].links]


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

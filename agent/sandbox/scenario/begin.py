"""First steps of the scenario: start the agent, place pods, use their GPUs."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from agent.core.allocation.answered import QUIET
from agent.core.errors import MalformedText
from agent.core.inventory.share import Share
from agent.core.inventory.slices import MIB
from agent.host.clock import SystemClock
from agent.sandbox.apiserver import ApiCall
from agent.sandbox.hami_core import HAMI_2_9_0, HamiCoreRegion
from agent.sandbox.lab.cluster import RESOURCE
from agent.sandbox.lab.web import scrape
from agent.sandbox.scenario.facts import (
    answers,
    differences,
    is_locked,
    is_running,
    parsed,
    pod_facts,
    registered_gpus,
)
from agent.sandbox.scenario.stage import PATIENCE, Stage, counted, milliseconds
from agent.sandbox.scenario.workloads import Workload, fitting, too_big
from agent.wire.v1beta1 import ContainerAllocateResponse

CACHE: Final = "CUDA_DEVICE_MEMORY_SHARED_CACHE"
"""The variable that names the region in the container."""
SERIES: Final = "hami_agent_container_memory_used_bytes"
PID: Final = 7
PART: Final = 4
"""A process takes one part in so many of its memory."""
PERCENT: Final = 35
LOOK: Final = 0.25
"""Seconds between two looks at the metrics."""

Use = Mapping[tuple[str, str, str], int]
"""Pod, container and index of the GPU → MiB."""


async def register(stage: Stage) -> None:
    """Start the agent. It registers, offers its slices and reports to the scheduler."""
    cluster = stage.cluster
    agent = await stage.start_agent()
    history = cluster.kubelet.history
    await stage.until(
        "registered", lambda: bool(history.of("registered")), lambda: "no Register call"
    )
    seconds = history.of("registered")[-1].elapsed - agent.started
    stage.settle("registered", f"{stage.measure('exec_to_registered', seconds)} after exec")
    await stage.until(
        "allocatable",
        lambda: cluster.allocatable() == stage.slices == _published(stage),
        lambda: f"{cluster.allocatable()} at the kubelet, {_published(stage)} on the Node",
    )
    stage.settle("allocatable", f"{_published(stage)} on the Node")
    await stage.until("annotation", lambda: bool(registered_gpus(cluster)), lambda: "no annotation")
    stage.settle("annotation", *_annotation(stage))


async def place(stage: Stage) -> None:
    """Place pods of every kind, one after the other; the last one cannot fit."""
    journal, user = stage.cluster.api.journal, stage.cluster.user
    await stage.until(
        "requests", lambda: journal.watches(user) >= 2, lambda: "the agent does not watch"
    )
    placed, begun = fitting(len(stage.gpus)), list[int]()
    for workload in placed:
        stage.record.note(f"pod {workload.name}: {workload.text}")
        begun.append(len(journal.calls))
        await run_pod(stage, workload)
        check_edits(stage, f"{workload.name}.edits", [workload.name])
        await _settled(stage, workload.name)
    calls, told, problems = list(journal.calls), list[str](), list[str]()
    for workload, start, end in zip(placed, begun, [*begun[1:], len(calls)], strict=True):
        made = [
            call
            for number, call in enumerate(calls)
            if call.user == user and call.verb != "watch"
            # The read after the release may come when the next pod is there.
            if call.name == workload.name
            or (start <= number < end and not (call.name and call.resource == "pods"))
        ]
        cost, unexplained = pod_requests(workload, made, _pauses(stage, workload.name))
        told.append(cost)
        problems += unexplained
    stage.settle("requests", "; ".join(told), problems)
    await _refuse(stage)


def pod_requests(
    workload: Workload, calls: Iterable[ApiCall], pauses: Sequence[float]
) -> tuple[str, list[str]]:
    """What a pod cost, in words, and each kind of request that is missing or that nothing explains.

    Explained are a patch of the pod, one of the Node (the release of its lock), a read before each
    answer and one after the release. After each of the `pauses` between two answers, in seconds,
    the agent may have written what was consumed so far: one more patch of the pod.
    """
    answers = sum(bool(wish.gpus) for wish in workload.wishes)
    most = Counter({"patch pods": 1 + len(pauses), "patch nodes": 1, "get pods": answers + 1})
    made = Counter(f"{call.verb} {call.resource}" for call in calls)
    told = ", ".join(f"{made[kind]} {kind}" for kind in most)
    cost = f"{workload.name} ({answers} answer{'s' * (answers > 1)}): {told}"
    if pauses and made["patch pods"] > 1:
        cost += f" (1 more: {max(pauses):.1f} s between two answers)"
    wrong = [f"{workload.name}: {count} {kind} too many" for kind, count in (made - most).items()]
    wrong += [f"{workload.name}: no {kind}" for kind in list(most)[:2] if not made[kind]]
    return cost, wrong


def _pauses(stage: Stage, name: str) -> list[float]:
    """Seconds from each Allocate for a pod to its next answer, if more than the agent waits."""
    uid, history = pod_facts(stage.cluster, name).uid, stage.cluster.kubelet.history
    asked = [event.elapsed for event in history.of("allocating") if event.pod == uid]
    given = [event.elapsed for event in history.of("allocated") if event.pod == uid]
    gaps = [after - before for before, after in zip(asked, given[1:], strict=False)]
    return [gap for gap in gaps if gap >= QUIET.total_seconds()]


async def run_pod(stage: Stage, workload: Workload, claim: str = "") -> None:
    """Submit a pod and wait until it runs. Raises Unmet."""
    claim = claim or f"{workload.name}.running"
    begun = stage.now
    stage.cluster.submit(workload.pod())
    name = workload.name
    await stage.until(
        claim,
        lambda: is_running(stage.cluster, name),
        lambda: f"{pod_facts(stage.cluster, name).phase}: {pod_facts(stage.cluster, name).reason}",
    )
    stage.placed.append(name)
    if claim == f"{name}.running":
        stage.settle(claim, f"{milliseconds(stage.now - begun)} after its creation")


def check_edits(stage: Stage, claim: str, names: list[str]) -> None:
    """Check that every container of these pods has the shares that the scheduler wrote."""
    kept = answers(stage.cluster)
    problems: list[str] = []
    for name in names:
        pod = pod_facts(stage.cluster, name)
        problems += differences(pod, kept, stage.gpus, stage.cluster.places)
    stage.settle(claim, _told(stage, names), problems)


async def _settled(stage: Stage, name: str) -> None:
    cluster, claim, begun = stage.cluster, f"{name}.settled", stage.now
    await stage.until(
        claim,
        lambda: pod_facts(cluster, name).is_settled and not is_locked(cluster),
        lambda: f"lock {is_locked(cluster)}, {dict(pod_facts(cluster, name).notes)}",
    )
    stage.settle(claim, f"{milliseconds(stage.now - begun)} later")


async def _refuse(stage: Stage) -> None:
    most = max(gpu.memory_mib or 0 for gpu in stage.gpus.values())
    workload = too_big(most)
    stage.record.note(f"pod {workload.name}: {workload.text}")
    stage.cluster.submit(workload.pod())
    await stage.until(
        "too-big.pending",
        lambda: bool(pod_facts(stage.cluster, workload.name).reason),
        lambda: "the scheduler gives no reason",
    )
    pod = pod_facts(stage.cluster, workload.name)
    problems = [] if pod.phase == "Pending" else [f"it is {pod.phase}"]
    stage.settle("too-big.pending", pod.reason, problems)


def _published(stage: Stage) -> int:
    return int(stage.cluster.node()["status"].get("allocatable", {}).get(RESOURCE, "0"))


def _annotation(stage: Stage) -> tuple[str, list[str]]:
    try:
        found = {gpu.uuid: gpu for gpu in registered_gpus(stage.cluster)}
    except MalformedText as error:
        return "", [str(error)]
    problems = [f"GPU {uuid} is not in it" for uuid in stage.gpus.keys() - found.keys()]
    for uuid, entry in found.items():
        gpu = stage.gpus.get(uuid)
        expected = (stage.split_count, gpu.memory_mib if gpu else None, True)
        if (entry.split_count, entry.registered_mib, entry.healthy) != expected:
            problems.append(f"GPU {entry.index} is registered as {entry}")
    sizes = ", ".join(map(str, sorted({entry.registered_mib for entry in found.values()})))
    return f"{counted(stage.split_count, 'slice')} and {sizes} MiB each", problems


def _told(stage: Stage, names: list[str]) -> str:
    if len(names) > 1:
        return f"{len(names)} pods"
    shares = pod_facts(stage.cluster, names[0]).shares()
    return ", ".join(f"{name} {_shares(stage, given)}" for name, given in shares.items())


def _shares(stage: Stage, given: Sequence[Share]) -> str:
    """The shares in words, such as `GPU 3 4096 MiB 30 %`."""
    shares = [
        f"GPU {stage.gpus[share.uuid].index} {share.memory_mib} MiB"
        + (f" {share.core_percent} %" if share.core_percent else "")
        for share in given
    ]
    return " + ".join(shares) or "none"


async def use_gpus(stage: Stage) -> None:
    """One process of each container takes memory and starts a kernel; the metrics show it."""
    stage.record.note("a process of each container uses its GPUs")
    begun = stage.now
    expected = dict(_begin(stage))
    stage.record.awaited = stage.record.promised["used"]
    found = await _metered(stage)
    while found != expected and stage.now < begun + PATIENCE:
        await asyncio.sleep(LOOK)
        found = await _metered(stage)
    text = f"{sum(expected.values())} MiB in {len(expected)} shares"
    problems = [] if found == expected else [f"the metrics have {found}, not {expected}"]
    stage.settle("used", f"{text} after {milliseconds(stage.now - begun)}", problems)


def _begin(stage: Stage) -> Iterator[tuple[tuple[str, str, str], int]]:
    """Start the processes. Yields what each then uses of each GPU."""
    kept = answers(stage.cluster)
    for name in stage.placed:
        pod = pod_facts(stage.cluster, name)
        shares = pod.shares()
        for container in (one["name"] for one in pod.pod["spec"]["containers"]):
            if not shares[container]:
                continue
            gpus = sorted(shares[container], key=lambda share: stage.gpus[share.uuid].pci)
            answer = parsed(kept[pod.uid, container])
            for share, mib in zip(gpus, _start(answer, gpus), strict=True):
                stage.cluster.hardware.use(share.uuid, mib, PERCENT)
                yield (name, container, str(stage.gpus[share.uuid].index)), mib


def _start(answer: ContainerAllocateResponse, gpus: list[Share]) -> list[int]:
    """Start a process with what the kubelet keeps for its container; the MiB that it takes."""
    cache = PurePosixPath(answer.envs[CACHE])
    mounts = {mount.container_path: mount.host_path for mount in answer.mounts}
    path = Path(mounts[str(cache.parent)]) / cache.name
    region, now = HamiCoreRegion(path, HAMI_2_9_0), SystemClock().now()
    process = region.start(PID, dict(answer.envs), now)
    region.name_gpus([share.uuid for share in gpus])
    taken = [share.memory_mib // PART for share in gpus]
    for gpu, mib in enumerate(taken):
        process.allocate(gpu, mib * MIB)
        process.watch(gpu, PERCENT)
        process.launch(now, gpu)
    return taken


async def _metered(stage: Stage) -> Use:
    """What the agent's metrics say."""
    address = stage.cluster.web_address
    samples = await scrape(address) if address else []
    return {
        (labels["pod"], labels["container"], labels["gpu"]): int(value) // MIB
        for name, labels, value in samples
        if name == SERIES
    }

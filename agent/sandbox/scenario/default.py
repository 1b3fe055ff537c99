"""The steps of the default scenario, and running them.

First the agent starts, pods are placed and their GPUs used. Then come faults: a lost GPU, a
restarted kubelet, a killed agent, a burst; and the end.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Final

from agent.errors import AgentError, MalformedText, StateCorrupt
from agent.kit.timing import SystemClock
from agent.model import MIB, Share
from agent.sandbox.apiserver import ApiCall
from agent.sandbox.hami_core import HamiCoreRegion
from agent.sandbox.hardware_talk import HardwareRequest, ask
from agent.sandbox.lab.cluster import RESOURCE, SandboxCluster, scrape
from agent.sandbox.scenario.facts import (
    answers,
    differences,
    is_locked,
    is_running,
    ledger_on_disk,
    parsed,
    pod_facts,
    registered_gpus,
    starts,
)
from agent.sandbox.scenario.stage import (
    BURST,
    KEPT_IDLE,
    PATIENCE,
    DiskWatch,
    Moment,
    ScenarioRecord,
    Stage,
    SumWatch,
    Unmet,
    Workload,
    counted,
    fitting,
    milliseconds,
    pinned,
    plain,
    promises,
    too_big,
)
from agent.sandbox.store import NotFoundError, StatusError
from agent.settle import QUIET
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
FALLEN = 79
"""The XID of a GPU that has fallen off the bus."""
BURST_PATIENCE = 45.0
UNASKED = 1.0
"""Seconds without a request before the idle step is measured."""
Step = Callable[[Stage], Awaitable[None]]
FEWEST_GPUS: Final = 3
"""The scenario needs this many: one pod requests two GPUs, and one GPU is lost."""
NEEDED_SLICES: Final = 24
"""Slices that the pods need on the GPUs that stay healthy."""
FAULTS: Final = (AgentError, StatusError, OSError, ValueError, KeyError)
"""The errors of a step if a broken agent leaves a malformed file or page."""


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
    placed, begun = fitting(len(stage.gpus)), len(journal.calls)
    for workload in placed:
        stage.record.note(f"pod {workload.name}: {workload.text}")
        await run_pod(stage, workload)
        check_edits(stage, f"{workload.name}.edits", [workload.name])
        await _settled(stage, workload.name)
    calls = [call for call in islice(journal.calls, begun, None) if call.user == user]
    pauses = [gap for workload in placed for gap in _pauses(stage, workload.name)]
    stage.settle("requests", *pod_requests(placed, calls, pauses))
    workload = too_big(max(gpu.memory_mib or 0 for gpu in stage.gpus.values()))
    stage.record.note(f"pod {workload.name}: {workload.text}")
    refused = await _stays_pending(stage, workload, "too-big.pending")
    stage.settle("too-big.pending", *refused)


def pod_requests(
    workloads: Sequence[Workload], calls: Iterable[ApiCall], pauses: Sequence[float]
) -> tuple[str, list[str]]:
    """What the pods cost, in words, and each kind of request that is missing or unexplained.

    For each pod are explained a patch of it, one of the Node (the release of its lock), a read
    before each answer and one after the release. After each of the `pauses` between two answers, in
    seconds, the agent may have written what was consumed so far: one more patch of the pod.
    """
    pods = len(workloads)
    answers = sum(bool(wish.gpus) for workload in workloads for wish in workload.wishes)
    most = Counter({"patch pods": pods + len(pauses), "patch nodes": pods})
    most["get pods"] = answers + pods
    made = Counter(f"{call.verb} {call.resource}" for call in calls if call.verb != "watch")
    cost = f"{pods} pods with {answers} answers: "
    cost += ", ".join(f"{made[kind]} {kind}" for kind in most)
    if pauses and made["patch pods"] > pods:
        cost += f" (up to {max(pauses):.1f} s between two answers)"
    wrong = [f"{count} {kind} too many" for kind, count in (made - most).items()]
    wrong += [f"only {made[kind]} {kind}" for kind in list(most)[:2] if made[kind] < pods]
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


async def _stays_pending(stage: Stage, workload: Workload, claim: str) -> tuple[str, list[str]]:
    """Submit a pod that has no place. Why it is not scheduled, and what is wrong. Raises Unmet."""
    stage.cluster.submit(workload.pod())
    await stage.until(
        claim,
        lambda: bool(pod_facts(stage.cluster, workload.name).reason),
        lambda: f"the scheduler gives no reason for pod {workload.name}",
    )
    pod = pod_facts(stage.cluster, workload.name)
    return pod.reason, [] if pod.phase == "Pending" else [f"{pod.name} is {pod.phase}"]


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
    texts = []
    for name, given in pod_facts(stage.cluster, names[0]).shares().items():
        shares = [
            f"GPU {stage.gpus[share.uuid].index} {share.memory_mib} MiB"
            + (f" {share.core_percent} %" if share.core_percent else "")
            for share in given
        ]
        texts.append(f"{name} {' + '.join(shares) or 'none'}")
    return ", ".join(texts)


async def use_gpus(stage: Stage) -> None:
    """One process of each container takes memory and starts a kernel; the metrics show it."""
    stage.record.note("a process of each container uses its GPUs")
    begun = stage.now
    expected = dict(_begin(stage))
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
        for container in (one["name"] for one in stage.cluster.pod(name)["spec"]["containers"]):
            gpus = sorted(shares[container], key=lambda share: stage.gpus[share.uuid].pci)
            if not gpus:
                continue
            answer = parsed(kept[pod.uid, container])
            for share, mib in zip(gpus, _start(answer, gpus), strict=True):
                stage.cluster.hardware.use(share.uuid, mib, PERCENT)
                yield (name, container, str(stage.gpus[share.uuid].index)), mib


def _start(answer: ContainerAllocateResponse, gpus: list[Share]) -> list[int]:
    """Start a process with what the kubelet keeps for its container; the MiB that it takes."""
    cache = PurePosixPath(answer.envs[CACHE])
    mounts = {mount.container_path: mount.host_path for mount in answer.mounts}
    path = Path(mounts[str(cache.parent)]) / cache.name
    region, now = HamiCoreRegion(path), SystemClock().now()
    process = region.start(PID, dict(answer.envs), now)
    region.name_gpus([share.uuid for share in gpus])
    taken = [share.memory_mib // PART for share in gpus]
    for gpu, mib in enumerate(taken):
        process.allocate(gpu, mib * MIB)
        process.watch(gpu, PERCENT)
    process.launch(now)
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


async def lose_gpu(stage: Stage) -> None:
    """XID 79 on the GPU of the first pod: the list and the annotation drop it, its pod stays."""
    cluster, victim = stage.cluster, stage.placed[0]
    (share,) = next(iter(pod_facts(cluster, victim).shares().values()))
    stage.ill = share.uuid
    index = stage.gpus[share.uuid].index
    before = starts(cluster, stage.placed)
    stage.record.note(f"XID 79 on GPU {index}, which pod {victim} uses")
    begun = stage.now
    await ask(cluster.places.hardware_socket, HardwareRequest("xid", share.uuid, FALLEN))
    await _offered(stage, "xid.allocatable", begun, "xid_to_kubelet")
    await stage.until(
        "xid.annotation", lambda: _ill(stage) == [index], lambda: f"unhealthy: {_ill(stage)}"
    )
    stage.settle("xid.annotation", f"unhealthy: GPU {index}")
    phase = pod_facts(cluster, victim).phase
    stage.settle("xid.running", f"{victim} is {phase}", _disturbed(stage, before))
    await _avoid(stage)


async def restart_kubelet(stage: Stage) -> None:
    """Restart the kubelet: the agent registers again, and containers are not affected."""
    cluster = stage.cluster
    before, begun = starts(cluster, stage.placed), stage.now
    stage.record.note("the kubelet restarts")
    await cluster.kubelet.restart()
    (started,) = stage.seen(begun, "started")
    await _offered(stage, "kubelet.allocatable", started.elapsed, "kubelet_socket_to_allocatable")
    await _readmitted(stage, "kubelet.untouched", begun)
    _untouched(stage, "kubelet.untouched", before, begun)


async def kill_agent(stage: Stage) -> None:
    """SIGKILL: the next agent offers the healthy GPUs and has every row of the ledger."""
    cluster = stage.cluster
    before, rows = starts(cluster, stage.placed), ledger_on_disk(cluster)
    stage.record.note(f"SIGKILL to the agent, pid {cluster.agent.pid}")
    begun = stage.now
    await cluster.kill_agent()
    await stage.start_agent()
    await _offered(stage, "kill.allocatable", begun, "kill_to_serving")
    await stage.until(
        "kill.rows", lambda: cluster.web_address is not None, lambda: "no web address in its log"
    )
    held = sum(
        value
        for name, _, value in await scrape(cluster.web_address or "")
        if name == "hami_agent_slices_allocated"
    )
    expected = sum(map(len, rows.held_ids.values()))
    lost = (
        [] if held == expected else [f"it holds {counted(held, 'slice')}, {expected} were answered"]
    )
    stage.settle("kill.rows", f"{counted(len(rows.rows), 'row')}, {counted(held, 'slice')}", lost)
    _untouched(stage, "kill.untouched", before, begun)


async def _offered(stage: Stage, claim: str, begun: float, measure: str) -> None:
    """Wait for the slices of the healthy GPUs. No list until then may offer more."""
    cluster = stage.cluster
    await stage.until(
        claim,
        # The number alone may be that of the list before.
        lambda: cluster.allocatable() == stage.slices and bool(stage.seen(begun, "listed")),
        lambda: f"{cluster.allocatable()} allocatable",
    )
    lists = stage.seen(begun, "listed")
    too_many = [f"a list offered {len(e.ids)}" for e in lists if len(e.ids) > stage.slices]
    capacity, whole = cluster.kubelet.capacity(RESOURCE), len(stage.gpus) * stage.split_count
    if capacity != whole:
        too_many.append(f"the capacity is {capacity}, must stay {whole}")
    stage.settle(claim, f"after {stage.measure(measure, lists[-1].elapsed - begun)}", too_many)


async def _avoid(stage: Stage) -> None:
    claim = "xid.avoided"
    reason, problems = await _stays_pending(stage, pinned(stage.ill or ""), claim)
    await run_pod(stage, plain("after"), claim)
    given = pod_facts(stage.cluster, "after").shares().values()
    chosen = {share.uuid for shares in given for share in shares}
    problems += ["a new pod is on it"] if stage.ill in chosen else []
    places = ", ".join(f"GPU {stage.gpus[uuid].index}" for uuid in chosen)
    stage.settle(claim, f"a new pod runs on {places}; {reason}", problems)


def _ill(stage: Stage) -> list[int]:
    return [gpu.index for gpu in registered_gpus(stage.cluster) if not gpu.healthy]


def _disturbed(stage: Stage, before: object) -> list[str]:
    """What has happened to running pods, whose containers had been started so often `before`."""
    pods = [pod_facts(stage.cluster, name) for name in stage.placed]
    after = starts(stage.cluster, stage.placed)
    found = [f"{pod.name} is {pod.phase}" for pod in pods if not pod.is_running]
    return found + [f"containers were started: {before} before, {after} now"] * (after != before)


def _untouched(stage: Stage, claim: str, before: object, since: float) -> None:
    """Check that no pod was affected: no start, no rejection, no Allocate."""
    events = stage.seen(since, "allocating", "rejected")
    problems = [f"{event.kind} {event.container or event.pod}" for event in events]
    problems += _disturbed(stage, before)
    stage.settle(claim, f"{len(stage.placed)} pods run on, no Allocate", problems)


async def _readmitted(stage: Stage, claim: str, since: float) -> None:
    """Wait until a new kubelet has admitted or rejected every pod. Raises Unmet."""
    uids = {pod_facts(stage.cluster, name).uid for name in stage.placed}
    await stage.until(
        claim,
        lambda: uids <= {event.pod for event in stage.seen(since, "admitted", "rejected")},
        lambda: "the new kubelet has not admitted every pod",
    )


async def kill_in_burst(stage: Stage) -> None:
    """Create many pods at once; SIGKILL after a third of them. The scheduler continues."""
    cluster = stage.cluster
    names = [f"burst-{number:02}" for number in range(1, BURST + 1)]
    begun = stage.now
    for name in names:
        cluster.submit(plain(name).pod())
    stage.record.note(f"{BURST} pods at once, and a SIGKILL during their start")
    await stage.until(
        "burst.pods",
        lambda: len(stage.seen(begun, "allocated")) >= BURST // 3,
        lambda: f"{len(stage.seen(begun, 'allocated'))} were answered",
        BURST_PATIENCE,
    )
    gap = stage.now
    await cluster.kill_agent()
    stage.record.note(f"SIGKILL after {counted(len(stage.seen(begun, 'allocated')), 'answer')}")
    await stage.start_agent()
    await stage.until(
        "burst.pods",
        lambda: all(_is_decided(stage, name) for name in names) and bool(stage.seen(gap, "listed")),
        lambda: f"undecided: {[n for n in names if not _is_decided(stage, n)]}",
        BURST_PATIENCE,
    )
    stage.record.measured["burst_to_decided"] = round(stage.now - begun, 6)
    served = [name for name in names if pod_facts(cluster, name).is_running]
    _judge_rejected(stage, [name for name in names if name not in served], gap)
    check_edits(stage, "burst.edits", served)
    stage.placed += served
    stage.settle("burst.durable", *_durable(stage))
    await stage.until(
        "burst.lock", lambda: not is_locked(cluster), lambda: str(cluster.node_annotations())
    )
    stage.settle("burst.lock", "free")


async def lose_records(stage: Stage) -> None:
    """Restart the kubelet without its checkpoint; then a container dies and is allocated again."""
    cluster, name = stage.cluster, stage.placed[1]
    pod = pod_facts(cluster, name)
    (container,) = [one for one, given in pod.shares().items() if given]
    before = answers(cluster)[pod.uid, container]
    begun = stage.now
    stage.record.note(f"the kubelet loses its records; {name}/{container} dies")
    await cluster.kubelet.restart(lose_checkpoint=True)
    await _readmitted(stage, "replay.edits", begun)
    rejected = [f"{event.pod}: {event.text}" for event in stage.seen(begun, "rejected")]
    await cluster.end_container(pod.uid, container)
    await stage.until(
        "replay.edits",
        lambda: (pod.uid, container) in answers(cluster) and pod_facts(cluster, name).is_running,
        lambda: "; ".join(e.text for e in stage.seen(begun, "allocate_refused")) or "not asked",
        PATIENCE,
    )
    after = answers(cluster)[pod.uid, container]
    wrong = rejected if before == after else [f"{parsed(before)} before, {parsed(after)} after"]
    stage.settle("replay.edits", f"{len(after)} bytes for {name}/{container}", wrong)


async def idle(stage: Stage) -> None:
    """Check the API server's journal during a time without work."""
    cluster, claim = stage.cluster, "idle"
    journal, user = cluster.api.journal, cluster.user
    if not await _is_quiet(stage):
        stage.settle(claim, "", [f"no {UNASKED:g} s without a request in {PATIENCE:g} s"])
        return
    counts = journal.writes(user), journal.reads(user), journal.watches(user)
    stage.record.note(f"watching the API server for {KEPT_IDLE:g} s")
    await asyncio.sleep(KEPT_IDLE)
    spent = journal.writes(user), journal.reads(user), journal.watches(user)
    writes, reads, watches = (after - before for after, before in zip(spent, counts, strict=True))
    standing = cluster.api.open_watches
    found = ", ".join(
        (
            counted(writes, "write"),
            counted(reads, "read"),
            f"{watches} new {'watch' if watches == 1 else 'watches'} beside {standing}",
        )
    )
    is_idle = (writes, reads, watches, standing) == (0, 0, 0, 2)
    stage.settle(claim, found, [] if is_idle else [found])


async def stop(stage: Stage) -> None:
    """SIGTERM: exit code 0, no plugin socket left. Then check the sums of all answers."""
    cluster, begun = stage.cluster, stage.now
    sums = stage.sums
    most = f"{sums.most.memory_mib} MiB, {sums.most.core_percent} %, "
    most += f"{counted(sums.most.slots, 'slice')} of one GPU"
    unseen = [] if sums.checks else ["no answer was checked"]
    stage.settle("sums", f"{most}; {counted(sums.checks, 'check')}", [*sums.problems, *unseen])
    looked = [] if stage.disk.checks else ["no answer was checked"]
    found = f"{counted(stage.disk.checks, 'answer')}, each checked as it arrived"
    stage.settle("disk_first", found, [*stage.disk.problems, *looked])
    code = await cluster.stop_agent()
    left = [
        path.name for path in cluster.places.plugins.glob("*.sock") if path.name != "kubelet.sock"
    ]
    problems = [f"exit code {code}"] * bool(code) + [f"{name} is left" for name in left]
    stage.settle(
        "stop", f"exit 0 after {stage.measure('sigterm_to_exit', stage.now - begun)}", problems
    )


def _is_decided(stage: Stage, name: str) -> bool:
    try:
        pod = pod_facts(stage.cluster, name)
    except NotFoundError:
        return False
    return pod.phase == "Failed" or (pod.is_running and pod.is_settled)


def _judge_rejected(stage: Stage, names: list[str], gap: float) -> None:
    """Check that pods were rejected only between the SIGKILL and the next list."""
    back = stage.seen(gap, "listed")[0].elapsed
    when = {event.pod: event.elapsed for event in stage.seen(gap, "rejected")}
    pods = [pod_facts(stage.cluster, name) for name in names]
    late = [
        f"{pod.name} was rejected outside the gap: {pod.reason}"
        for pod in pods
        if not gap <= when.get(pod.uid, 0.0) <= back
    ]
    served = BURST - len(names)
    stage.settle("burst.pods", f"{served} run, {len(names)} rejected in the gap", late)


def _durable(stage: Stage) -> tuple[str, list[str]]:
    """Check that each answer the kubelet keeps for an existing pod is a row with equal envs."""
    cluster = stage.cluster
    try:
        rows = {
            (str(row.key.pod_uid), row.key.container): dict(row.edits.envs)
            for row in ledger_on_disk(cluster).rows
        }
    except (OSError, StateCorrupt) as error:
        return "", [str(error)]
    alive = {pod_facts(cluster, name).uid for name in stage.placed}
    kept = {owner: answer for owner, answer in answers(cluster).items() if owner[0] in alive}
    problems = [
        f"{container} of pod {uid} has {rows.get((uid, container), 'no row')} on disk"
        for (uid, container), answer in kept.items()
        if rows.get((uid, container)) != dict(parsed(answer).envs)
    ]
    found = f"{counted(len(kept), 'answer')} at the kubelet, {counted(len(rows), 'row')} on disk"
    return found, problems


async def _is_quiet(stage: Stage) -> bool:
    """Wait for UNASKED seconds without a request, when the effects of the last step are done."""
    journal, deadline = stage.cluster.api.journal, stage.now + PATIENCE
    while stage.now < deadline:
        count = sum(journal.counts.values())
        await asyncio.sleep(UNASKED)
        if sum(journal.counts.values()) == count:
            return True
    return False


OPENING: Final[Sequence[Step]] = (register, place, use_gpus)
"""The steps with which an interactive sandbox starts."""

DEFAULT: Final[Sequence[Step]] = (
    *OPENING,
    lose_gpu,
    restart_kubelet,
    kill_agent,
    kill_in_burst,
    lose_records,
    idle,
    stop,
)


def open_stage(cluster: SandboxCluster, split_count: int, tell: Callable[[Moment], None]) -> Stage:
    """A new stage. `tell` gets every entry of the timeline."""
    gpus = {state.gpu.uuid: state.gpu for state in cluster.hardware.states}
    sums = SumWatch(cluster, gpus, split_count)
    cluster.kubelet.history.listen(sums.hear)
    disk = DiskWatch(cluster)
    cluster.kubelet.history.listen(disk.hear)
    record = ScenarioRecord(promises(len(gpus), split_count), tell)
    return Stage(cluster, record, gpus, split_count, sums, disk)


async def act(stage: Stage, steps: Sequence[Step] = DEFAULT) -> ScenarioRecord:
    """Run the steps until one cannot continue. Claims after it stay unchecked."""
    try:
        for step in steps:
            await step(stage)
    except Unmet as unmet:
        stage.record.note(f"stopped at claim {unmet}")
    except FAULTS as fault:
        stage.record.note(f"stopped: {type(fault).__name__}: {fault}")
    return stage.record

"""The steps of the default scenario, and running them.

First the agent starts, pods are placed and their GPUs used. Then come faults: a lost GPU, a
restarted kubelet, a killed agent, a burst; and the end.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from agent.errors import AgentError
from agent.kit.timing import SystemClock
from agent.kit.units import counted
from agent.model import MIB, Share
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
    Wish,
    Workload,
    fitting,
    milliseconds,
    plain,
    promises,
)
from agent.sandbox.store import StatusError
from agent.settle import QUIET
from agent.wire.v1beta1 import ContainerAllocateResponse

SERIES: Final = "hami_agent_container_memory_used_bytes"
PERCENT: Final = 35
BURST_PATIENCE: Final = 45.0
UNASKED: Final = 1.0
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
    agent, history = await stage.start_agent(), cluster.kubelet.history
    await stage.until("registered", lambda: bool(history.of("registered")))
    seconds = history.of("registered")[-1].elapsed - agent.started
    stage.settle("registered", f"{stage.measure('exec_to_registered', seconds)} after exec")

    slices = stage.slices
    await stage.until("allocatable", lambda: cluster.allocatable() == slices == stage.published)
    stage.settle("allocatable", f"{stage.published} on the Node")
    await stage.until("annotation", lambda: bool(registered_gpus(cluster)))

    found = {gpu.uuid: gpu for gpu in registered_gpus(cluster)}
    problems = [f"GPU {uuid} is not in it" for uuid in stage.gpus.keys() - found.keys()]
    for uuid, entry in found.items():
        gpu = stage.gpus.get(uuid)
        expected = (stage.split_count, gpu.memory_mib if gpu else None, True)
        if (entry.split_count, entry.registered_mib, entry.healthy) != expected:
            problems.append(f"GPU {entry.index} is registered as {entry}")
    sizes = ", ".join(map(str, sorted({entry.registered_mib for entry in found.values()})))
    told = f"{counted(stage.split_count, 'slice')} and {sizes} MiB each"
    stage.settle("annotation", told, problems)


async def place(stage: Stage) -> None:
    """Place pods of every kind, one after the other; the last one cannot fit."""
    api = stage.cluster.api
    await stage.until("requests", lambda: api.open_watches >= 2)
    placed, before = fitting(len(stage.gpus)), api.asked.copy()
    for workload in placed:
        stage.record.note(f"pod {workload.name}: {workload.text}")
        await run_pod(stage, workload)
        check_edits(stage, f"{workload.name}.edits", [workload.name])
        await _settled(stage, workload.name)
    pauses = [gap for workload in placed for gap in _pauses(stage, workload.name)]
    stage.settle("requests", *pod_requests(placed, _asked_since(stage, before), pauses))
    memory = 2 * max(gpu.memory_mib or 0 for gpu in stage.gpus.values())
    workload = Workload("too-big", "more memory than a GPU has", (Wish("main", 1, memory),))
    stage.record.note(f"pod {workload.name}: {workload.text}")
    stage.settle("too-big.pending", *await _stays_pending(stage, workload, "too-big.pending"))


def pod_requests(
    workloads: Sequence[Workload], made: Counter[str], pauses: Sequence[float]
) -> tuple[str, list[str]]:
    """What the pods cost, in words, and each kind of request that is missing or unexplained.

    `made`: how many of each kind the agent made, such as `patch pods`.
    For each pod are explained a patch of it, one of the Node (the release of its lock), a read
    before each answer and one after the release. After each of the `pauses` between two answers, in
    seconds, the agent may have written what was consumed so far: one more patch of the pod.
    """
    pods = len(workloads)
    answers = sum(bool(wish.gpus) for workload in workloads for wish in workload.wishes)
    most = Counter({"patch pods": pods + len(pauses), "patch nodes": pods})
    most["get pods"] = answers + pods
    cost = f"{pods} pods with {answers} answers: "
    cost += ", ".join(f"{made[kind]} {kind}" for kind in most)
    if pauses and made["patch pods"] > pods:
        cost += f" (up to {max(pauses):.1f} s between two answers)"
    extra = [(kind, count) for kind, count in (made - most).items() if "watch" not in kind]
    wrong = [f"{count} {kind} too many" for kind, count in extra]
    wrong += [f"only {made[kind]} {kind}" for kind in list(most)[:2] if made[kind] < pods]
    return cost, wrong


def _asked_since(stage: Stage, before: Counter[tuple[str, str, str]]) -> Counter[str]:
    """How many requests of each kind the agent has made since then."""
    asked = (stage.cluster.api.asked - before).items()
    user = stage.cluster.user
    return Counter({f"{verb} {what}": n for (who, verb, what), n in asked if who == user})


def _pauses(stage: Stage, name: str) -> list[float]:
    """Seconds from each Allocate for a pod to its next answer, if more than the agent waits."""
    uid, history = pod_facts(stage.cluster, name).uid, stage.cluster.kubelet.history
    asked = [event.elapsed for event in history.of("allocating") if event.pod == uid]
    given = [event.elapsed for event in history.of("allocated") if event.pod == uid]
    gaps = [after - before for before, after in zip(asked, given[1:], strict=False)]
    return [gap for gap in gaps if gap >= QUIET.total_seconds()]


async def run_pod(stage: Stage, workload: Workload, claim: str = "") -> None:
    """Submit a pod and wait until it runs. Raises Unmet."""
    name, begun = workload.name, stage.now
    stage.cluster.submit(workload.pod())
    await stage.until(claim or f"{name}.running", lambda: is_running(stage.cluster, name))
    stage.placed.append(name)
    if not claim:
        stage.settle(f"{name}.running", f"{milliseconds(stage.now - begun)} after its creation")


def check_edits(stage: Stage, claim: str, names: list[str]) -> None:
    """Check that every container of these pods has the shares that the scheduler wrote."""
    kept, problems, told = answers(stage.cluster), list[str](), list[str]()
    for name in names:
        pod = pod_facts(stage.cluster, name)
        problems += differences(pod, kept, stage.gpus, stage.cluster.places)
        for container, given in pod.shares().items():
            places = (f"GPU {stage.gpus[one.uuid].index} {one.memory_mib} MiB" for one in given)
            told.append(f"{container} {' + '.join(places) or 'none'}")
    stage.settle(claim, ", ".join(told) if len(names) == 1 else f"{len(names)} pods", problems)


async def _settled(stage: Stage, name: str) -> None:
    cluster, claim, begun = stage.cluster, f"{name}.settled", stage.now
    await stage.until(claim, lambda: pod_facts(cluster, name).is_settled and not is_locked(cluster))
    stage.settle(claim, f"{milliseconds(stage.now - begun)} later")


async def _stays_pending(stage: Stage, workload: Workload, claim: str) -> tuple[str, list[str]]:
    """Submit a pod that has no place. Why it is not scheduled, and what is wrong. Raises Unmet."""
    stage.cluster.submit(workload.pod())
    await stage.until(claim, lambda: bool(pod_facts(stage.cluster, workload.name).reason))
    pod = pod_facts(stage.cluster, workload.name)
    return pod.reason, [] if pod.phase == "Pending" else [f"{pod.name} is {pod.phase}"]


async def use_gpus(stage: Stage) -> None:
    """One process of each container takes memory and starts a kernel; the metrics show it."""
    stage.record.note("a process of each container uses its GPUs")
    begun = stage.now
    expected = dict(_begin(stage))
    found = await _metered(stage)
    while found != expected and stage.now < begun + PATIENCE:
        await asyncio.sleep(0.25)
        found = await _metered(stage)
    text = f"{sum(expected.values())} MiB in {len(expected)} shares"
    is_seen = bool(expected) and found == expected
    problems = [] if is_seen else [f"the metrics have {found}, not {expected}"]
    stage.settle("used", f"{text} after {milliseconds(stage.now - begun)}", problems)


def _begin(stage: Stage) -> Iterator[tuple[tuple[str, str, str], int]]:
    """Start the processes. Yields what each then uses of each GPU."""
    kept = answers(stage.cluster)
    for pod in (pod_facts(stage.cluster, name) for name in stage.placed):
        running = stage.cluster.kubelet.node.pods[pod.uid].running
        for container in (name for name, given in pod.shares().items() if given):
            if container not in running:
                continue
            gpus = sorted(pod.shares()[container], key=lambda share: stage.gpus[share.uuid].pci)
            answer = parsed(kept[pod.uid, container])
            for share, mib in zip(gpus, _start(answer, gpus), strict=True):
                stage.cluster.hardware.use(share.uuid, (pod.uid, container), mib, PERCENT)
                yield (pod.name, container, str(stage.gpus[share.uuid].index)), mib


def _start(answer: ContainerAllocateResponse, gpus: list[Share]) -> list[int]:
    """Start a process with what the kubelet keeps for its container; the MiB that it takes."""
    cache = PurePosixPath(answer.envs["CUDA_DEVICE_MEMORY_SHARED_CACHE"])
    mounts = {mount.container_path: mount.host_path for mount in answer.mounts}
    region, now = HamiCoreRegion(Path(mounts[str(cache.parent)]) / cache.name), SystemClock().now()
    process = region.start(7, dict(answer.envs), now)
    region.name_gpus([share.uuid for share in gpus])
    taken = [share.memory_mib // 4 for share in gpus]
    for gpu, mib in enumerate(taken):
        process.allocate(gpu, mib * MIB)
        process.watch(gpu, PERCENT)
    process.launch(now)
    return taken


async def _metered(stage: Stage) -> Mapping[tuple[str, str, str], int]:
    """What the agent's metrics say: pod, container and index of the GPU → MiB."""
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
    await ask(cluster.places.hardware_socket, HardwareRequest("xid", share.uuid, 79))
    await _offered(stage, "xid.allocatable", begun, "xid_to_kubelet")

    def unhealthy() -> list[int]:
        return [gpu.index for gpu in registered_gpus(cluster) if not gpu.healthy]

    await stage.until("xid.annotation", lambda: unhealthy() == [index])
    stage.settle("xid.annotation", f"unhealthy: GPU {index}")
    phase = pod_facts(cluster, victim).phase
    stage.settle("xid.running", f"{victim} is {phase}", _disturbed(stage, before))

    pinned = Workload("pinned", "insists on one GPU", (Wish("main", 1, 1024),), gpu=share.uuid)
    reason, problems = await _stays_pending(stage, pinned, "xid.avoided")
    await run_pod(stage, plain("after"), "xid.avoided")
    given = pod_facts(cluster, "after").shares().values()
    chosen = {share.uuid for shares in given for share in shares}
    problems += ["a new pod is on it"] if stage.ill in chosen else []
    places = ", ".join(f"GPU {stage.gpus[uuid].index}" for uuid in chosen)
    stage.settle("xid.avoided", f"a new pod runs on {places}; {reason}", problems)


async def restart_kubelet(stage: Stage) -> None:
    """Restart the kubelet: the agent registers again, and containers are not affected."""
    before, begun = starts(stage.cluster, stage.placed), stage.now
    stage.record.note("the kubelet restarts")
    await stage.cluster.kubelet.restart()
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
    await cluster.agent.kill()
    await stage.start_agent()
    await _offered(stage, "kill.allocatable", begun, "kill_to_serving")
    await stage.until("kill.rows", lambda: cluster.web_address is not None)
    samples = await scrape(cluster.web_address or "")
    held = int(sum(value for name, _, value in samples if name == "hami_agent_slices_allocated"))
    expected = sum(map(len, rows.held_ids.values()))
    told = f"it holds {counted(held, 'slice')}, {expected} were answered"
    lost = [] if held == expected else [told]
    stage.settle("kill.rows", f"{counted(len(rows.rows), 'row')}, {counted(held, 'slice')}", lost)
    _untouched(stage, "kill.untouched", before, begun)


async def _offered(stage: Stage, claim: str, begun: float, measure: str) -> None:
    """Wait for the slices of the healthy GPUs. No list until then may offer more."""
    cluster = stage.cluster
    await stage.until(
        claim,
        # The number alone may be that of the list before.
        lambda: cluster.allocatable() == stage.slices and bool(stage.seen(begun, "listed")),
    )
    lists = stage.seen(begun, "listed")
    too_many = [f"a list offered {len(e.ids)}" for e in lists if len(e.ids) > stage.slices]
    capacity, whole = cluster.kubelet.capacity(RESOURCE), len(stage.gpus) * stage.split_count
    if capacity != whole:
        too_many.append(f"the capacity is {capacity}, must stay {whole}")
    stage.settle(claim, f"after {stage.measure(measure, lists[-1].elapsed - begun)}", too_many)


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
        claim, lambda: uids <= {event.pod for event in stage.seen(since, "admitted", "rejected")}
    )


async def kill_in_burst(stage: Stage) -> None:
    """Create many pods at once; SIGKILL after a third of them. The scheduler continues."""
    cluster, begun = stage.cluster, stage.now
    names = [f"burst-{number:02}" for number in range(1, BURST + 1)]
    for name in names:
        cluster.submit(plain(name).pod())
    stage.record.note(f"{BURST} pods at once, and a SIGKILL during their start")

    def answered() -> int:
        return len(stage.seen(begun, "allocated"))

    await stage.until("burst.pods", lambda: answered() >= BURST // 3, BURST_PATIENCE)
    gap = stage.now
    await cluster.agent.kill()
    stage.record.note(f"SIGKILL after {counted(answered(), 'answer')}")
    await stage.start_agent()

    def is_decided() -> bool:
        pods = [pod_facts(cluster, name) for name in names]
        decided = (p.phase == "Failed" or (p.is_running and p.is_settled) for p in pods)
        return all(decided) and bool(stage.seen(gap, "listed"))

    await stage.until("burst.pods", is_decided, BURST_PATIENCE)
    stage.record.measured["burst_to_decided"] = round(stage.now - begun, 6)
    served = [name for name in names if pod_facts(cluster, name).is_running]

    # Pods may be rejected only between the SIGKILL and the next list.
    back = stage.seen(gap, "listed")[0].elapsed
    when = {event.pod: event.elapsed for event in stage.seen(gap, "rejected")}
    rejected = [pod_facts(cluster, name) for name in names if name not in served]
    late = [
        f"{pod.name} was rejected outside the gap: {pod.reason}"
        for pod in rejected
        if not gap <= when.get(pod.uid, 0.0) <= back
    ]
    told = f"{len(served)} run, {len(rejected)} rejected in the gap"
    stage.settle("burst.pods", told, late)

    check_edits(stage, "burst.edits", served)
    stage.placed += served
    stage.settle("burst.durable", *_durable(stage))
    await stage.until("burst.lock", lambda: not is_locked(cluster))
    stage.settle("burst.lock", "free")


def _durable(stage: Stage) -> tuple[str, list[str]]:
    """Check that each answer the kubelet keeps for an existing pod is a row with equal envs."""
    found = ledger_on_disk(stage.cluster).rows
    rows = {(str(row.key.pod_uid), row.key.container): dict(row.edits.envs) for row in found}
    alive = {pod_facts(stage.cluster, name).uid for name in stage.placed}
    kept = {owner: one for owner, one in answers(stage.cluster).items() if owner[0] in alive}
    problems = [
        f"{container} of pod {uid} has {rows.get((uid, container), 'no row')} on disk"
        for (uid, container), answer in kept.items()
        if rows.get((uid, container)) != dict(parsed(answer).envs)
    ]
    told = f"{counted(len(kept), 'answer')} at the kubelet, {counted(len(rows), 'row')} on disk"
    return told, problems


async def lose_records(stage: Stage) -> None:
    """Restart the kubelet without its checkpoint; then a container dies and is allocated again."""
    cluster, name = stage.cluster, stage.placed[1]
    pod = pod_facts(cluster, name)
    (container,) = [one for one, given in pod.shares().items() if given]
    owner, begun = (pod.uid, container), stage.now
    before = answers(cluster)[owner]
    stage.record.note(f"the kubelet loses its records; {name}/{container} dies")
    await cluster.kubelet.restart(lose_checkpoint=True)
    await _readmitted(stage, "replay.edits", begun)
    rejected = [f"{event.pod}: {event.text}" for event in stage.seen(begun, "rejected")]
    await cluster.kubelet.container_died(*owner)
    await stage.until(
        "replay.edits", lambda: owner in answers(cluster) and pod_facts(cluster, name).is_running
    )
    after = answers(cluster)[owner]
    wrong = rejected if before == after else [f"{parsed(before)} before, {parsed(after)} after"]
    stage.settle("replay.edits", f"{len(after)} bytes for {name}/{container}", wrong)


async def idle(stage: Stage) -> None:
    """Check the API server's journal during a time without work."""
    api, deadline = stage.cluster.api, stage.now + PATIENCE
    before = Counter[tuple[str, str, str]]()
    while before != api.asked:  # effects of the last step are under way
        if stage.now > deadline:
            stage.settle("idle", "", [f"no {UNASKED:g} s without a request in {PATIENCE:g} s"])
            return
        before = api.asked.copy()
        await asyncio.sleep(UNASKED)
    stage.record.note(f"watching the API server for {KEPT_IDLE:g} s")
    await asyncio.sleep(KEPT_IDLE)
    made = [f"{n} {kind}" for kind, n in _asked_since(stage, before).items()]
    found = f"{', '.join(made) or 'no request'}, {api.open_watches} watches"
    stage.settle("idle", found, [found] if made or api.open_watches != 2 else [])


async def stop(stage: Stage) -> None:
    """SIGTERM: exit code 0, no plugin socket left. Then check the sums of all answers."""
    cluster, begun, sums, disk = stage.cluster, stage.now, stage.sums, stage.disk
    most = f"{sums.most.memory_mib} MiB, {sums.most.core_percent} %, "
    most += f"{counted(sums.most.slots, 'slice')} of one GPU; {counted(sums.checks, 'check')}"
    unseen = ["no answer was checked"]
    stage.settle("sums", most, sums.problems if sums.checks else unseen)
    checked = f"{counted(disk.checks, 'answer')}, each checked as it arrived"
    stage.settle("disk_first", checked, disk.problems if disk.checks else unseen)
    code = await cluster.agent.stop()
    left = {path.name for path in cluster.places.plugins.glob("*.sock")} - {"kubelet.sock"}
    problems = [f"exit code {code}"] * bool(code) + [f"{name} is left" for name in left]
    stage.settle(
        "stop", f"exit 0 after {stage.measure('sigterm_to_exit', stage.now - begun)}", problems
    )


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
    sums, disk = SumWatch(cluster, gpus, split_count), DiskWatch(cluster)
    cluster.kubelet.history.listen(sums.hear)
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

"""Steps with faults: a lost GPU, a restarted kubelet, a killed agent, a burst; and the end."""

import asyncio

from agent.core.errors import StateCorrupt
from agent.sandbox import hardware_talk as talk
from agent.sandbox.api_errors import NotFoundError
from agent.sandbox.hardware_talk import ask
from agent.sandbox.lab.cluster import RESOURCE
from agent.sandbox.lab.web import scrape
from agent.sandbox.scenario.begin import check_edits, run_pod
from agent.sandbox.scenario.facts import (
    answers,
    is_locked,
    ledger_on_disk,
    parsed,
    pod_facts,
    registered_gpus,
    starts,
)
from agent.sandbox.scenario.stage import KEPT_IDLE, PATIENCE, Stage, counted
from agent.sandbox.scenario.workloads import BURST, pinned, plain

FALLEN = 79
"""The XID of a GPU that has fallen off the bus."""
BURST_PATIENCE = 45.0
QUIET = 1.0
"""Seconds without a request before the idle step is measured."""


async def lose_gpu(stage: Stage) -> None:
    """XID 79 on the GPU of the first pod: the list and the annotation drop it, its pod stays."""
    cluster, victim = stage.cluster, stage.placed[0]
    (share,) = next(iter(pod_facts(cluster, victim).shares().values()))
    stage.ill = share.uuid
    index = stage.gpus[share.uuid].index
    before = starts(cluster, stage.placed)
    stage.record.note(f"XID 79 on GPU {index}, which pod {victim} uses")
    begun = stage.now
    await ask(cluster.places.hardware_socket, talk.XidRequest(gpu=share.uuid, xid=FALLEN))
    await _offered(stage, "xid.allocatable", begun, "xid_to_kubelet")
    await stage.until(
        "xid.annotation",
        lambda: _ill(stage) == [index],
        lambda: f"unhealthy: {_ill(stage)}",
    )
    stage.settle("xid.annotation", f"unhealthy: GPU {index}")
    problems = [f"{n} is {pod_facts(cluster, n).phase}" for n in _down(stage)]
    problems += _restarted(stage, before)
    stage.settle("xid.running", f"{victim} is {pod_facts(cluster, victim).phase}", problems)
    await _avoid(stage)


async def restart_kubelet(stage: Stage) -> None:
    """Restart the kubelet: the agent registers again, and containers are not affected."""
    cluster = stage.cluster
    before, begun = starts(cluster, stage.placed), stage.now
    stage.record.note("the kubelet restarts")
    await cluster.kubelet.restart()
    (started,) = stage.seen(begun, "started")
    await _offered(stage, "kubelet.allocatable", started.elapsed, "kubelet_socket_to_allocatable")
    await stage.until(
        "kubelet.untouched",
        lambda: (
            {pod_facts(stage.cluster, name).uid for name in stage.placed}
            <= {e.pod for e in stage.seen(begun, "admitted", "rejected")}
        ),
        lambda: "the new kubelet has not admitted every pod",
    )
    _untouched(stage, "kubelet.untouched", before, begun)


async def kill_agent(stage: Stage) -> None:
    """SIGKILL: the next agent offers the healthy GPUs and has every row of the ledger."""
    cluster = stage.cluster
    before, rows = starts(cluster, stage.placed), ledger_on_disk(cluster)
    stage.record.note(f"SIGKILL to the agent, pid {cluster.agent.pid}")
    begun = stage.now
    await cluster.kill_agent()
    agent = await stage.start_agent()
    await _offered(stage, "kill.allocatable", begun, "kill_to_serving")
    stage.record.measured["kill_exec_to_serving"] = round(
        cluster.kubelet.history.of("listed")[-1].elapsed - agent.started, 6
    )
    await stage.until(
        "kill.rows", lambda: cluster.web_address is not None, lambda: "no web address in its log"
    )
    held = sum(
        value
        for name, _, value in await scrape(cluster.web_address or "")
        if name == "hami_agent_slices_allocated"
    )
    expected = sum(map(len, rows.held_ids().values()))
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
    cluster, claim = stage.cluster, "xid.avoided"
    cluster.submit(pinned(stage.ill or "").pod())
    await stage.until(
        claim,
        lambda: bool(pod_facts(cluster, "pinned").reason),
        lambda: "the scheduler gives no reason for the pod that requires it",
    )
    await run_pod(stage, plain("after"), claim)
    shares = [share for given in pod_facts(cluster, "after").shares().values() for share in given]
    insists = pod_facts(cluster, "pinned")
    problems = ["a new pod is on it"] if any(s.uuid == stage.ill for s in shares) else []
    problems += [f"the pod that insists on it is {insists.phase}"] * (insists.phase != "Pending")
    chosen = ", ".join(f"GPU {stage.gpus[share.uuid].index}" for share in shares)
    stage.settle(claim, f"a new pod runs on {chosen}; {insists.reason}", problems)


def _ill(stage: Stage) -> list[int]:
    return [gpu.index for gpu in registered_gpus(stage.cluster) if not gpu.healthy]


def _down(stage: Stage) -> list[str]:
    return [name for name in stage.placed if not pod_facts(stage.cluster, name).is_running]


def _restarted(stage: Stage, before: object) -> list[str]:
    after = starts(stage.cluster, stage.placed)
    return [] if after == before else [f"containers were started: {before} before, {after} now"]


def _untouched(stage: Stage, claim: str, before: object, since: float) -> None:
    """Check that no pod was affected: no start, no rejection, no Allocate."""
    events = stage.seen(since, "allocating", "rejected")
    asked = [f"{event.kind} {event.container or event.pod}" for event in events]
    down = [f"{name} does not run" for name in _down(stage)]
    problems = [*down, *asked, *_restarted(stage, before)]
    stage.settle(claim, f"{len(stage.placed)} pods run on, no Allocate", problems)


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
    uids = {pod_facts(cluster, one).uid: one for one in stage.placed}
    await stage.until(
        "replay.edits",
        lambda: uids.keys() <= {e.pod for e in stage.seen(begun, "admitted", "rejected")},
        lambda: "the new kubelet has not admitted every pod",
    )
    rejected = [f"{uids[e.pod]}: {e.text}" for e in stage.seen(begun, "rejected")]
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
        stage.settle(claim, "", [f"no {QUIET:g} s without a request in {PATIENCE:g} s"])
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
    most = f"{sums.most[0]} MiB, {sums.most[1]} %, {counted(sums.most[2], 'slice')} of one GPU"
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
        rows = {(r.key.pod_uid, r.key.container): r for r in ledger_on_disk(cluster).rows}
    except (OSError, StateCorrupt) as error:
        return "", [str(error)]
    alive = {pod_facts(cluster, name).uid for name in stage.placed}
    kept = {owner: answer for owner, answer in answers(cluster).items() if owner[0] in alive}
    problems: list[str] = []
    for owner, answer in kept.items():
        row = next((row for key, row in rows.items() if key == owner), None)
        if row is None:
            problems.append(f"{owner[1]} of pod {owner[0]} has no row")
        elif dict(row.edits.envs) != dict(parsed(answer).envs):
            problems.append(f"the row of {row.pod}/{owner[1]} has other values")
    return (
        f"{counted(len(kept), 'answer')} at the kubelet, {counted(len(rows), 'row')} on disk",
        problems,
    )


async def _is_quiet(stage: Stage) -> bool:
    """Wait for QUIET seconds without a request, when the effects of the last step are done."""
    journal, deadline = stage.cluster.api.journal, stage.now + PATIENCE
    while stage.now < deadline:
        count = sum(journal.counts.values())
        await asyncio.sleep(QUIET)
        if sum(journal.counts.values()) == count:
            return True
    return False

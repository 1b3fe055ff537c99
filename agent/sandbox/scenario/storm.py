"""Last steps: SIGKILL during a burst of pods, a lost kubelet checkpoint, idle, a clean stop."""

import asyncio

from agent.core.errors import StateCorrupt
from agent.sandbox.api_errors import NotFoundError
from agent.sandbox.scenario.begin import check_edits
from agent.sandbox.scenario.facts import (
    PodFacts,
    answers,
    is_locked,
    ledger_on_disk,
    parsed,
    pod_facts,
)
from agent.sandbox.scenario.stage import KEPT_IDLE, PATIENCE, Stage, counted
from agent.sandbox.scenario.workloads import BURST, plain

BURST_PATIENCE = 45.0
QUIET = 1.0
"""Seconds without a request before the idle step is measured."""


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
    late = [_rejection(pod) for pod in pods if not gap <= when.get(pod.uid, 0.0) <= back]
    served = BURST - len(names)
    stage.settle("burst.pods", f"{served} run, {len(names)} rejected in the gap", late)


def _rejection(pod: PodFacts) -> str:
    return f"{pod.name} was rejected outside the gap: {pod.reason}"


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

"""First steps of the scenario: start the agent, then place pods."""

from collections.abc import Sequence

from agent.core.errors import MalformedText
from agent.core.inventory.share import Share
from agent.sandbox.lab.cluster import RESOURCE
from agent.sandbox.scenario.edits import differences
from agent.sandbox.scenario.facts import (
    answers,
    is_locked,
    is_running,
    pod_facts,
    registered_gpus,
)
from agent.sandbox.scenario.stage import Stage, counted, milliseconds
from agent.sandbox.scenario.workloads import Workload, fitting, too_big


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
    writes, reads = journal.writes(user), journal.reads(user)
    placed = fitting(len(stage.gpus))
    for workload in placed:
        stage.record.note(f"pod {workload.name}: {workload.text}")
        await run_pod(stage, workload)
        check_edits(stage, f"{workload.name}.edits", [workload.name])
        await _settled(stage, workload.name)
    costs = (journal.writes(user) - writes) / len(placed)
    looks = (journal.reads(user) - reads) / len(placed)
    answers_each = sum(bool(w.gpus) for one in placed for w in one.wishes) / len(placed)
    found = f"{counted(costs, 'write')}, {counted(looks, 'read')} for a pod"
    # One read before each answer, and one after the release of the lock.
    is_cheap = costs == 2 and looks <= answers_each + 1
    stage.settle("requests", found, [] if is_cheap else [found])
    await _refuse(stage)


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

"""Middle steps: a GPU falls off the bus, the kubelet restarts, the agent is killed."""

from agent.sandbox import hardware_talk as talk
from agent.sandbox.hardware_talk import ask
from agent.sandbox.lab.cluster import RESOURCE
from agent.sandbox.lab.web import scrape
from agent.sandbox.scenario.begin import run_pod
from agent.sandbox.scenario.facts import ledger_on_disk, pod_facts, registered_gpus, starts
from agent.sandbox.scenario.stage import Stage, counted
from agent.sandbox.scenario.workloads import pinned, plain

FALLEN = 79
"""The XID of a GPU that has fallen off the bus."""


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
        lambda: _uids(stage) <= {e.pod for e in stage.seen(begun, "admitted", "rejected")},
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


def _uids(stage: Stage) -> set[str]:
    return {pod_facts(stage.cluster, name).uid for name in stage.placed}


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

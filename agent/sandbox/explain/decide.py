"""Explains a pod: all gates in order, and the smallest changes if one blocks it."""

import datetime as dt
import random
from collections.abc import Iterator, Sequence

import msgspec

from agent.codec.cluster import decode_moment
from agent.core.cluster import annotations
from agent.core.cluster.snapshot import ClusterSnapshot, JsonObject
from agent.core.errors import cap
from agent.sandbox.explain.changes import smallest_changes
from agent.sandbox.explain.gates import (
    admission_gate,
    allocation_gate,
    asks_for_gpus,
    binding_gate,
    quota_gate,
    running_gate,
    start_gate,
)
from agent.sandbox.explain.placement import (
    PLACEMENT,
    ModelPlacement,
    chosen_gate,
    foreign_gate,
    is_mixed,
    place,
    searched_gate,
    told_by_events,
)
from agent.sandbox.explain.story import (
    Explanation,
    Gate,
    GateVerdict,
    PlacingChange,
    request_words,
    span,
)
from agent.sandbox.explain.world import Edit, World
from agent.sandbox.scheduler.filter import filter_pod
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.requests import BadWeightsError, all_containers, container_request
from agent.sandbox.scheduler.webhook import review_pod

PLACING = frozenset({"admission", "quota", "placement"})
"""The gates whose blocks a change of the pod or of the cluster can open."""
_OWNERS = frozenset({"E-REQUEST", "E-GATED"})
"""Only its owner knows what the request was to be, or when the pod is to start."""


def explain_pod(
    snapshot: ClusterSnapshot,
    now: dt.datetime,
    rng: random.Random,
    settings: SchedulerSettings | None = None,
) -> Explanation:
    """Explain the pod of the snapshot; `now` is for ages, `rng` breaks ties as HAMi's map order."""
    world = World(snapshot, settings or SchedulerSettings())
    pod = snapshot.pod
    if not asks_for_gpus(pod):
        gates = [Gate("admission", GateVerdict.PASSED, "the pod asks for no GPU of HAMi")]
        gates.append(_without_gpus(world, pod, now))
        gates += [start_gate(pod), running_gate(world, pod, now)]
        return _told(world, gates, None, (), now)
    placement: ModelPlacement | None = None
    changes: tuple[PlacingChange, ...] = ()
    gates = [_admitted(world, pod)]
    if pod["spec"].get("nodeName") or gates[0].verdict is GateVerdict.BLOCKED:
        gates += [quota_gate(world, pod, is_refused=False), _chosen(pod)]
    elif _is_foreign(world, pod):
        gates += [quota_gate(world, pod, is_refused=False), foreign_gate(world, now)]
    else:
        placement, (quota, searched) = _searched(world, pod, now)
        gates += [quota, searched]
    gates.append(binding_gate(world, pod, _next_node(world, pod, placement, rng), now))
    gates += [allocation_gate(world, pod), start_gate(pod), running_gate(world, pod, now)]
    gates = list(_reached(gates))
    blocked = next((gate for gate in gates if gate.verdict is GateVerdict.BLOCKED), None)
    fits = placement is not None and bool(placement.fitting)
    if blocked is not None and blocked.name in PLACING and _is_complete(world) and not fits:
        changes = _changes(world, pod, blocked)
        gates = [_advised(gate, placement, changes) if gate is blocked else gate for gate in gates]
    return _told(world, gates, placement, changes, now)


def _advised(
    gate: Gate, placement: ModelPlacement | None, changes: Sequence[PlacingChange]
) -> Gate:
    """The blocked gate with the smallest change as its advice.

    The advice of a gate's own reason stays if that is the only reason of the Nodes. If they have
    several, the reason of most Nodes may be one that no change removes.
    """
    has_several = placement is not None and is_mixed(placement)
    if not changes or (gate.advice and not has_several):
        return gate
    first = changes[0]
    return msgspec.structs.replace(gate, advice=f"{first.said} -> {cap(first.node, 128)}")


def _admitted(world: World, pod: JsonObject) -> Gate:
    gate = admission_gate(world, pod)
    if gate.verdict is GateVerdict.BLOCKED and (
        pod["spec"].get("nodeName") or _is_foreign(world, pod)
    ):
        return msgspec.structs.replace(gate, verdict=GateVerdict.NOTED)
    return gate


def _is_foreign(world: World, pod: JsonObject) -> bool:
    """Whether kube-scheduler alone places the pod, in a cluster where HAMi's has no Node."""
    is_ours = pod["spec"].get("schedulerName") == world.settings.scheduler_name
    has_hami = any(annotations.REGISTER in node.annotations for node in world.snapshot.nodes)
    return not is_ours and not has_hami and world.snapshot.has("nodes")


def _chosen(pod: JsonObject) -> Gate:
    if pod["spec"].get("nodeName"):
        return chosen_gate(pod)
    return Gate(PLACEMENT, GateVerdict.NOT_REACHED, "not reached")


def _without_gpus(world: World, pod: JsonObject, now: dt.datetime) -> Gate:
    if pod["spec"].get("nodeName"):
        node = cap(pod["spec"]["nodeName"], 128)
        return Gate(PLACEMENT, GateVerdict.PASSED, f"it is on {node}")
    return foreign_gate(world, now)


def _searched(
    world: World, pod: JsonObject, now: dt.datetime
) -> tuple[ModelPlacement | None, tuple[Gate, Gate]]:
    """The placement of a pod without a Node; with the gates of quota and placement."""
    quota = quota_gate(world, pod, is_refused=False)
    if not _is_complete(world):
        placement = told_by_events(world.snapshot.events)
        if placement is None:
            said = "the Nodes and the use of their GPUs could not be read, and no Event tells it"
            return None, (quota, Gate(PLACEMENT, GateVerdict.UNKNOWN, said))
        return placement, (quota, searched_gate(world, placement, now))
    try:
        placement = place(world, pod)
    except BadWeightsError as error:
        gate = Gate(
            PLACEMENT,
            GateVerdict.BLOCKED,
            f"HAMi's scheduler refuses the pod: {cap(str(error))}",
            "E-REQUEST",
            "write slot=1,core=1,memory=1, or drop the annotation",
        )
        return None, (quota, gate)
    if "ResourceQuotaNotFit" in placement.reasons and not placement.fitting:
        without = Edit(without_quotas=True)
        fits = any(
            world.fit(pod, name, without).groups is not None
            for name in world.nodes
            if world.has_gpus(world.nodes[name])
        )
        if fits or set(placement.reasons) == {"ResourceQuotaNotFit"}:
            quota = quota_gate(world, pod, is_refused=True)
    return placement, (quota, searched_gate(world, placement, now))


def _is_complete(world: World) -> bool:
    """Whether the model can be run: Nodes and pods are known."""
    return world.snapshot.has("nodes") and world.snapshot.has("pods")


def _next_node(
    world: World, pod: JsonObject, placement: ModelPlacement | None, rng: random.Random
) -> str:
    """The Node that the scheduler chose, or would choose now; empty if there is none."""
    noted: str = (pod["metadata"].get("annotations") or {}).get(annotations.VGPU_NODE, "")
    if noted or placement is None or not placement.fitting:
        return noted
    states = {name: world.registered(name) for name in placement.fitting}
    registered = {name: state for name, state in states.items() if state is not None}
    quotas = world.quotas
    filtered = filter_pod(dict(pod), list(registered), registered, world.settings, rng, quotas)
    return next(iter(filtered.nodes), "")


def _reached(gates: Sequence[Gate]) -> Iterator[Gate]:
    """The gates; those after the first that blocks are not reached."""
    is_blocked = False
    for gate in gates:
        if is_blocked:
            yield Gate(gate.name, GateVerdict.NOT_REACHED, "not reached")
        else:
            yield gate
        is_blocked = is_blocked or gate.verdict is GateVerdict.BLOCKED


def _changes(world: World, pod: JsonObject, blocked: Gate) -> tuple[PlacingChange, ...]:
    if blocked.name != "admission":
        try:
            return smallest_changes(world, pod)
        except BadWeightsError:
            return _without_weights(world, pod)
    if blocked.reason in _OWNERS:
        return ()
    spec = {**pod["spec"], "schedulerName": ""}
    review = review_pod({**pod, "spec": spec}, world.settings, world.quotas)
    said = "create the pod again without schedulerName, where HAMi's webhook sees it"
    return _placed(world, review.pod, said) if review.is_allowed else ()


def _without_weights(world: World, pod: JsonObject) -> tuple[PlacingChange, ...]:
    key = "hami.io/device-scoring-weights"
    noted = {name: text for name, text in pod["metadata"]["annotations"].items() if name != key}
    edited = {**pod, "metadata": {**pod["metadata"], "annotations": noted}}
    return _placed(world, edited, f"drop the annotation {key}")


def _placed(world: World, edited: JsonObject, said: str) -> tuple[PlacingChange, ...]:
    """The change, if the edited pod fits on a Node."""
    for name in sorted(world.nodes):
        if world.fit(edited, name).groups is not None:
            return (PlacingChange(said, name),)
    return ()


def _told(
    world: World,
    gates: Sequence[Gate],
    placement: ModelPlacement | None,
    changes: tuple[PlacingChange, ...],
    now: dt.datetime,
) -> Explanation:
    snapshot, metadata = world.snapshot, world.snapshot.pod["metadata"]
    return Explanation(
        namespace=str(metadata.get("namespace", "")),
        name=str(metadata.get("name", "")),
        phase=str(snapshot.pod["status"].get("phase") or "Pending"),
        headline=_headline(world, now),
        taken=snapshot.taken,
        gates=tuple(gates),
        nodes=placement.nodes if placement else (),
        reasons=placement.reasons if placement else {},
        changes=changes,
        missing=tuple(f"{unread.part}: {cap(unread.why, 512)}" for unread in snapshot.unread),
    )


def _headline(world: World, now: dt.datetime) -> str:
    pod = world.snapshot.pod
    metadata = pod["metadata"]
    name = (
        f"{cap(str(metadata.get('namespace', '')), 64)}/{cap(str(metadata.get('name', '')), 256)}"
    )
    born = decode_moment(metadata.get("creationTimestamp"))
    age = f", created {span((now - born).total_seconds())} ago" if born else ""
    phase = cap(str(pod["status"].get("phase") or "Pending"), 32)
    deleted = " and being deleted" if metadata.get("deletionTimestamp") else ""
    asked = [
        f"{cap(str(container.get('name', '')), 64)}: {request_words(request)}"
        for container in all_containers(dict(pod))
        if (request := container_request(container, world.settings))
    ]
    wants = f" It asks for {'; '.join(asked)}." if asked else ""
    return f"Pod {name} is {phase}{deleted}{age}.{wants}"

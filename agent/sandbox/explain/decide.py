"""Explains a pod: all gates in order, and the smallest changes if one blocks it.

The scheduler's model has verified each change. Changes of the pod are tried on few Nodes of each
kind of refusal, so that 5,000 Nodes cost little.
"""

import copy
import datetime as dt
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from agent import cluster as annotations
from agent.errors import cap
from agent.kube.objects import decode_moment
from agent.kube.reader import ClusterSnapshot, GpuHolder, JsonObject
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
    codes_of,
    foreign_gate,
    held_mib,
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
    mib,
    request_words,
)
from agent.sandbox.explain.world import NO_EDIT, Edit, World, refuse_node
from agent.sandbox.scheduler.filter import filter_pod
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.requests import (
    CORES,
    COUNT,
    MEMORY,
    MEMORY_PERCENT,
    WEIGHTS,
    BadWeightsError,
    all_containers,
    container_request,
)
from agent.sandbox.scheduler.webhook import review_pod
from agent.status import counted, span

CHANGES_TOLD: Final = 3
NODES_PER_KIND: Final = 16
HOLDERS_TRIED: Final = 8
_STEERING: Final = (
    "nvidia.com/use-gputype",
    "nvidia.com/nouse-gputype",
    "nvidia.com/use-gpuuuid",
    "nvidia.com/nouse-gpuuuid",
    "nvidia.com/vgpu-mode",
    "nvidia.com/numa-bind",
    "hami.io/gpu-scheduler-policy",
    WEIGHTS,
)
PLACING = frozenset({"admission", "quota", "placement"})
"""The gates whose blocks a change of the pod or of the cluster can open."""
_OWNERS = frozenset({"E-REQUEST", "E-GATED"})
"""Only its owner knows what the request was to be, or when the pod is to start."""


class _Trial(msgspec.Struct, frozen=True):
    """A change to try. `size` orders the changes; `nodes`: where, None for all chosen Nodes."""

    size: tuple[int, int]
    said: str
    pod: JsonObject
    edit: Edit = NO_EDIT
    nodes: tuple[str, ...] | None = None


def smallest_changes(world: World, pod: JsonObject) -> tuple[PlacingChange, ...]:
    """At most three changes with which the pod fits on some Node, the smallest first.

    Raises BadWeightsError if the pod's weights stay bad.
    """
    names = _nodes_to_try(world, pod)
    trials = [
        *_cluster_trials(world, pod, names),
        *_pod_trials(world, pod, names),
        *_holder_trials(world, pod, names),
    ]
    found: list[PlacingChange] = []
    for trial in sorted(trials, key=lambda trial: trial.size):
        for name in names if trial.nodes is None else trial.nodes:
            if world.fit(trial.pod, name, trial.edit).groups is not None:
                found.append(PlacingChange(trial.said, name))
                break
        if len(found) == CHANGES_TOLD:
            break
    return tuple(found)


def _nodes_to_try(world: World, pod: JsonObject) -> tuple[str, ...]:
    """A few Nodes of each kind of refusal, those with most free memory first."""
    kinds: defaultdict[tuple[str, ...], list[tuple[int, str]]] = defaultdict(list)
    for name, node in world.nodes.items():
        if world.has_gpus(node):
            state = world.registered(name)
            gpus = state.gpus if state else ()
            free = [gpu.capacity.registered_mib - gpu.load.memory_mib for gpu in gpus]
            kind = codes_of(world.fit(pod, name).reason)
            kinds[kind].append((-max(free, default=0), name))
    return tuple(name for kind in kinds.values() for _, name in sorted(kind)[:NODES_PER_KIND])


def _cluster_trials(world: World, pod: JsonObject, names: Sequence[str]) -> Iterator[_Trial]:
    for name in names:
        node = world.nodes[name]
        open_node = msgspec.structs.replace(node, is_closed=False)
        if refuse_node(pod, node) and not refuse_node(pod, open_node):
            opened = Edit(opened=frozenset({name}))
            yield _Trial((1, 1), f"uncordon the Node {cap(name, 128)}", pod, opened, (name,))
        state = world.registered(name)
        for uuid in sorted(state.cordoned if state else ()):
            edit = Edit(uncordoned=frozenset({uuid}))
            said = f"uncordon the GPU {cap(uuid, 64)} of {cap(name, 128)}"
            yield _Trial((1, 0), said, pod, edit, (name,))
    if world.snapshot.quotas:
        said = "raise the namespace's ResourceQuota"
        yield _Trial((4, 0), said, pod, Edit(without_quotas=True))


def _pod_trials(world: World, pod: JsonObject, names: Sequence[str]) -> Iterator[_Trial]:
    spec = pod["spec"]
    for key in _STEERING:
        if key in (pod["metadata"].get("annotations") or {}):
            yield _Trial((2, 0), f"drop the annotation {key}", _without(pod, key))
    affinity = spec.get("affinity") or {}
    parts = (
        ("nodeSelector", spec.get("nodeSelector")),
        ("nodeAffinity", affinity.get("nodeAffinity")),
    )
    selecting = [name for name, value in parts if value]
    if selecting:
        said = (
            f"drop {' and '.join(selecting)}, which exclude{'s'[: 2 - len(selecting)]} other Nodes"
        )
        anywhere = {key: value for key, value in spec.items() if key != "nodeSelector"}
        anywhere["affinity"] = {k: v for k, v in affinity.items() if k != "nodeAffinity"}
        yield _Trial((3, 1), said, {**pod, "spec": anywhere})
    for kind in (MEMORY, CORES, COUNT):
        best, most = _greatest_cap(world, pod, names, kind)
        if best:
            size = (3, 1000 - 1000 * best // max(most, 1))
            said = {
                MEMORY: f"{mib(best)} ({MEMORY}) instead of {mib(most)}",
                CORES: f"{best} % of the cores ({CORES}) instead of {most} %",
                COUNT: f"{counted(best, 'GPU')} in one container ({COUNT}) instead of {most}",
            }[kind]
            edited = _capped(world, pod, kind, best)
            yield _Trial(size, f"ask for at most {said}", edited)


def _without(pod: JsonObject, key: str) -> JsonObject:
    """The pod without one annotation."""
    noted = {name: text for name, text in pod["metadata"]["annotations"].items() if name != key}
    return {**pod, "metadata": {**pod["metadata"], "annotations": noted}}


def _holder_trials(world: World, pod: JsonObject, names: Sequence[str]) -> Iterator[_Trial]:
    holders = [holder for name in names for holder in world.holders(name)]
    holders.sort(key=lambda holder: (held_mib(holder), holder.namespace, holder.name))
    ending = [holder for holder in holders if holder.is_deleted]
    staying = [holder for holder in holders if not holder.is_deleted]
    for rank, holder in enumerate((*_some(ending), *_some(staying))):
        name = f"{cap(holder.namespace, 64)}/{cap(holder.name, 128)}"
        ends = ", which is being deleted" if holder.is_deleted else " to end, or end it"
        held = f"it holds {mib(held_mib(holder))} on {cap(holder.node, 128)}"
        edit = Edit(ended=frozenset({holder.uid}))
        size = (0 if holder.is_deleted else 6, rank)
        yield _Trial(size, f"wait for {name}{ends} ({held})", pod, edit, (holder.node,))


def _some(holders: Sequence[GpuHolder]) -> Sequence[GpuHolder]:
    """A few of the holders, from the smallest to the greatest."""
    if len(holders) <= HOLDERS_TRIED:
        return holders
    step = (len(holders) - 1) / (HOLDERS_TRIED - 1)
    return [holders[round(place * step)] for place in range(HOLDERS_TRIED)]


def _greatest_cap(
    world: World, pod: JsonObject, names: Sequence[str], kind: str
) -> tuple[int, int]:
    """The greatest limit with which the pod fits somewhere, and what it asks for now.

    The first is 0 if there is none. Percentages of memory are of the greatest GPU.
    """
    states = filter(None, map(world.registered, world.nodes))
    sizes = (gpu.capacity.registered_mib for state in states for gpu in state.gpus)
    greatest = max(sizes, default=0)
    asked = [0]
    for container in all_containers(dict(pod)):
        request = container_request(container, world.settings)
        if request is None:
            continue
        percent = greatest * min(request.memory_percent, 100) // 100
        amounts = {
            MEMORY: request.memory_mib or percent,
            CORES: min(request.core_percent, 100),
            COUNT: request.count,
        }
        asked.append(amounts[kind])
    best, most = 0, max(asked)

    def fits(limit: int, name: str) -> bool:
        return world.fit(_capped(world, pod, kind, limit), name).groups is not None

    for name in names:
        low, high = best, most - 1
        if low >= high or not fits(low + 1, name):
            continue
        while low < high:  # a smaller request fits wherever a greater one does
            middle = (low + high + 1) // 2
            if fits(middle, name):
                low = middle
            else:
                high = middle - 1
        best = max(best, low)
    return best, most


def _capped(world: World, pod: JsonObject, kind: str, most: int) -> JsonObject:
    """The pod whose containers ask for at most `most` of one resource."""
    edited = copy.deepcopy(dict(pod))
    for container in all_containers(edited):
        request = container_request(container, world.settings)
        if request is None:
            continue
        limits = dict((container.get("resources") or {}).get("limits") or {})
        if kind == MEMORY:
            limits.pop(MEMORY_PERCENT, None)
            limits[MEMORY] = str(min(request.memory_mib or most, most))
        elif kind == CORES:
            limits[CORES] = str(min(request.core_percent, most))
        else:
            limits[COUNT] = str(min(request.count, most))
        container["resources"] = {"limits": limits}
    return edited


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
        if pod["spec"].get("nodeName"):
            said = f"it is on {cap(pod['spec']['nodeName'], 128)}"
            gates.append(Gate(PLACEMENT, GateVerdict.PASSED, said))
        else:
            gates.append(foreign_gate(world, now))
        gates += [start_gate(pod), running_gate(world, pod, now)]
        return _told(world, gates, None, (), now)
    placement: ModelPlacement | None = None
    changes: tuple[PlacingChange, ...] = ()
    admitted, is_foreign = admission_gate(world, pod), _is_foreign(world, pod)
    if admitted.verdict is GateVerdict.BLOCKED and (pod["spec"].get("nodeName") or is_foreign):
        admitted = msgspec.structs.replace(admitted, verdict=GateVerdict.NOTED)
    gates = [admitted]
    if pod["spec"].get("nodeName") or gates[0].verdict is GateVerdict.BLOCKED:
        not_reached = Gate(PLACEMENT, GateVerdict.NOT_REACHED, "not reached")
        has_node = bool(pod["spec"].get("nodeName"))
        gates.append(quota_gate(world, pod, is_refused=False))
        gates.append(chosen_gate(pod) if has_node else not_reached)
    elif is_foreign:
        gates += [quota_gate(world, pod, is_refused=False), foreign_gate(world, now)]
    else:
        placement, (quota, searched) = _searched(world, pod, now)
        gates += [quota, searched]
    gates.append(binding_gate(world, pod, _next_node(world, pod, placement, rng), now))
    gates += [allocation_gate(world, pod), start_gate(pod), running_gate(world, pod, now)]
    blocked = next((gate for gate in gates if gate.verdict is GateVerdict.BLOCKED), None)
    if blocked is None:
        return _told(world, gates, placement, changes, now)
    fits = placement is not None and bool(placement.fitting)
    if blocked.name in PLACING and _is_complete(world) and not fits:
        changes = _changes(world, pod, blocked)
    # The advice of a gate's own reason stays if that is the only reason of the Nodes. If they have
    # several, the reason of most Nodes may be one that no change removes.
    has_several = placement is not None and is_mixed(placement)
    place = gates.index(blocked)
    if changes and (has_several or not blocked.advice):
        advice = f"{changes[0].said} -> {cap(changes[0].node, 128)}"
        gates[place] = msgspec.structs.replace(blocked, advice=advice)
    later = [Gate(gate.name, GateVerdict.NOT_REACHED, "not reached") for gate in gates[place + 1 :]]
    return _told(world, [*gates[: place + 1], *later], placement, changes, now)


def _is_foreign(world: World, pod: JsonObject) -> bool:
    """Whether kube-scheduler alone places the pod, in a cluster where HAMi's has no Node."""
    is_ours = pod["spec"].get("schedulerName") == world.settings.scheduler_name
    has_hami = any(annotations.REGISTER in node.annotations for node in world.snapshot.nodes)
    return not is_ours and not has_hami and world.snapshot.has("nodes")


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


def _changes(world: World, pod: JsonObject, blocked: Gate) -> tuple[PlacingChange, ...]:
    if blocked.name != "admission":
        try:
            return smallest_changes(world, pod)
        except BadWeightsError:
            return _placed(world, _without(pod, WEIGHTS), f"drop the annotation {WEIGHTS}")
    if blocked.reason in _OWNERS:
        return ()
    spec = {**pod["spec"], "schedulerName": ""}
    review = review_pod({**pod, "spec": spec}, world.settings, world.quotas)
    said = "create the pod again without schedulerName, where HAMi's webhook sees it"
    return _placed(world, review.pod, said) if review.is_allowed else ()


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
    snapshot, pod = world.snapshot, world.snapshot.pod
    metadata, phase = pod["metadata"], str(pod["status"].get("phase") or "Pending")
    namespace, name = str(metadata.get("namespace", "")), str(metadata.get("name", ""))
    born = decode_moment(metadata.get("creationTimestamp"))
    age = f", created {span((now - born).total_seconds())} ago" if born else ""
    deleted = " and being deleted" if metadata.get("deletionTimestamp") else ""
    headline = f"Pod {cap(namespace, 64)}/{cap(name, 256)} is {cap(phase, 32)}{deleted}{age}."
    asked = [
        f"{cap(str(container.get('name', '')), 64)}: {request_words(request)}"
        for container in all_containers(dict(pod))
        if (request := container_request(container, world.settings))
    ]
    return Explanation(
        namespace=namespace,
        name=name,
        phase=phase,
        headline=headline + (f" It asks for {'; '.join(asked)}." if asked else ""),
        taken=snapshot.taken,
        gates=tuple(gates),
        nodes=placement.nodes if placement else (),
        reasons=placement.reasons if placement else {},
        changes=changes,
        missing=tuple(f"{unread.part}: {cap(unread.why, 512)}" for unread in snapshot.unread),
    )

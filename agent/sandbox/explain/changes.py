"""Finds the smallest changes that would place a pod; the scheduler's model has verified each.

Changes of the pod are tried on few Nodes of each kind of refusal, so that 5,000 Nodes cost little.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from agent.core.cluster.snapshot import GpuHolder, JsonObject
from agent.core.errors import cap
from agent.sandbox.explain.placement import codes_of, held_mib
from agent.sandbox.explain.story import PlacingChange, counted, mib
from agent.sandbox.explain.world import NO_EDIT, Edit, World, refuse_node
from agent.sandbox.scheduler.filter import NodeFit
from agent.sandbox.scheduler.requests import (
    CORES,
    COUNT,
    MEMORY,
    MEMORY_PERCENT,
    all_containers,
    container_request,
)

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
    "hami.io/device-scoring-weights",
)

PodEdit = Callable[[JsonObject], JsonObject]


class _Trial(msgspec.Struct, frozen=True):
    """A change to try. `size` orders the changes; `nodes`: where, None for all chosen Nodes."""

    size: tuple[int, int]
    said: str
    pod: JsonObject
    edit: Edit = NO_EDIT
    nodes: tuple[str, ...] | None = None


def smallest_changes(
    world: World, pod: JsonObject, only: Sequence[str] | None = None
) -> tuple[PlacingChange, ...]:
    """At most three changes with which the pod fits on some Node, the smallest first.

    `only`: the Nodes to try; None for all. Raises BadWeightsError if the pod's weights stay bad.
    """
    names = _chosen(world, pod, world.nodes if only is None else only)
    found: list[PlacingChange] = []
    for trial in sorted(_trials(world, pod, names), key=lambda trial: trial.size):
        if node := _verified(world, trial, names):
            found.append(PlacingChange(trial.said, node))
        if len(found) == CHANGES_TOLD:
            return tuple(found)
    return tuple(found)


def _chosen(world: World, pod: JsonObject, names: Iterable[str]) -> tuple[str, ...]:
    """A few Nodes of each kind of refusal, those with most free memory first."""
    kinds: defaultdict[tuple[str, ...], list[tuple[int, str]]] = defaultdict(list)
    for name in names:
        if not world.has_gpus(world.nodes[name]):
            continue
        fit = world.fit(pod, name)
        free = max((_free_mib(world, name)), default=0)
        kinds[codes_of(fit.reason)].append((-free, name))
    return tuple(name for kind in kinds.values() for _, name in sorted(kind)[:NODES_PER_KIND])


def _free_mib(world: World, name: str) -> list[int]:
    state = world.registered(name)
    gpus = state.gpus if state else ()
    return [gpu.capacity.registered_mib - gpu.load.memory_mib for gpu in gpus]


def _verified(world: World, trial: _Trial, names: Sequence[str]) -> str:
    """The first Node on which the pod fits with the change; empty if none."""
    for name in names if trial.nodes is None else trial.nodes:
        if world.fit(trial.pod, name, trial.edit).groups is not None:
            return name
    return ""


def _trials(world: World, pod: JsonObject, names: Sequence[str]) -> Iterator[_Trial]:
    yield from _cluster_trials(world, pod, names)
    yield from _pod_trials(world, pod, names)
    yield from _holder_trials(world, pod, names)


def _cluster_trials(world: World, pod: JsonObject, names: Sequence[str]) -> Iterator[_Trial]:
    for name in names:
        node = world.nodes[name]
        if refuse_node(pod, node) and node.is_closed:
            opened = Edit(opened=frozenset({name}))
            is_only_closed = not refuse_node(pod, msgspec.structs.replace(node, is_closed=False))
            if is_only_closed:
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
    for key in _STEERING:
        if key in pod["metadata"].get("annotations", {}):
            yield _Trial((2, 0), f"drop the annotation {key}", _without(pod, key))
    if refusals := _selecting(pod):
        said = f"drop {' and '.join(refusals)}, which exclude{'s'[: 2 - len(refusals)]} other Nodes"
        yield _Trial((3, 1), said, _unbound(pod))
    for kind, cap_of in ((MEMORY, _memory_cap), (CORES, _core_cap), (COUNT, _count_cap)):
        best, most = _greatest_cap(world, pod, names, cap_of(world, pod), kind)
        if best:
            size = (3, 1000 - 1000 * best // max(most, 1))
            yield _Trial(size, _cap_words(kind, best, most), _capped(world, pod, kind, best))


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
    world: World, pod: JsonObject, names: Sequence[str], most: int, kind: str
) -> tuple[int, int]:
    """The greatest limit below `most` with which the pod fits somewhere; 0 if there is none."""
    best = 0
    for name in names:
        low, high = best, most - 1
        if low >= high or not _fits(world, _capped(world, pod, kind, low + 1), name):
            continue
        while low < high:  # a smaller request fits wherever a greater one does
            middle = (low + high + 1) // 2
            if _fits(world, _capped(world, pod, kind, middle), name):
                low = middle
            else:
                high = middle - 1
        best = max(best, low)
    return best, most


def _fits(world: World, pod: JsonObject, name: str) -> bool:
    fit: NodeFit = world.fit(pod, name)
    return fit.groups is not None


def _memory_cap(world: World, pod: JsonObject) -> int:
    """The greatest memory that a container asks for, in MiB; percentages of the greatest GPU."""
    greatest = max(
        (
            gpu.capacity.registered_mib
            for name in world.nodes
            if (state := world.registered(name)) is not None
            for gpu in state.gpus
        ),
        default=0,
    )
    asked = [
        request.memory_mib or greatest * min(request.memory_percent, 100) // 100
        for container in all_containers(dict(pod))
        if (request := container_request(container, world.settings))
    ]
    return max(asked, default=0)


def _core_cap(world: World, pod: JsonObject) -> int:
    requests = [
        container_request(container, world.settings) for container in all_containers(dict(pod))
    ]
    return max((min(request.core_percent, 100) for request in requests if request), default=0)


def _count_cap(world: World, pod: JsonObject) -> int:
    requests = [
        container_request(container, world.settings) for container in all_containers(dict(pod))
    ]
    return max((request.count for request in requests if request), default=0)


def _capped(world: World, pod: JsonObject, kind: str, most: int) -> JsonObject:
    """The pod whose containers ask for at most `most` of one resource."""

    def limit(container: dict[str, Any]) -> None:
        request = container_request(container, world.settings)
        if request is None:
            return
        limits = dict((container.get("resources") or {}).get("limits") or {})
        if kind == MEMORY:
            limits.pop(MEMORY_PERCENT, None)
            limits[MEMORY] = str(min(request.memory_mib or most, most))
        elif kind == CORES:
            limits[CORES] = str(min(request.core_percent, most))
        else:
            limits[COUNT] = str(min(request.count, most))
        container["resources"] = {"limits": limits}

    edited = copy.deepcopy(dict(pod))
    for container in all_containers(edited):
        limit(container)
    return edited


def _cap_words(kind: str, best: int, most: int) -> str:
    if kind == MEMORY:
        return f"ask for at most {mib(best)} ({MEMORY}) instead of {mib(most)}"
    if kind == CORES:
        return f"ask for at most {best} % of the cores ({CORES}) instead of {most} %"
    return f"ask for at most {counted(best, 'GPU')} in one container ({COUNT}) instead of {most}"


def _without(pod: JsonObject, key: str) -> JsonObject:
    noted = {name: text for name, text in pod["metadata"]["annotations"].items() if name != key}
    return {**pod, "metadata": {**pod["metadata"], "annotations": noted}}


def _selecting(pod: JsonObject) -> tuple[str, ...]:
    """The parts of the spec that select Nodes."""
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity")
    parts = (("nodeSelector", pod["spec"].get("nodeSelector")), ("nodeAffinity", affinity))
    return tuple(name for name, value in parts if value)


def _unbound(pod: JsonObject) -> JsonObject:
    spec = {key: value for key, value in pod["spec"].items() if key != "nodeSelector"}
    affinity = spec.get("affinity") or {}
    spec["affinity"] = {key: value for key, value in affinity.items() if key != "nodeAffinity"}
    return {**pod, "spec": spec}

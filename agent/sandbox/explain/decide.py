"""Explains a pod: all gates in order, and the smallest changes if one blocks it.

The scheduler's model has verified each change. Changes of the pod are tried on few Nodes of each
kind of refusal, so that 5,000 Nodes cost little.
"""

import bisect
import copy
import datetime as dt
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import msgspec

from agent import cluster as annotations
from agent.errors import cap
from agent.kit.units import by_number, counted, span
from agent.kube.objects import EPOCH, decode_moment
from agent.kube.reader import ClusterNode, ClusterSnapshot, JsonObject
from agent.sandbox.explain import gates as at_gate
from agent.sandbox.explain import placement as at_node
from agent.sandbox.explain import story
from agent.sandbox.explain.placement import PodPlacement, World, codes_of, held_by, opened
from agent.sandbox.explain.story import Attempt, Explanation, Gate, GateVerdict, PlacingChange
from agent.sandbox.scheduler import model
from agent.sandbox.scheduler.filter import NodeFit
from agent.sandbox.scheduler.model import CORES, COUNT, MEMORY, RegisteredNode
from agent.sandbox.scheduler.registry import Reservation
from agent.sandbox.scheduler.webhook import DeniedError, review_pod

CHANGES_TOLD: Final = 3
NODES_PER_KIND: Final = 16
HOLDERS_TRIED: Final = 8
_STEERING: Final = (
    *(f"nvidia.com/{word}" for word in ("use-gputype", "nouse-gputype", "use-gpuuuid")),
    *(f"nvidia.com/{word}" for word in ("nouse-gpuuuid", "vgpu-mode", "numa-bind")),
    "hami.io/gpu-scheduler-policy",
)


class _Trial(msgspec.Struct, frozen=True):
    """A change to try; `size` orders the changes.

    Either another pod or other quotas, on all chosen Nodes, or the Node `at` in another state.
    """

    size: tuple[int, int]
    said: str
    paste: str = ""
    pod: JsonObject | None = None
    quotas: Sequence[JsonObject] | None = None
    at: str = ""
    node: ClusterNode | None = None
    state: RegisteredNode | None = None


class _Tries:
    """The single changes of a pod that does not fit, tried on a few Nodes. `pod`: as it is."""

    def __init__(self, world: World, pod: JsonObject, fits: Mapping[str, NodeFit]) -> None:
        self._world = world
        self._pod = pod
        self._fit = world.trial(pod)
        # A few Nodes of each kind of refusal, those with most free memory first.
        kinds: defaultdict[tuple[str, ...], list[tuple[int, str]]] = defaultdict(list)
        for name, fit in fits.items():
            state = world.registered(name)
            free = [gpu.free_mib for gpu in (state.gpus if state else ())]
            kinds[codes_of(fit.reason)].append((-max(free, default=0), name))
        self._names = [n for kind in kinds.values() for _, n in sorted(kind)[:NODES_PER_KIND]]

    def smallest(self) -> tuple[PlacingChange, ...]:
        """At most three changes with which the pod fits on some Node, the smallest first."""
        trials = [*self._of_nodes(), *self._of_quotas(), *self._of_pod(), *self._of_holders()]
        found: list[PlacingChange] = []
        for one in sorted(trials, key=lambda trial: trial.size):
            fit = self._fit if one.at else self._world.trial(one.pod or self._pod, one.quotas)
            names = [one.at] if one.at else self._names
            fitting = (name for name in names if fit(name, one.node, one.state).groups is not None)
            if node := next(fitting, ""):
                found.append(PlacingChange(one.said, node, one.paste))
            if len(found) == CHANGES_TOLD:
                break
        return tuple(found)

    def _of_nodes(self) -> Iterator[_Trial]:
        world = self._world
        for name in self._names:
            node, state, shown = world.nodes[name], world.registered(name), cap(name, 128)
            if node.is_closed:
                said, paste = f"uncordon the Node {shown}", f"kubectl uncordon {shown}"
                yield _Trial((1, 1), said, paste, at=name, node=opened(node))
            if state is None:
                continue
            for uuid in sorted(state.cordoned):
                gpu, fresh = cap(uuid, 64), replace(state, cordoned=state.cordoned - {uuid})
                paste = f"hami-agent uncordon {gpu} --node {shown}"
                said = f"uncordon the GPU {gpu} of {shown}"
                yield _Trial((1, 0), said, paste, at=name, state=fresh)
            for view in state.gpus:
                if not view.capacity.healthy:
                    has = msgspec.structs.replace(view.capacity, healthy=True)
                    well = replace(view, capacity=has)
                    gpus = tuple(well if one is view else one for one in state.gpus)
                    told = self._repair(name, has.uuid, has.index)
                    yield _Trial((1, 2), *told, at=name, state=replace(state, gpus=gpus))

    def _repair(self, node: str, uuid: str, index: int) -> tuple[str, str]:
        """How an unhealthy GPU comes back: taken back, if an operator released it, or repaired."""
        gpu, shown = f"GPU {index} ({cap(uuid, 64)}) of {cap(node, 128)}", cap(node, 128)
        told = story.agent_events(self._world.snapshot.node_events, node)
        about = (one for one in told if uuid in one.message and one.last)
        last = max(about, key=lambda one: one.last or EPOCH, default=None)
        if last is not None and last.reason == "GpuReleased":
            paste = f"hami-agent recheck {index}   # on {shown}"
            return f"take back {gpu}, which is released", paste
        paste = f"hami-agent status --node {shown}   # says what the GPU needs"
        return f"repair {gpu}, which is unhealthy", paste

    def _of_quotas(self) -> Iterator[_Trial]:
        """Quotas that are raised to what the pod and the others hold together."""
        world, quotas = self._world, self._world.snapshot.quotas
        free = world.trial(self._pod, ())
        names = self._names if quotas else ()
        groups = next((g for g in (free(name).groups for name in names) if g), None)
        if groups is None:
            return
        asked = Reservation("", groups, model.init_count(dict(self._pod))).loads().values()
        need = sum(asked, world.held.held(world.namespace))
        memory = -(-need.memory_mib // max(world.settings.memory_factor, 1))
        needs = zip(at_gate.READ_BY_HAMI, (memory, need.core_percent), strict=True)
        raised = [{**one, "spec": {"hard": {**one["spec"]["hard"]}}} for one in quotas]
        said, paste = [], []
        for key, amount in needs:
            for quota in raised:
                has = model.parse_quantity(quota["spec"]["hard"].get(key))
                if has is not None and has < amount:
                    quota["spec"]["hard"][key] = str(amount)
                    name = cap(quota["metadata"]["name"], 64)
                    said.append(f"{key} of the ResourceQuota {name} from {has:,} to {amount:,}")
                    paste.append(f'{key}: "{amount}"')
        if said:
            text = f"raise {' and '.join(said)}"
            yield _Trial((4, 0), text, ", ".join(paste), quotas=raised)

    def _of_pod(self) -> Iterator[_Trial]:
        spec, metadata = dict(self._pod["spec"]), self._pod["metadata"]
        noted = metadata.get("annotations") or {}
        for key in filter(noted.__contains__, _STEERING):
            paste = f"remove the line: {key}: {cap(noted[key], 128)}"
            others = {name: text for name, text in noted.items() if name != key}
            without = {**self._pod, "metadata": {**metadata, "annotations": others}}
            yield _Trial((2, 0), f"drop the annotation {key}", paste, without)
        affinity = spec.get("affinity") or {}
        parts = (spec.get("nodeSelector"), affinity.get("nodeAffinity"))
        names = ("nodeSelector", "nodeAffinity")
        if selecting := [name for name, value in zip(names, parts, strict=True) if value]:
            exclude = "excludes" if len(selecting) == 1 else "exclude"
            said = f"drop {' and '.join(selecting)}, which {exclude} other Nodes"
            anywhere = {key: value for key, value in spec.items() if key != "nodeSelector"}
            anywhere["affinity"] = {k: v for k, v in affinity.items() if k != "nodeAffinity"}
            yield _Trial((3, 1), said, pod={**self._pod, "spec": anywhere})
        for kind in (MEMORY, CORES, COUNT):
            best, most = self._greatest_cap(kind)
            if best:
                said = {
                    MEMORY: f"{story.mib(best)} ({MEMORY}) instead of {story.mib(most)}",
                    CORES: f"{best} % of the cores ({CORES}) instead of {most} %",
                    COUNT: f"{counted(best, 'GPU')} in one container ({COUNT}) instead of {most}",
                }[kind]
                paste = f"{kind}: {best}"
                if kind == MEMORY and any(map(_is_whole, model.all_containers(dict(self._pod)))):
                    paste += f"   # and no {CORES}: 100, the default of a whole GPU"
                size = (3, 1000 - 1000 * best // max(most, 1))
                yield _Trial(size, f"ask for at most {said}", paste, self._capped(kind, best))

    def _of_holders(self) -> Iterator[_Trial]:
        """A few of the pods with GPUs, those that are being deleted first, then the smallest."""
        holders = [(held_by(one), one) for name in self._names for one in self._world.holders[name]]
        holders.sort(key=lambda each: (each[0].memory_mib, each[0].core_percent, each[1].name))
        for is_deleted in (True, False):
            some = [each for each in holders if each[1].is_deleted is is_deleted]
            # From the smallest to the greatest, so that one is enough if any is.
            step = max(1, -(-(len(some) - 1) // (HOLDERS_TRIED - 1)))
            for rank, (load, holder) in enumerate([*some[:-1:step], *some[-1:]]):
                ends = ", which is being deleted" if is_deleted else " to end, or end it"
                cores = f" and {story.core_words(load.core_percent)}" if load.core_percent else ""
                held = f"it holds {story.mib(load.memory_mib)}{cores} on {cap(holder.chosen, 128)}"
                said = f"wait for {cap(f'{holder.namespace}/{holder.name}', 192)}{ends} ({held})"
                state = self._world.registered(holder.chosen, without=holder.uid)
                size = (0 if is_deleted else 6, rank)
                yield _Trial(size, said, at=holder.chosen, state=state)

    def _greatest_cap(self, kind: str) -> tuple[int, int]:
        """The greatest limit with which the pod fits somewhere, and what it asks for now.

        The first is 0 if there is none. Percentages of memory are of the greatest GPU.
        """
        asked = [0]
        for request in model.pod_requests(dict(self._pod), self._world.settings):
            if request:
                amounts = {CORES: request.cores, COUNT: request.count}
                amounts[MEMORY] = request.memory_on(self._world.greatest_mib)
                asked.append(amounts[kind])
        best, most = 0, max(asked)

        def fits(limit: int, name: str) -> bool:
            return self._world.trial(self._capped(kind, limit))(name).groups is not None

        for name in self._names:
            if best + 1 < most and fits(best + 1, name):
                # A smaller request fits wherever a greater one does.
                greater = range(best + 1, most)
                best += bisect.bisect(greater, False, key=lambda limit: not fits(limit, name))
        return best, most

    def _capped(self, kind: str, most: int) -> JsonObject:
        """The pod whose containers ask for at most `most` of one resource."""
        edited = copy.deepcopy(dict(self._pod))
        for container in model.all_containers(edited):
            request = model.container_request(container, self._world.settings)
            if request is None:
                continue
            limits = dict((container.get("resources") or {}).get("limits") or {})
            if kind == MEMORY:
                # HAMi's webhook adds all cores to a request of a whole GPU, and to no other.
                if _is_whole(container) and request.cores == 100:
                    limits.pop(CORES, None)
                limits.pop(model.MEMORY_PERCENT, None)
                limits[MEMORY] = str(min(request.memory_mib or most, most))
            else:
                asked = {CORES: request.core_percent, COUNT: request.count}[kind]
                limits[kind] = str(min(asked, most))
            container["resources"] = {"limits": limits}
        return edited


def _is_whole(container: dict[str, object]) -> bool:
    """Whether the container asks for whole GPUs."""
    return model.lookup(container, COUNT) is not None and model.names_no_memory(container)


def explain_pod(
    snapshot: ClusterSnapshot, now: dt.datetime, settings: model.SchedulerSettings | None = None
) -> Explanation:
    """Explain the pod of the snapshot: its gates in order, up to the one that blocks it."""
    world, pod = World(snapshot, settings or model.SchedulerSettings()), snapshot.pod
    attempt, has_node = story.last_attempt(snapshot), bool(pod["spec"].get("nodeName"))
    placement: PodPlacement | None = None
    changes: tuple[PlacingChange, ...] | None = None
    after = [at_gate.start_gate(world, pod, now), at_gate.running_gate(world, pod, now)]
    if not at_gate.asks_for_gpus(pod):
        gates = [Gate(at_gate.ADMISSION, GateVerdict.PASSED, "the pod asks for no GPU of HAMi")]
        if has_node:
            said = f"it is on {cap(pod['spec']['nodeName'], 128)}"
            gates.append(Gate(at_node.PLACEMENT, GateVerdict.PASSED, said))
        elif deleting := at_gate.deletion(pod, now):
            gates = [Gate(at_gate.ADMISSION, GateVerdict.BLOCKED, *deleting)]
        else:
            gates.append(at_node.foreign_gate(world, attempt, now))
        return _story(world, [*gates, *after], None, None, now)
    admission, is_foreign = at_gate.admission_gate(world, pod, now), _is_foreign(world, pod)
    is_over = admission.verdict is GateVerdict.BLOCKED and admission.reason != "E-DELETED"
    if is_over and (is_foreign or has_node):  # what was wrong at first blocks it no more
        admission = msgspec.structs.replace(admission, verdict=GateVerdict.NOTED)
    quota = at_gate.quota_gate(world, is_refused=False)
    searched = Gate(at_node.PLACEMENT, GateVerdict.NOT_REACHED, "not reached")
    if has_node:
        searched = at_node.chosen_gate(pod)
    elif admission.verdict is GateVerdict.BLOCKED:
        if admission.reason in {"E-WEBHOOK", "E-SCHEDULER"} and world.is_complete:
            changes = _created_again(world, pod)
    elif is_foreign:
        searched = at_node.foreign_gate(world, attempt, now)
    else:
        placement = at_node.place(world, pod, now) if world.is_complete else None
        searched = at_node.placement_gate(world, placement, attempt, now)
        if placement is not None and not placement.fitting:
            is_refused = placement.reason == "ResourceQuotaNotFit"
            quota = at_gate.quota_gate(world, is_refused=is_refused)
            # No change of the pod or of a Node helps where the scheduler itself does not work.
            if placement.is_judged and searched.reason not in {"E-ERROR", "E-UNTRIED"}:
                changes = _Tries(world, pod, placement.fits).smallest()
    chosen = _chosen_node(pod, placement, attempt)
    binding = at_gate.binding_gate(world, pod, chosen, attempt, now)
    allocation = at_gate.allocation_gate(world, pod, now)
    gates = [admission, quota, searched, binding, allocation, *after]
    return _story(world, gates, placement, changes, now)


def _is_foreign(world: World, pod: JsonObject) -> bool:
    """Whether kube-scheduler alone places the pod, in a cluster where HAMi's has no Node."""
    is_ours = pod["spec"].get("schedulerName") == world.settings.scheduler_name
    has_hami = any(annotations.REGISTER in node.annotations for node in world.snapshot.nodes)
    return not is_ours and not has_hami and world.snapshot.has("nodes")


def _chosen_node(pod: JsonObject, placement: PodPlacement | None, attempt: Attempt | None) -> str:
    """The Node that the scheduler chose, or may choose now; empty if there is none."""
    noted: str = (pod["metadata"].get("annotations") or {}).get(annotations.VGPU_NODE, "")
    fitting = placement.fitting if placement else []
    told = (name for name in fitting if attempt and f"node({name})" in attempt.text)
    return noted or next(told, next(iter(fitting), ""))


def _created_again(world: World, pod: JsonObject) -> tuple[PlacingChange, ...]:
    """The pod as HAMi's webhook would have changed it, if it fits on a Node then."""
    try:
        spec = {**pod["spec"], "schedulerName": ""}
        fit = world.trial(review_pod({**pod, "spec": spec}, world.settings))
    except DeniedError:  # HAMi would refuse it
        return ()
    fitting = (name for name in sorted(world.nodes, key=by_number) if fit(name).groups)
    said = "create the pod again without schedulerName, where HAMi's webhook sees it"
    return tuple(PlacingChange(said, name) for name in fitting)[:1]


def _story(
    world: World,
    gates: list[Gate],
    placement: PodPlacement | None,
    changes: tuple[PlacingChange, ...] | None,
    now: dt.datetime,
) -> Explanation:
    snapshot, pod = world.snapshot, world.snapshot.pod
    at = next((i for i, one in enumerate(gates) if one.verdict is GateVerdict.BLOCKED), len(gates))
    if any(gate.verdict is GateVerdict.NOTED and gate.advice for gate in gates[:at]):
        # What was wrong from the start comes first: the same pod would fail again.
        gates[at : at + 1] = [msgspec.structs.replace(one, advice="") for one in gates[at : at + 1]]
    metadata, phase = pod["metadata"], str(pod["status"].get("phase") or "Pending")
    namespace, name = str(metadata.get("namespace", "")), str(metadata.get("name", ""))
    born = decode_moment(metadata.get("creationTimestamp"))
    age = f", created {span((now - born).total_seconds())} ago" if born else ""
    deleted = " and being deleted" if metadata.get("deletionTimestamp") else ""
    headline = f"Pod {cap(namespace, 64)}/{cap(name, 256)} is {cap(phase, 32)}{deleted}{age}."
    asked = [
        f"{cap(str(container.get('name', '')), 64)}: {story.request_words(request)}"
        for container in model.all_containers(dict(pod))
        if (request := model.container_request(container, world.settings))
    ]
    later = [Gate(one.name, GateVerdict.NOT_REACHED, "not reached") for one in gates[at + 1 :]]
    return Explanation(
        namespace=namespace,
        pod=name,
        phase=phase,
        headline=headline + (f" It asks for {'; '.join(asked)}." if asked else ""),
        blocked=at < len(gates),
        gates=(*gates[: at + 1], *later),
        nodes=placement.nodes if placement else (),
        nodes_by_reason=placement.reasons if placement else {},
        changes=changes or (),
        tried=changes is not None,
        missing=tuple(f"{part}: {cap(why, 512)}" for part, why in snapshot.unread.items()),
    )

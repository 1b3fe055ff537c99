"""Explains a pod: all gates in order, and the smallest changes if one blocks it.

The scheduler's model has verified each change. Changes of the pod are tried on few Nodes of each
kind of refusal, so that 5,000 Nodes cost little.
"""

import bisect
import copy
import datetime as dt
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

import msgspec

from agent import cluster as annotations
from agent.errors import cap
from agent.hami.annotations import encode_json
from agent.kit.units import counted, span
from agent.kube.objects import decode_moment
from agent.kube.reader import ClusterNode, ClusterSnapshot, JsonObject
from agent.model import gpu_title
from agent.sandbox.explain import gates as at_gate
from agent.sandbox.explain import placement as at_node
from agent.sandbox.explain import story
from agent.sandbox.explain.placement import UNSCHEDULABLE, PodPlacement, World, codes_of, held_by
from agent.sandbox.explain.story import Explanation, Gate, GateVerdict, PlacingChange
from agent.sandbox.scheduler import model
from agent.sandbox.scheduler.filter import NodeFit
from agent.sandbox.scheduler.model import CORES, COUNT, MEMORY
from agent.sandbox.scheduler.registry import Reservation

CHANGES_TOLD: Final = 3
NODES_PER_KIND: Final = 16
HOLDERS_TRIED: Final = 8
_STEERING: Final = (
    *(f"nvidia.com/{word}" for word in ("use-gputype", "nouse-gputype", "use-gpuuuid")),
    *(f"nvidia.com/{word}" for word in ("nouse-gpuuuid", "vgpu-mode", "numa-bind")),
    "hami.io/gpu-scheduler-policy",
)


class _Trial(NamedTuple):
    """A change to try; `size` orders the changes. `place`: the Node where the pod fits then, or "".

    `paste`: the command or the line of YAML that makes it.
    """

    size: tuple[int, int]
    said: str
    paste: str
    place: Callable[[], str]


class _Tries:
    """The single changes with which a pod that fits nowhere may fit, tried on a few Nodes.

    A change is another snapshot: with another pod, other Nodes, quotas or holders.
    """

    def __init__(self, world: World, fits: Mapping[str, NodeFit]) -> None:
        self._world = world
        self._pod = world.pod
        # A few Nodes of each kind of refusal, those with most free memory first.
        kinds: defaultdict[tuple[str, ...], list[tuple[int, str]]] = defaultdict(list)
        for name, fit in fits.items():
            state = world.registered(name)
            free = [gpu.free_mib for gpu in (state.gpus if state else ())]
            kinds[codes_of(fit.reason)].append((-max(free, default=0), name))
        self._names = [n for kind in kinds.values() for _, n in sorted(kind)[:NODES_PER_KIND]]
        near = (one for name in self._names for one in world.holders[name])
        holders = {one.uid: one for one in (*near, *world.neighbours)}.values()
        nodes = tuple(world.nodes[name] for name in self._names)
        self._few = world.changed(nodes=nodes, holders=tuple(holders))

    def smallest(self) -> tuple[PlacingChange, ...]:
        """At most three changes with which the pod fits on some Node, the smallest first."""
        trials = [*self._of_nodes(), *self._of_quotas(), *self._of_pod(), *self._of_holders()]
        found: list[PlacingChange] = []
        for trial in sorted(trials, key=lambda trial: trial.size):
            if len(found) < CHANGES_TOLD and (node := trial.place()):
                found.append(PlacingChange(trial.said, node, trial.paste))
        return tuple(found)

    def _fits(self, **changes: object) -> Callable[[], str]:
        """Tries the pod in the snapshot with these changes."""

        def place() -> str:
            world = self._few.changed(**changes)
            fit = world.trial()
            return next((name for name in world.nodes if fit(name).groups is not None), "")

        return place

    def _of_nodes(self) -> Iterator[_Trial]:
        for node in self._few.snapshot.nodes:
            shown, offer = cap(node.name, 128), self._few.offers[node.name]
            if node.is_closed:
                said, paste = f"uncordon the Node {shown}", f"kubectl uncordon {shown}"
                taints = tuple(one for one in node.taints if one.key != UNSCHEDULABLE.key)
                opened = msgspec.structs.replace(node, is_closed=False, taints=taints)
                yield _Trial((1, 1), said, paste, self._fits(nodes=(opened,)))
            cordoned, gpus = offer.cordoned if offer else frozenset(), self._few.reported(node.name)
            for gpu in gpus:
                named = gpu_title(gpu.uuid, gpu.index)
                if gpu.uuid in cordoned:
                    place = self._noted(node, annotations.CORDON, ",".join(cordoned - {gpu.uuid}))
                    paste = f"hami-agent uncordon {gpu.index} --node {shown}"
                    yield _Trial((1, 0), f"uncordon {named} of {shown}", paste, place)
                if not gpu.healthy:
                    well = msgspec.structs.replace(gpu, healthy=True)
                    report = encode_json([well if one == gpu else one for one in gpus])
                    place = self._noted(node, annotations.REGISTER, report)
                    said = f"repair {named} of {shown}, which is unhealthy"
                    paste = f"hami-agent status --node {shown}   # says what the GPU needs"
                    yield _Trial((1, 2), said, paste, place)

    def _noted(self, node: ClusterNode, key: str, text: str) -> Callable[[], str]:
        """Tries the pod on the Node with another annotation."""
        noted = {**node.annotations, key: text}
        return self._fits(nodes=(msgspec.structs.replace(node, annotations=noted),))

    def _of_quotas(self) -> Iterator[_Trial]:
        """Quotas that are raised to what the pod and the others hold together."""
        world, raised = self._world, copy.deepcopy(list(self._world.snapshot.quotas))
        free = self._few.changed(quotas=()).trial()
        groups = next((g for g in (free(name).groups for name in self._names) if g), None)
        if not raised or groups is None:
            return
        asked = Reservation("", groups, model.init_count(self._pod)).loads().values()
        need = sum(asked, world.held.held(world.namespace))
        memory = -(-need.memory_mib // max(world.settings.rules.memory_factor, 1))
        said, paste = [], []
        for key, amount in zip(at_gate.READ_BY_HAMI, (memory, need.core_percent), strict=True):
            for quota in raised:
                has = model.parse_quantity(quota["spec"]["hard"].get(key))
                if has is not None and has < amount:
                    quota["spec"]["hard"][key] = str(amount)
                    name = cap(quota["metadata"]["name"], 64)
                    said.append(f"{key} of the ResourceQuota {name} from {has:,} to {amount:,}")
                    paste.append(f'{key}: "{amount}"')
        if said:
            text = f"raise {' and '.join(said)}"
            yield _Trial((4, 0), text, ", ".join(paste), self._fits(quotas=raised))

    def _of_pod(self) -> Iterator[_Trial]:
        spec, metadata, noted = self._world.spec, self._world.metadata, self._world.noted
        for key in filter(noted.__contains__, _STEERING):
            paste = f"remove the line: {key}: {cap(noted[key], 128)}"
            others = {name: text for name, text in noted.items() if name != key}
            without = {**self._pod, "metadata": {**metadata, "annotations": others}}
            yield _Trial((2, 0), f"drop the annotation {key}", paste, self._fits(pod=without))
        affinity = dict(spec.get("affinity") or {})
        held = ["nodeSelector"] * bool(spec.get("nodeSelector"))
        if held := held + ["nodeAffinity"] * bool(affinity.pop("nodeAffinity", None)):
            said = f"drop {' and '.join(held)}, so that other Nodes count"
            anywhere = {**spec, "nodeSelector": None, "affinity": affinity}
            yield _Trial((3, 1), said, "", self._fits(pod={**self._pod, "spec": anywhere}))
        for kind in (MEMORY, CORES, COUNT):
            most = max(self._asked(kind))

            def fails(limit: int, kind: str = kind) -> bool:
                return not self._fits(pod=self._capped(kind, limit))()

            # A smaller request fits wherever a greater one does.
            best = bisect.bisect(range(1, most), False, key=fails)
            if best:
                said = {
                    MEMORY: f"{story.mib(best)} ({MEMORY}) instead of {story.mib(most)}",
                    CORES: f"{best} % of the cores ({CORES}) instead of {most} %",
                    COUNT: f"{counted(best, 'GPU')} in one container ({COUNT}) instead of {most}",
                }[kind]
                paste = f"{kind}: {best}"
                if kind == MEMORY and any(map(_is_whole, model.all_containers(self._pod))):
                    paste += f"   # and no {CORES}: 100, the default of a whole GPU"
                place = self._fits(pod=self._capped(kind, best))
                yield _Trial(
                    (3, 1000 - 1000 * best // most), f"ask for at most {said}", paste, place
                )

    def _of_holders(self) -> Iterator[_Trial]:
        """A few of the pods with GPUs, those that are being deleted first, then the smallest."""
        holders = [(held_by(one), one) for name in self._names for one in self._world.holders[name]]
        holders.sort(key=lambda each: (not each[1].is_deleted, *each[0][1:], each[1].name))
        # The greatest, too: if any is enough, it may be that one alone.
        for rank, (load, holder) in enumerate([*holders[:-1][:HOLDERS_TRIED], *holders[-1:]]):
            ends = ", which is being deleted" if holder.is_deleted else " to end, or end it"
            cores = f" and {story.core_words(load.core_percent)}" if load.core_percent else ""
            held = f"it holds {story.mib(load.memory_mib)}{cores} on {cap(holder.chosen, 128)}"
            said = f"wait for {cap(f'{holder.namespace}/{holder.name}', 192)}{ends} ({held})"
            others = tuple(one for one in self._few.snapshot.holders if one is not holder)
            place = self._fits(nodes=(self._world.nodes[holder.chosen],), holders=others)
            yield _Trial((0 if holder.is_deleted else 6, rank), said, "", place)

    def _asked(self, kind: str) -> Iterator[int]:
        """What the containers ask for of one resource; percentages are of the greatest GPU."""
        yield 0
        for *_, request in self._world.containers():
            if request:
                memory = request.memory_on(self._world.greatest_mib)
                yield {CORES: request.cores, COUNT: request.count, MEMORY: memory}[kind]

    def _capped(self, kind: str, most: int) -> JsonObject:
        """The pod whose containers ask for at most `most` of one resource."""
        edited = copy.deepcopy(self._pod)
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
    world = World(snapshot, now, settings or model.SchedulerSettings())
    placement: PodPlacement | None = None
    changes: tuple[PlacingChange, ...] | None = None
    asks, admission = at_gate.asks_for_gpus(world.pod), at_gate.admission_gate(world)
    is_ours = world.spec.get("schedulerName") == world.settings.scheduler_name
    has_hami = any(annotations.REGISTER in node.annotations for node in snapshot.nodes)
    # kube-scheduler alone places it.
    is_foreign = not asks or not (is_ours or has_hami or not snapshot.has("nodes"))
    quota_verdict = GateVerdict.PASSED
    is_over = admission.verdict is GateVerdict.BLOCKED and admission.reason != "E-DELETED"
    if is_over and (is_foreign or world.node):  # what was wrong at first blocks it no more
        admission = msgspec.structs.replace(admission, verdict=GateVerdict.NOTED)
    searched = Gate(at_node.PLACEMENT, GateVerdict.NOT_REACHED, "not reached")
    if world.node:
        searched = at_node.chosen_gate(world, admission.reason, asks=asks)
    elif is_foreign and admission.verdict is not GateVerdict.BLOCKED:
        searched = at_node.foreign_gate(world)
    elif admission.verdict is not GateVerdict.BLOCKED:
        is_read = snapshot.has("nodes") and snapshot.has("pods")
        placement = at_node.place(world) if is_read else None
        searched = at_node.placement_gate(world, placement)
        if placement is not None and not placement.fitting:
            if "ResourceQuotaNotFit" in placement.reasons:
                is_main = placement.reason == "ResourceQuotaNotFit"
                quota_verdict = GateVerdict.BLOCKED if is_main else GateVerdict.NOTED
            # No change of the pod or of a Node helps where the scheduler itself does not work.
            if placement.is_judged and searched.reason not in {"E-ERROR", "E-UNTRIED"}:
                changes = _Tries(world, placement.fits).smallest()
    fitting = placement.fitting if placement else ()
    chosen = world.noted.get(annotations.VGPU_NODE) or next(iter(fitting), "")
    quota = at_gate.quota_gate(world, quota_verdict)
    of_gpus = (at_gate.binding_gate(world, chosen), at_gate.allocation_gate(world))
    gates = [admission, quota, searched, *of_gpus] if asks else [admission, searched]
    gates += [at_gate.start_gate(world), at_gate.running_gate(world)]
    at = next((i for i, one in enumerate(gates) if one.verdict is GateVerdict.BLOCKED), len(gates))
    if any(gate.verdict is GateVerdict.NOTED and gate.advice for gate in gates[:at]):
        # What was wrong from the start comes first: the same pod would fail again.
        gates[at : at + 1] = [msgspec.structs.replace(one, advice="") for one in gates[at : at + 1]]
    later = [Gate(one.name, GateVerdict.NOT_REACHED, "not reached") for one in gates[at + 1 :]]

    # State, age and request of the pod.
    born = decode_moment(world.metadata.get("creationTimestamp"))
    name = f"{cap(world.namespace, 64)}/{cap(world.metadata.get('name', ''), 256)}"
    said = f"Pod {name} is {cap(world.phase, 32)}"
    said += " and being deleted" if world.metadata.get("deletionTimestamp") else ""
    said += f", created {span((world.now - born).total_seconds())} ago" if born else ""
    asked = [f"{name}: {story.request_words(one)}" for name, _, one in world.containers() if one]
    return Explanation(
        namespace=world.namespace,
        pod=str(world.metadata.get("name", "")),
        phase=world.phase,
        headline=f"{said}. It asks for {'; '.join(asked)}." if asked else f"{said}.",
        blocked=at < len(gates),
        gates=(*gates[: at + 1], *later),
        nodes=placement.nodes if placement else (),
        nodes_by_reason=placement.reasons if placement else {},
        changes=changes or (),
        tried=changes is not None,
        missing=tuple(f"{part}: {cap(why, 512)}" for part, why in world.snapshot.unread.items()),
    )

"""The gate of placement: each Node and each GPU with the figures, by the scheduler's model."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from agent.codec.pod import decode_pod_devices
from agent.core.allocation.requests import ContainerRequest
from agent.core.cluster.snapshot import ClusterNode, GpuHolder, JsonObject, PodEventView
from agent.core.errors import MalformedText, cap
from agent.sandbox.explain.eligible import refuse_node
from agent.sandbox.explain.story import GpuVerdict, NodeVerdict
from agent.sandbox.explain.words import (
    KUBE_SCHEDULER,
    NODE_UNREGISTERED,
    counted,
    mib,
    refused_gpu,
)
from agent.sandbox.explain.world import UNREGISTERED, World, version_of
from agent.sandbox.scheduler.fit import NodeFit
from agent.sandbox.scheduler.model import GpuView
from agent.sandbox.scheduler.registry import read_offer
from agent.sandbox.scheduler.requests import pod_requests

NODES_TOLD: Final = 20
HOLDERS_TOLD: Final = 3
_TOKEN: Final = re.compile(r"(?:\d+/\d+ )?([A-Za-z]+)")
_EVENT: Final = re.compile(r"(\d+) nodes (\w+)\((.*)\)", re.DOTALL)
_SCHEDULER_TOTAL: Final = re.compile(r"no available node, (\d+) nodes do not meet")


class ModelPlacement(msgspec.Struct, frozen=True):
    """The answer for all Nodes. `fitting`: their names. `reasons`: Nodes by reason.

    `nodes`: the Nodes nearest to a fit, at most NODES_TOLD. `is_oversized`: even an empty GPU of
    the cluster has less memory than a container asks for.
    """

    fitting: tuple[str, ...]
    nodes: tuple[NodeVerdict, ...]
    reasons: Mapping[str, int]
    refused: int
    without_gpus: int
    is_oversized: bool = False


def place(world: World, pod: JsonObject) -> ModelPlacement:
    """Try the pod on every Node. Raises BadWeightsError."""
    fits = {name: world.fit(pod, name) for name in sorted(world.nodes)}
    fitting = tuple(name for name, fit in fits.items() if fit.groups is not None)
    bare = {
        name
        for name, fit in fits.items()
        if fit.groups is None and not world.has_gpus(world.nodes[name])
    }
    refused = [name for name in fits if name not in bare and fits[name].groups is None]
    reasons = Counter(code for name in refused for code in codes_of(fits[name].reason))
    refused.sort(key=lambda name: (_distance(fits[name]), name))
    told = [*fitting[:HOLDERS_TOLD], *_one_of_each_kind_first(refused, fits)][:NODES_TOLD]
    requests = pod_requests(dict(pod), world.settings)
    return ModelPlacement(
        fitting=fitting,
        nodes=tuple(_verdict(world, pod, name, fits[name], requests) for name in told),
        reasons=dict(sorted(reasons.items())),
        refused=len(refused),
        without_gpus=len(bare),
        is_oversized=_is_oversized(fits.values(), requests),
    )


def codes_of(reason: str) -> tuple[str, ...]:
    """The runbook's ids for the scheduler's text about one Node."""
    if reason == UNREGISTERED:
        return (NODE_UNREGISTERED,)
    found = [_TOKEN.fullmatch(token) for token in reason.split(", ")]
    if not all(found):
        return (KUBE_SCHEDULER,)
    return tuple(match[1] for match in found if match)


def told_by_events(events: Iterable[PodEventView]) -> ModelPlacement | None:
    """The placement as the scheduler's own Events tell it; None if they tell none."""
    nodes: dict[str, list[str]] = {}
    total = 0
    for event in events:
        if event.reason != "FilteringFailed":
            continue
        if all_nodes := _SCHEDULER_TOTAL.fullmatch(event.message):
            total = max(total, int(all_nodes[1]))
        if told := _EVENT.fullmatch(event.message):
            for name in told[3].split(","):
                if told[2] not in nodes.setdefault(name, []):
                    nodes[name].append(told[2])
    total = max(total, len(nodes))
    if not total:
        return None
    verdicts = tuple(
        NodeVerdict(
            name=name,
            is_fit=False,
            reason=", ".join(codes),
            said=f"{', '.join(codes)}, by the scheduler's Event; figures could not be read",
            codes=tuple(codes),
        )
        for name, codes in sorted(nodes.items())
    )
    reasons = Counter(code for verdict in verdicts for code in verdict.codes)
    return ModelPlacement((), verdicts[:NODES_TOLD], dict(sorted(reasons.items())), total, 0)


def _is_oversized(fits: Iterable[NodeFit], requests: Sequence[ContainerRequest | None]) -> bool:
    """Whether a refused container asks for more memory than every GPU that was tried has."""
    tried = [
        (gpu, request)
        for fit in fits
        if fit.gpus and (request := requests[fit.position]) is not None
        for gpu in fit.gpus
    ]
    return bool(tried) and all(
        gpu.capacity.registered_mib < request.memory_on(gpu.capacity.registered_mib)
        for gpu, request in tried
    )


def _one_of_each_kind_first(names: Sequence[str], fits: Mapping[str, NodeFit]) -> list[str]:
    """The Nodes in their order, but one of each kind of refusal before the others."""
    kinds: set[tuple[str, ...]] = set()
    firsts: list[str] = []
    for name in names:
        kind = codes_of(fits[name].reason)
        if kind not in kinds:
            kinds.add(kind)
            firsts.append(name)
    chosen = frozenset(firsts)
    return [*firsts, *(name for name in names if name not in chosen)]


def _distance(fit: NodeFit) -> tuple[int, int]:
    """How far a Node is from a fit: first few kinds of reasons, then much free memory."""
    is_closed = not fit.gpus
    free = (gpu.capacity.registered_mib - gpu.load.memory_mib for gpu in fit.gpus)
    return (len(codes_of(fit.reason)) + 100 * is_closed, -max(free, default=0))


def _verdict(
    world: World,
    pod: JsonObject,
    name: str,
    fit: NodeFit,
    requests: Sequence[ContainerRequest | None],
) -> NodeVerdict:
    if fit.groups is not None:
        return NodeVerdict(name, is_fit=True, said="the pod fits")
    request = requests[fit.position] if fit.gpus else None
    gpus: tuple[GpuVerdict, ...] = ()
    if request is not None and fit.refusals:  # else HAMi's scheduler has not looked at any
        steering = world.steering(pod)
        in_order = sorted(fit.gpus, key=lambda gpu: gpu.capacity.index)
        gpus = tuple(
            _gpu(gpu, fit, request, refused_gpu(_reason(gpu, fit), gpu, request, steering))
            for gpu in in_order
        )
    return NodeVerdict(
        name=name,
        is_fit=False,
        reason=fit.reason,
        said=_said(world, pod, name, fit, request),
        codes=codes_of(fit.reason),
        gpus=gpus,
        has_gpus=world.has_gpus(world.nodes[name]),
        biggest=_biggest(world.holders(name)),
    )


def _reason(gpu: GpuView, fit: NodeFit) -> str:
    return fit.refusals.get(gpu.capacity.uuid, "")


def _gpu(gpu: GpuView, fit: NodeFit, request: ContainerRequest, said: str) -> GpuVerdict:
    has, used = gpu.capacity, gpu.load
    return GpuVerdict(
        uuid=has.uuid,
        index=has.index,
        model=has.type_name,
        reason=_reason(gpu, fit),
        said=said,
        registered_mib=has.registered_mib,
        promised_mib=used.memory_mib,
        asked_mib=request.memory_on(gpu.capacity.registered_mib),
        core_percent=has.core_percent,
        promised_percent=used.core_percent,
        asked_percent=min(request.core_percent, 100),
        slots=has.split_count,
        used_slots=used.slots,
    )


def _said(
    world: World, pod: JsonObject, name: str, fit: NodeFit, request: ContainerRequest | None
) -> str:
    node = world.nodes[name]
    if refusal := refuse_node(pod, node):
        return refusal
    if fit.reason == UNREGISTERED:
        return f"unregistered: {_unregistered(node)}{_agent(world, name)}"
    if fit.reason == "NodeInsufficientDevice" and request is not None:
        gpus = counted(len(fit.gpus), "GPU")
        return f"it has {gpus}, and one container asks for {request.count}"
    return fit.reason


def _unregistered(node: ClusterNode) -> str:
    if read_offer(node.annotations, version_of(node)) is None:
        return "its register annotation is missing or cannot be read"
    return "its kubelet offers 0 slices of nvidia.com/gpu"


def _agent(world: World, node: str) -> str:
    """How the agent's pod on the Node is; empty where agents are no pods."""
    if not world.agents:
        return ""
    if agent := world.agents.get(node):
        return f"; its agent {cap(agent.name, 128)} is {cap(agent.state, 64)}"
    return "; no pod of the agent is on it"


def _biggest(holders: Iterable[GpuHolder]) -> tuple[str, ...]:
    """The pods with most memory on the Node, as text."""
    sums = [(held_mib(holder), f"{holder.namespace}/{holder.name}") for holder in holders]
    sums.sort(key=lambda held: (-held[0], held[1]))
    return tuple(f"{cap(name, 128)} {mib(memory)}" for memory, name in sums[:HOLDERS_TOLD])


def held_mib(holder: GpuHolder) -> int:
    """The memory of all shares of the pod, in MiB; 0 if they cannot be read."""
    try:
        groups = decode_pod_devices(holder.shares)
    except MalformedText:
        return 0
    return sum(share.memory_mib for group in groups for share in group)

"""Decides on which node and GPUs a pod fits, or gives HAMi's reasons for every candidate.

Source: HAMi v2.10 pkg/device/nvidia/device.go:Fit, pkg/scheduler/score.go, scheduler.go:Filter.
"""

import functools
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from agent.allocate.room import ContainerRequest
from agent.model import GpuUuid, Share
from agent.sandbox.scheduler import model
from agent.sandbox.scheduler.model import GpuView, Load, RegisteredNode, SchedulerSettings, Steering
from agent.sandbox.scheduler.registry import Quotas, Reservation
from agent.sandbox.store import Json

Groups = tuple[tuple[Share, ...], ...]
NORMAL: Final = "Normal"
WARNING: Final = "Warning"
_TOKEN: Final = re.compile(r"\d+/\d+ (\w+)")


@dataclass(frozen=True, slots=True)
class NodeFit:
    """The fit on one node: the groups of shares, or the reason (then `groups` is None).

    If there is a reason, `position` is the container that does not fit, `gpus` are the GPUs with
    the use that it found, and `refusals` has the reason of each GPU. HAMi itself tells only their
    counts.
    """

    groups: Groups | None
    reason: str = ""
    position: int = 0
    gpus: tuple[GpuView, ...] = ()
    refusals: Mapping[GpuUuid, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wishes:
    """The requests of a pod; the first `inits` are those of init containers.

    `fits_quota` gets the memory and the cores that the pod would hold; None: no quota counts.
    """

    requests: Sequence[ContainerRequest | None]
    inits: int
    steering: Steering
    fits_quota: Callable[[int, int], bool] | None = None


def wishes_of(pod: Json, settings: SchedulerSettings, quotas: Quotas | None) -> Wishes:
    """What the pod asks for. `quotas`: those that limit its namespace."""
    steering = model.read_steering(pod["metadata"].get("annotations") or {}, settings)
    namespace = pod["metadata"].get("namespace", "")
    fits_quota = functools.partial(quotas.fits, namespace) if quotas else None
    return Wishes(model.pod_requests(pod, settings), model.init_count(pod), steering, fits_quota)


def fit_pod(node: RegisteredNode, wishes: Wishes) -> NodeFit:
    """Place all containers of a pod on one node.

    Init containers run one after another, so each sees the node as it is. The others add up. A
    container without a request has no group: HAMi keeps empty groups under the name of the GPU's
    model and does not write them.
    """
    visible = tuple(gpu for gpu in node.gpus if "nvidia" in gpu.capacity.type_name.lower())
    inits: list[tuple[Share, ...]] = []
    groups: list[tuple[Share, ...]] = []
    running: Sequence[GpuView] = visible
    for position, request in enumerate(wishes.requests):
        if request is None:
            continue
        is_init = position < wishes.inits
        gpus = wishes.steering.order(visible if is_init else running)
        if request.count > len(gpus):
            return NodeFit(None, "NodeInsufficientDevice", position, tuple(gpus))
        before = inits if is_init else groups
        shares, refusals = _fit_container(node, wishes, request, before, gpus)
        if shares is None:
            counts = Counter(refusals.values()).items()
            told = sorted(f"{count}/{len(gpus)} {reason}" for reason, count in counts)
            return NodeFit(None, ", ".join(told), position, tuple(gpus), refusals)
        if not is_init:
            # In the sorted order, on which later ties depend.
            loads = {one.uuid: Load(1, one.memory_mib, one.core_percent) for one in shares}
            running = [
                replace(gpu, load=gpu.load + loads.get(gpu.capacity.uuid, Load())) for gpu in gpus
            ]
        before.append(shares)
    return NodeFit((*inits, *groups))


def _fit_container(
    node: RegisteredNode,
    wishes: Wishes,
    request: ContainerRequest,
    before: Sequence[tuple[Share, ...]],
    gpus: Sequence[GpuView],
) -> tuple[tuple[Share, ...] | None, Mapping[GpuUuid, str]]:
    """The shares on one of the `gpus` each, tried from the last; else the reason of each GPU.

    `before`: the groups of earlier containers of its kind.
    """
    steering, refusals = wishes.steering, dict[GpuUuid, str]()
    picked: list[Share] = []
    numa: int | None = None
    for gpu in reversed(gpus):
        uuid = gpu.capacity.uuid
        kind_refusals = (
            ("CardNotHealth", not gpu.capacity.healthy),
            ("CardCordoned", uuid in node.cordoned),
            ("CardTypeMismatch", not steering.admits_type(gpu.capacity)),
        )
        refusal = next((reason for reason, applies in kind_refusals if applies), None)
        if refusal is None and steering.numa_bind and numa != gpu.capacity.numa:
            refusals.update((share.uuid, "NumaNotFit") for share in picked)
            numa, picked = gpu.capacity.numa, []
        share = Share(uuid, request.memory_on(gpu.capacity.registered_mib), request.cores)
        held = Reservation("", (*before, (*picked, share)), wishes.inits)
        refusal = refusal or _refuse_share(gpu, share, wishes, held)
        if refusal is not None:
            refusals[uuid] = refusal
            continue
        picked.append(share)
        if len(picked) == request.count:
            return tuple(picked), {}
    refusals.update((share.uuid, "AllocatedCardsInsufficientRequest") for share in picked)
    return None, refusals


def _refuse_share(gpu: GpuView, share: Share, wishes: Wishes, held: Reservation) -> str | None:
    """The reason against this share on the GPU, checked in HAMi's order. `held`: with it."""
    has, used, asked = gpu.capacity, gpu.load, share.core_percent
    steering, is_full = wishes.steering, used.core_percent == has.core_percent != 0
    is_alone = has.core_percent == 100 and asked == 100
    if not steering.admits_uuid(has):
        return "CardUuidMismatch"
    if has.split_count <= used.slots:
        return "CardTimeSlicingExhausted"
    if steering.is_mutex and used.slots > 0:
        return "ExclusiveDeviceAllocateConflict"
    if wishes.fits_quota is not None:
        total = sum(held.loads().values(), Load())
        if not wishes.fits_quota(total.memory_mib, total.core_percent):
            return "ResourceQuotaNotFit"
    refusals = (
        ("CardInsufficientMemory", gpu.free_mib < share.memory_mib),
        ("CardInsufficientCore", has.core_percent - used.core_percent < asked),
        ("ExclusiveDeviceAllocateConflict", is_alone and used.slots > 0),
        ("CardComputeUnitsExhausted", is_full and asked == 0),
    )
    return next((reason for reason, applies in refusals if applies), None)


class Notice(NamedTuple):
    """An Event to be written about a pod."""

    type: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Filtered:
    """The answer: the `nodes` that pass, why the others do not, and the shares on the chosen node.

    `groups` is None if nothing was reserved: no fit, or a pod without a GPU request (then
    all candidates pass).
    """

    nodes: tuple[str, ...] = ()
    groups: Groups | None = None
    failed: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[Notice, ...] = ()


def filter_pod(
    pod: Json,
    candidates: Sequence[str],
    registered: Mapping[str, RegisteredNode],
    settings: SchedulerSettings,
    rng: random.Random,
    quotas: Quotas | None = None,
) -> Filtered:
    """Choose the node for a pod, at random among equal scores, as by HAMi's map order.

    `registered` holds the usage of all pods but this one.
    """
    wishes = wishes_of(pod, settings, quotas)
    if not any(wishes.requests):
        return Filtered(nodes=tuple(candidates))
    failed: dict[str, str] = {}
    fits: list[tuple[float, str, Groups]] = []
    for name in candidates:
        node = registered.get(name)
        answer = fit_pod(node, wishes) if node else NodeFit(None, "node unregistered")
        if node is None or answer.groups is None:
            failed[name] = answer.reason
        else:
            fits.append((node.score(), name, answer.groups))
    if not fits:
        # HAMi tells each reason with its nodes, then how many nodes there are.
        nodes: defaultdict[str, list[str]] = defaultdict(list)
        for name, text in sorted(failed.items()):
            for token in text.split(", "):
                if found := _TOKEN.fullmatch(token):
                    nodes[found[1]].append(name)
        texts = sorted(f"{len(them)} nodes {why}({','.join(them)})" for why, them in nodes.items())
        texts.append(f"no available node, {len(failed)} nodes do not meet")
        notices = tuple(Notice(WARNING, "FilteringFailed", text) for text in texts)
        return Filtered(failed=failed, notices=notices)
    rng.shuffle(fits)
    fits.sort(key=lambda fit: fit[0], reverse=wishes.steering.node_policy == "spread")
    _, best, groups = fits[-1]
    scores = ",".join(f"{name}:{score:.2f}" for score, name, _ in fits)
    text = f"find fit node({best}), {len(failed)} nodes not fit, {len(fits)} nodes fit({scores})"
    return Filtered((best,), groups, failed, notices=(Notice(NORMAL, "FilteringSucceed", text),))

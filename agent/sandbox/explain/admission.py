"""The gates before a Node is searched: who schedules the pod, the webhook, the quota."""

from collections.abc import Iterator
from typing import Final

from agent.core.cluster.snapshot import JsonObject
from agent.core.errors import cap
from agent.sandbox.explain.story import Gate, GateVerdict
from agent.sandbox.explain.words import mib
from agent.sandbox.explain.world import World
from agent.sandbox.scheduler.requests import (
    CORES,
    COUNT,
    MEMORY,
    MEMORY_PERCENT,
    all_containers,
    container_request,
    lookup,
    parse_quantity,
)
from agent.sandbox.scheduler.webhook import DEFAULT_SCHEDULER, REVIEWED, review_pod

ADMISSION: Final = "admission"
QUOTA: Final = "quota"
_RESOURCES: Final = (COUNT, MEMORY, MEMORY_PERCENT, CORES)


def asks_for_gpus(pod: JsonObject) -> bool:
    """Whether a container names one of HAMi's resources."""
    return any(
        lookup(container, resource) is not None
        for container in all_containers(dict(pod))
        for resource in _RESOURCES
    )


def admission_gate(world: World, pod: JsonObject) -> Gate:
    """Who schedules the pod, and whether HAMi's webhook saw it."""
    wanted, found = world.settings.scheduler_name, pod["spec"].get("schedulerName") or ""
    shown = cap(found, 64) or "not set"
    if found != wanted:
        return _not_ours(world, pod, shown)
    dropped = tuple(_dropped(world, pod))
    if dropped:
        return Gate(
            ADMISSION,
            GateVerdict.BLOCKED,
            f"HAMi drops the whole GPU request of {', '.join(dropped)}: {MEMORY} is a number of "
            "MiB, and this value is too great or not whole",
            "E-REQUEST",
            f"write {MEMORY} in MiB without a unit, such as 16000",
        )
    if held := pod["spec"].get("schedulingGates"):
        names = ", ".join(cap(str(one.get("name", "")), 128) for one in held)
        said = f"kube-scheduler does not try the pod while it has scheduling gates: {names}"
        advice = "look at the program that set the gate, such as a job queue: it removes it"
        return Gate(ADMISSION, GateVerdict.BLOCKED, said, "E-GATED", advice)
    left = tuple(_missing_defaults(world, pod))
    if left:
        return Gate(
            ADMISSION,
            GateVerdict.NOTED,
            f"scheduler is {shown}; the webhook did not see the pod, so defaults are missing",
            "E-WEBHOOK",
            "create the pod again where HAMi's webhook sees it",
            left,
        )
    said = f"scheduler is {shown}, and the pod has the webhook's defaults"
    return Gate(ADMISSION, GateVerdict.PASSED, said)


def _not_ours(world: World, pod: JsonObject, shown: str) -> Gate:
    wanted = cap(world.settings.scheduler_name, 64)
    if pod["spec"].get("schedulerName") not in (None, "", DEFAULT_SCHEDULER):
        return Gate(
            ADMISSION,
            GateVerdict.BLOCKED,
            f"the pod names the scheduler {shown}, and HAMi's is {wanted}",
            "E-SCHEDULER",
            f"set schedulerName: {wanted}, or leave it out",
        )
    review = review_pod({**pod, "spec": {**pod["spec"], "schedulerName": ""}}, world.settings)
    denied = () if review.is_allowed else (f"it would refuse the pod: {cap(review.message)}",)
    label = f"label {REVIEWED.key}=ignore"
    why = (
        f"its {label} excludes it"
        if not REVIEWED.holds(pod["metadata"].get("labels") or {})
        else f"its namespace may be excluded ({label}), or the webhook did not answer when the pod "
        "was created"
    )
    return Gate(
        ADMISSION,
        GateVerdict.BLOCKED,
        f"HAMi's webhook did not see the pod: scheduler is {shown}, not {wanted}",
        "E-WEBHOOK",
        "create the pod again where HAMi's webhook sees it",
        (why, *denied),
    )


def _dropped(world: World, pod: JsonObject) -> Iterator[str]:
    """The containers that ask for GPUs and whose request HAMi drops."""
    for container in all_containers(dict(pod)):
        count = parse_quantity(lookup(container, COUNT))
        if count and count > 0 and container_request(container, world.settings) is None:
            yield cap(str(container.get("name", "")), 64)


def _missing_defaults(world: World, pod: JsonObject) -> Iterator[str]:
    """The limits that the webhook would have added."""
    review = review_pod({**pod, "spec": {**pod["spec"], "nodeName": ""}}, world.settings)
    pairs = zip(all_containers(dict(pod)), all_containers(review.pod), strict=True)
    for before, after in pairs:
        has = (before.get("resources") or {}).get("limits") or {}
        gets = (after.get("resources") or {}).get("limits") or {}
        for key, value in gets.items():
            if key not in has:
                yield f"{cap(str(before.get('name', '')), 64)}: {key}: {value} is missing"


def quota_gate(world: World, pod: JsonObject, *, is_refused: bool) -> Gate:
    """Whether HAMi's quota has room. `is_refused`: a quota alone keeps the pod from fitting."""
    if not world.snapshot.has("resourcequotas"):
        return Gate(QUOTA, GateVerdict.UNKNOWN, "the ResourceQuotas could not be read")
    namespace = cap(pod["metadata"].get("namespace", ""), 64)
    facts = tuple(_limits(world, namespace))
    if not facts:
        said = f"no ResourceQuota limits GPU memory or cores in {namespace}"
        return Gate(QUOTA, GateVerdict.PASSED, said)
    if is_refused:
        said = f"the ResourceQuota of {namespace} has no room for the pod"
        return Gate(QUOTA, GateVerdict.BLOCKED, said, "ResourceQuotaNotFit", facts=facts)
    said = f"the ResourceQuota of {namespace} has room"
    return Gate(QUOTA, GateVerdict.PASSED, said, facts=facts)


def _limits(world: World, namespace: str) -> Iterator[str]:
    held = world.neighbours.held(namespace)
    for quota in world.snapshot.quotas:
        hard = quota["spec"]["hard"]
        name = cap(quota["metadata"]["name"], 64)
        factor = max(world.settings.memory_factor, 1)
        memory = parse_quantity(hard.get(f"limits.{MEMORY}"))
        cores = parse_quantity(hard.get(f"limits.{CORES}"))
        if memory is not None:
            yield f"{name}: {mib(held.memory_mib)} of {mib(memory * factor)} are held"
        if cores is not None:
            yield f"{name}: {held.core_percent} % of {cores} % of cores are held"

"""The gates before and after the search of a Node.

Before: who schedules the pod, the webhook, the quota. After: the node lock, the agent, the start,
what the pod holds.
"""

import datetime as dt
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from agent import cluster as annotations
from agent.errors import MalformedText, cap
from agent.hami.pod import decode_node_lock, decode_pod_devices
from agent.kube.objects import decode_pod
from agent.kube.reader import REFUSED, ClusterNode, JsonObject, PodEventView
from agent.sandbox.explain.story import Gate, GateVerdict, ago, core_words, mib, when
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
from agent.sandbox.scheduler.usage import TERMINAL
from agent.sandbox.scheduler.webhook import DEFAULT_SCHEDULER, REVIEWED, review_pod
from agent.status import span

ADMISSION: Final = "admission"
QUOTA: Final = "quota"
_RESOURCES: Final = (COUNT, MEMORY, MEMORY_PERCENT, CORES)
BINDING: Final = "binding"
LONG: Final = 60.0
"""Seconds after which a lock is no longer normal: it is held for seconds."""
UNLOCK: Final = "if it stays, remove it: kubectl annotate node {node} hami.io/mutex.lock-"
ALLOCATION: Final = "allocation"
START: Final = "start"
RUNNING: Final = "running"
_ID: Final = re.compile(r"\[(HA-\d{4})\]")
_WRAPPED: Final = re.compile(r"rpc error: code = \w+ desc = (.*?) *\[HA-\d{4}\]", re.DOTALL)
_NORMAL_WAITS: Final = frozenset({"", "ContainerCreating", "PodInitializing"})
_TEXT: Final = 512
"""Characters of a message: the sentence of a refusal with the id at its end fits."""


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
    held, factor = world.neighbours.held(namespace), max(world.settings.memory_factor, 1)
    found: list[str] = []
    for quota in world.snapshot.quotas:
        hard, name = quota["spec"]["hard"], cap(quota["metadata"]["name"], 64)
        memory = parse_quantity(hard.get(f"limits.{MEMORY}"))
        cores = parse_quantity(hard.get(f"limits.{CORES}"))
        if memory is not None:
            found.append(f"{name}: {mib(held.memory_mib)} of {mib(memory * factor)} are held")
        if cores is not None:
            found.append(f"{name}: {held.core_percent} % of {cores} % of cores are held")
    facts = tuple(found)
    if not facts:
        said = f"no ResourceQuota limits GPU memory or cores in {namespace}"
        return Gate(QUOTA, GateVerdict.PASSED, said)
    if is_refused:
        said = f"the ResourceQuota of {namespace} has no room for the pod"
        return Gate(QUOTA, GateVerdict.BLOCKED, said, "ResourceQuotaNotFit", facts=facts)
    said = f"the ResourceQuota of {namespace} has room"
    return Gate(QUOTA, GateVerdict.PASSED, said, facts=facts)


def binding_gate(world: World, pod: JsonObject, chosen: str, now: dt.datetime) -> Gate:
    """Whether the Node `chosen` can be bound. `chosen` is empty if there is none yet."""
    if bound := pod["spec"].get("nodeName"):
        text = (pod["metadata"].get("annotations") or {}).get(annotations.BIND_TIME, "")
        since = ""
        if text.isascii() and text.isdecimal() and len(text) <= len("9999999999"):
            since = f", {ago(dt.datetime.fromtimestamp(int(text), dt.UTC), now)}"
        return Gate(BINDING, GateVerdict.PASSED, f"bound to {cap(bound, 128)}{since}")
    node = world.nodes.get(chosen)
    failure = last_event(world, "BindingFailed")
    if node is not None and annotations.MUTEX_LOCK in node.annotations:
        return _locked(world, pod, node, failure, now)
    is_of_lock = failure and ("locked" in failure.message or "node lock" in failure.message)
    if failure is not None and not is_of_lock:
        said = f"binding failed, {when(failure, now)}: {cap(failure.message)}"
        advice = "kube-scheduler tries again; look at what the message names"
        return Gate(BINDING, GateVerdict.BLOCKED, said, "E-BIND", advice)
    if node is None:
        return Gate(BINDING, GateVerdict.NOT_REACHED, "not reached")
    return Gate(BINDING, GateVerdict.PASSED, f"no lock on {cap(node.name, 128)}")


def last_event(world: World, *reasons: str) -> PodEventView | None:
    """The last Event with one of the reasons."""
    found: PodEventView | None = None
    for event in world.snapshot.events:
        if event.reason not in reasons or event.last is None:
            continue
        if found is None or found.last is None or event.last >= found.last:
            found = event
    return found


def _locked(
    world: World, pod: JsonObject, node: ClusterNode, failure: PodEventView | None, now: dt.datetime
) -> Gate:
    name = cap(node.name, 128)
    facts = (f"last attempt {when(failure, now)}: {cap(failure.message)}",) if failure else ()
    text = node.annotations[annotations.MUTEX_LOCK]
    try:
        lock = decode_node_lock(text)
    except MalformedText as error:
        said = f"the lock of {name} cannot be read, so HAMi binds no pod there ({error})"
        return Gate(BINDING, GateVerdict.BLOCKED, said, "E-LOCK", UNLOCK.format(node=name), facts)
    age = (now - lock.stamp).total_seconds()
    owner = f"{cap(lock.namespace, 64)}/{cap(lock.name, 128)}"
    owner = owner if lock.name else "no pod (it names none)"
    held = f"the lock of {name} is held by {owner} for {span(age)}"
    timeout = world.settings.lock_timeout
    take_over = f"HAMi's scheduler takes it over when it is {span(timeout)} old"
    metadata = pod["metadata"]
    if (lock.namespace, lock.name) == (metadata.get("namespace"), metadata.get("name")):
        said = f"the pod itself holds the lock of {name} for {span(age)}"
        return Gate(BINDING, GateVerdict.WAITING, said, "E-LOCK", facts=facts)
    gone = ""
    if lock.name and world.snapshot.has("pods"):  # else its owner may release it
        holder = world.by_name.get((lock.namespace, lock.name))
        if holder is None:
            gone = "that pod does not exist"
        elif holder.phase in TERMINAL:
            gone = f"that pod has ended ({holder.phase})"
    if gone:
        said = f"{held}, and {gone}"
        advice = f"{take_over} or at its next attempt; {UNLOCK.format(node=name)}"
        return Gate(BINDING, GateVerdict.BLOCKED, said, "E-LOCK", advice, facts)
    if age < LONG:
        said = f"{held}; this is normal for seconds"
        return Gate(BINDING, GateVerdict.WAITING, said, "E-LOCK", facts=facts)
    advice = f"{take_over}; look at why that pod's containers have no GPUs yet"
    return Gate(BINDING, GateVerdict.BLOCKED, f"{held}, too long", "E-LOCK", advice, facts)


def refusal_id(message: str) -> str:
    """The id in a refusal of the agent; empty if another program refused."""
    found = _ID.search(message)
    return found[1] if found else ""


def agent_sentence(message: str) -> str:
    """The agent's own sentence in a kubelet's message, without the id; else the message."""
    found = _WRAPPED.search(message)
    return found[1] if found else message


def allocation_gate(world: World, pod: JsonObject) -> Gate:
    """Whether the device plugin answered; a refusal with its id."""
    phase = (pod["metadata"].get("annotations") or {}).get(annotations.BIND_PHASE, "")
    # A refusal stands in the status, at a waiting container, or in an Event if the status is late.
    texts = [str(pod["status"].get("message") or ""), *(message for *_, message in _waits(pod))]
    if pod["status"].get("phase") in (None, "Pending", "Failed"):
        event = last_event(world, REFUSED, "AllocationRefused")
        texts += [event.message] if event else []
    told = next(filter(refusal_id, texts), "")
    refusal, identifier = "", refusal_id(told) or "E-ALLOCATE"
    if told:
        refusal = f"the agent refused the GPUs: {cap(agent_sentence(told), _TEXT)}"
    elif pod["status"].get("reason") == REFUSED:
        message = cap(str(pod["status"].get("message", "")), _TEXT)
        refusal = f"the kubelet refused the pod: {message}"
    elif phase == annotations.PHASE_FAILED:
        refusal = "the pod's bind-phase is failed: the device plugin of the node refused it"
    if refusal:
        return Gate(ALLOCATION, GateVerdict.BLOCKED, refusal, identifier, _after(pod))
    if not pod["spec"].get("nodeName"):
        return Gate(ALLOCATION, GateVerdict.NOT_REACHED, "not reached")
    statuses = pod["status"].get("containerStatuses") or ()
    has_run = bool(statuses) and all(map(_is_started, statuses))
    if phase == annotations.PHASE_SUCCESS or has_run:
        return Gate(ALLOCATION, GateVerdict.PASSED, "every container has the agent's answer")
    said = "the kubelet has not asked for all containers yet, or the answer is not on the pod yet"
    advice = "if it stays, look at the agent's pod on that node"
    return Gate(ALLOCATION, GateVerdict.WAITING, said, "E-ALLOCATE", advice)


def start_gate(pod: JsonObject) -> Gate:
    """Whether the containers started."""
    phase = pod["status"].get("phase")
    waits = [wait for wait in _waits(pod) if wait[1] not in _NORMAL_WAITS]
    if waits:
        name, reason, message = waits[0]
        text = f": {cap(message, _TEXT)}" if message else ""
        said = f"container {cap(name, 64)} waits: {cap(reason, 64)}{text}"
        advice = "kubectl describe pod and kubectl logs --previous say more"
        return Gate(START, GateVerdict.BLOCKED, said, "E-START", advice)
    if phase == "Failed" and not any(map(_is_started, _statuses(pod))):
        message = str(pod["status"].get("message") or pod["status"].get("reason") or "")
        said = f"no container has started: {cap(message, _TEXT) or 'no reason is told'}"
        return Gate(START, GateVerdict.BLOCKED, said, "E-START", _after(pod))
    if not pod["spec"].get("nodeName"):
        return Gate(START, GateVerdict.NOT_REACHED, "not reached")
    if phase == "Pending":
        said = "the kubelet pulls images, mounts volumes or runs init containers"
        return Gate(START, GateVerdict.WAITING, said, "E-START")
    return Gate(START, GateVerdict.PASSED, "the containers have started")


def running_gate(world: World, pod: JsonObject, now: dt.datetime) -> Gate:
    """What the pod holds and uses, and whether its GPUs are still well."""
    phase = pod["status"].get("phase") or "Pending"
    held, sick = tuple(_held(world, pod, now)), tuple(_sick(world, pod))
    if phase == "Running":
        if sick:
            said = "it runs on a GPU that its node reports as unhealthy"
            node = cap(str(pod["spec"].get("nodeName", "")), 128)
            advice = f"`hami-agent status --node {node}` says what the GPU has and what to do"
            return Gate(RUNNING, GateVerdict.NOTED, said, "CardNotHealth", advice, (*held, *sick))
        said = "it runs and holds:" if held else "it runs"
        return Gate(RUNNING, GateVerdict.PASSED, said, facts=held)
    if phase in ("Succeeded", "Failed"):
        said = f"it has ended ({phase}) and holds nothing"
        verdict = GateVerdict.PASSED if phase == "Succeeded" else GateVerdict.BLOCKED
        message = str(pod["status"].get("message") or pod["status"].get("reason") or "")
        facts = (cap(message, _TEXT),) if message else ()
        reason = "" if verdict is GateVerdict.PASSED else "E-START"
        return Gate(RUNNING, verdict, said, reason, facts=facts)
    return Gate(RUNNING, GateVerdict.NOT_REACHED, "not reached", facts=held)


def _after(pod: JsonObject) -> str:
    if pod["status"].get("phase") == "Failed":
        return "the pod stays Failed; its controller creates a new one, or create it again"
    return "the runbook's entry says what to do"


def _statuses(pod: JsonObject) -> Iterator[Mapping[str, Any]]:
    for key in ("initContainerStatuses", "containerStatuses"):
        yield from pod["status"].get(key) or ()


def _waits(pod: JsonObject) -> Iterator[tuple[str, str, str]]:
    """Name, reason and message of each waiting container."""
    for status in _statuses(pod):
        waiting = (status.get("state") or {}).get("waiting") or {}
        if waiting:
            texts = (status.get("name"), waiting.get("reason"), waiting.get("message"))
            name, reason, message = (str(text or "") for text in texts)
            yield name, reason, message


def _is_started(status: Mapping[str, Any]) -> bool:
    state = status.get("state") or {}
    return "running" in state or "terminated" in state


def _held(world: World, pod: JsonObject, now: dt.datetime) -> Iterator[str]:
    """What the scheduler's annotation gives each container, and what it uses of that."""
    text = (pod["metadata"].get("annotations") or {}).get(annotations.ALLOCATED)
    if text is None:
        return
    try:
        groups, view = decode_pod_devices(text), decode_pod(pod, "")
    except MalformedText as error:
        yield f"the pod's devices annotation cannot be read: {error}"
        return
    indexes = {gpu.capacity.uuid: gpu.capacity.index for gpu in _gpus(world, pod)}
    containers = all_containers(dict(pod))
    for container, group in zip(containers, groups, strict=False):
        for share in group:
            index = indexes.get(share.uuid)
            gpu = f"GPU {index}" if index is not None else "GPU"
            name = str(container.get("name", ""))
            said = (
                f"{cap(name, 64)}: {gpu} ({cap(share.uuid, 64)}), "
                f"{mib(share.memory_mib)}, {core_words(share.core_percent)}"
            )
            if unkept := view.unkept(name):
                said += f", not kept: {unkept}"
            for use in world.snapshot.uses:
                if (use.container, use.uuid) == (name, share.uuid) and use.used_mib is not None:
                    said += f"; it uses {mib(use.used_mib)}"
                    if use.last_kernel:
                        said += f", its last kernel ran {ago(use.last_kernel, now)}"
                    break
            yield said
    if world.snapshot.use_unread:
        yield f"what it uses of that is not known: {cap(world.snapshot.use_unread, _TEXT)}"


def _sick(world: World, pod: JsonObject) -> Iterator[str]:
    text = (pod["metadata"].get("annotations") or {}).get(annotations.ALLOCATED, "")
    for gpu in _gpus(world, pod):
        if not gpu.capacity.healthy and gpu.capacity.uuid in text:
            yield f"GPU {gpu.capacity.index} ({cap(gpu.capacity.uuid, 64)}) is unhealthy"


def _gpus(world: World, pod: JsonObject) -> tuple[Any, ...]:
    node = pod["spec"].get("nodeName", "")
    state = world.registered(node) if node in world.nodes else None
    return state.gpus if state else ()

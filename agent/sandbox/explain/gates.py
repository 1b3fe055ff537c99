"""The gates before and after the search of a Node.

Before: who schedules the pod, the webhook, the quota. After: the node lock, the agent, the start,
what the pod holds.
"""

import datetime as dt
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from agent import cluster as annotations
from agent.allocate.match import pair_groups
from agent.errors import MalformedText, Refusal, cap
from agent.hami.annotations import decode_node_lock
from agent.kit.units import span
from agent.kube.objects import decode_moment
from agent.kube.reader import REFUSED, ClusterNode, JsonObject, PodEventView
from agent.sandbox.explain import story
from agent.sandbox.explain.placement import World, held_by
from agent.sandbox.explain.story import TEXT, Gate, GateVerdict, agent_words, mib, when
from agent.sandbox.scheduler import model
from agent.sandbox.scheduler.model import CORES, COUNT, MEMORY, all_containers, lookup
from agent.sandbox.scheduler.registry import TERMINAL
from agent.sandbox.scheduler.verbs import LOCK_TIMEOUT
from agent.sandbox.scheduler.webhook import DEFAULT_SCHEDULER, REVIEWED, DeniedError, review_pod

_NAMED: Final = re.compile(r"\bGPU-|\bGPUs? [0-9]")
"""Where an Event names GPUs, by UUID or index."""
_SEVERAL: Final = re.compile(r"\bGPUs ([0-9]+(?:, [0-9]+)*)")
"""The indexes of GPUs in an Event. Source: gpus_in_words of agent/report.py."""

ADMISSION: Final = "admission"
QUOTA: Final = "quota"
BINDING: Final = "binding"
ALLOCATION: Final = "allocation"
START: Final = "start"
RUNNING: Final = "running"
RESOURCES: Final = (COUNT, MEMORY, model.MEMORY_PERCENT, CORES)
READ_BY_HAMI: Final = (f"limits.{MEMORY}", f"limits.{CORES}")
"""The names in a ResourceQuota that HAMi's scheduler reads."""
HOLDERS_TOLD: Final = 3
LONG: Final = 60.0
"""Seconds after which a lock is no longer normal: it is held for seconds."""
DEGRADED: Final = "GpuDegradedForPod"
"""The reason of the Event on a pod of which a GPU became unusable."""
ENDED_FREED_WITHIN: Final = 5.0
"""Seconds in which an agent frees the lock of a pod that has ended."""
UNLOCK: Final = "if it stays, remove it: kubectl annotate node {node} hami.io/mutex.lock-"
_NORMAL_WAITS: Final = frozenset({"", "ContainerCreating", "PodInitializing"})


def asks_for_gpus(pod: JsonObject) -> bool:
    """Whether a container names one of HAMi's resources."""
    containers = all_containers(dict(pod))
    return any(lookup(one, key) is not None for one in containers for key in RESOURCES)


def admission_gate(world: World, pod: JsonObject, now: dt.datetime) -> Gate:
    """Who schedules the pod, whether it may be tried, and whether HAMi's webhook saw it."""
    deleting = None if pod["spec"].get("nodeName") else deletion(pod, now)
    if deleting is not None:
        return Gate(ADMISSION, GateVerdict.BLOCKED, *deleting)
    found = pod["spec"].get("schedulerName") or ""
    shown = cap(found, 64) or "not set"
    if found != world.settings.scheduler_name:
        return _not_ours(world, pod, shown)
    if dropped := dict(_dropped(world, pod)):
        said = (
            f"HAMi drops the whole GPU request of {', '.join(dropped)}: {MEMORY} is a number of "
            "MiB, and this value is too great or not whole"
        )
        meant = next(filter(None, dropped.values()), 16000)
        advice = f"write MiB without a unit: `{MEMORY}: {meant}`"
        return Gate(ADMISSION, GateVerdict.BLOCKED, said, "E-REQUEST", advice)
    if held := pod["spec"].get("schedulingGates"):
        names = ", ".join(cap(str(one.get("name", "")), 128) for one in held)
        said = f"kube-scheduler does not try the pod while it has scheduling gates: {names}"
        advice = "look at the program that set the gate, such as a job queue: it removes it"
        return Gate(ADMISSION, GateVerdict.BLOCKED, said, "E-GATED", advice)
    if left := tuple(_missing_defaults(world, pod)):
        said = f"scheduler is {shown}; the webhook did not see the pod, so defaults are missing"
        advice = f"{story.recreated(pod)} where HAMi's webhook sees it"
        return Gate(ADMISSION, GateVerdict.NOTED, said, "E-WEBHOOK", advice, left)
    said = f"scheduler is {shown}, with the webhook's defaults"
    facts = () if pod["spec"].get("nodeName") else tuple(_whole_gpus(world, pod))
    return Gate(ADMISSION, GateVerdict.PASSED, said, facts=facts)


def deletion(pod: JsonObject, now: dt.datetime) -> tuple[str, str, str] | None:
    """Sentence, id and advice about a pod that is being deleted; None if it is not."""
    deleted = decode_moment(pod["metadata"].get("deletionTimestamp"))
    if deleted is None:
        return None
    finalizers = [cap(str(one), 128) for one in pod["metadata"].get("finalizers") or ()]
    said = f"the pod was deleted {when(deleted, now)} and is still there"
    if not finalizers:
        return said, "E-DELETED", "its kubelet, or the API server, removes it"
    advice = "look at the program that set the finalizer: it removes it when its work is done"
    return f"{said}: finalizers keep it ({', '.join(finalizers)})", "E-DELETED", advice


def _not_ours(world: World, pod: JsonObject, shown: str) -> Gate:
    wanted = cap(world.settings.scheduler_name, 64)
    if pod["spec"].get("schedulerName") not in (None, "", DEFAULT_SCHEDULER):
        said = f"the pod names the scheduler {shown}, and HAMi's is {wanted}"
        advice = f"leave schedulerName out, or write `schedulerName: {wanted}`"
        return Gate(ADMISSION, GateVerdict.BLOCKED, said, "E-SCHEDULER", advice)
    # As it was created: the webhook sees a pod before it has a Node.
    spec = {**pod["spec"], "schedulerName": "", "nodeName": ""}
    denied: tuple[str, ...] = ()
    try:
        review_pod({**pod, "spec": spec}, world.settings)
    except DeniedError as refusal:
        denied = (f"it would refuse the pod: {cap(str(refusal))}",)
    label = f"label {REVIEWED.key}=ignore"
    why = f"its namespace may be excluded ({label}), or the webhook did not answer when the pod "
    why += "was created"
    if not REVIEWED.holds(pod["metadata"].get("labels") or {}):
        why = f"its {label} excludes it"
    said = f"HAMi's webhook did not see the pod: scheduler is {shown}, not {wanted}"
    advice = f"{story.recreated(pod)} where HAMi's webhook sees it"
    return Gate(ADMISSION, GateVerdict.BLOCKED, said, "E-WEBHOOK", advice, (why, *denied))


def _dropped(world: World, pod: JsonObject) -> Iterator[tuple[str, int | None]]:
    """The containers that ask for GPUs and whose request HAMi drops; the MiB that were meant."""
    for container in all_containers(dict(pod)):
        count = model.parse_quantity(lookup(container, COUNT))
        if count and count > 0 and model.container_request(container, world.settings) is None:
            asked = model.parse_quantity(lookup(container, MEMORY))
            yield cap(str(container.get("name", "")), 64), asked and asked // 2**20


def _whole_gpus(world: World, pod: JsonObject) -> Iterator[str]:
    """The containers that ask for whole GPUs because their limits name no memory."""
    noted = pod["metadata"].get("annotations") or {}
    for container in all_containers(dict(pod)):
        asks = model.container_request(container, world.settings) is not None
        if asks and model.names_no_memory(container):
            ignored = [key for key in RESOURCES if key in noted]
            also = f"; the annotation {', '.join(ignored)} is ignored" if ignored else ""
            name = cap(str(container.get("name", "")), 64)
            yield f"{name} asks for whole GPUs, because its limits have no {MEMORY}{also}"


def _missing_defaults(world: World, pod: JsonObject) -> Iterator[str]:
    """The limits that the webhook would have added."""
    try:
        admitted = review_pod({**pod, "spec": {**pod["spec"], "nodeName": ""}}, world.settings)
    except DeniedError:
        return
    pairs = zip(all_containers(dict(pod)), all_containers(admitted), strict=True)
    for before, after in pairs:
        has = (before.get("resources") or {}).get("limits") or {}
        gets = (after.get("resources") or {}).get("limits") or {}
        for key, value in gets.items():
            if key not in has:
                yield f"{cap(str(before.get('name', '')), 64)}: {key}: {value} is missing"


def quota_gate(world: World, *, is_refused: bool) -> Gate:
    """Whether HAMi's quota has room. `is_refused`: a quota alone keeps the pod from fitting."""
    snapshot, namespace = world.snapshot, cap(world.namespace, 64)
    if not snapshot.has("resourcequotas"):
        return Gate(QUOTA, GateVerdict.UNKNOWN, "the ResourceQuotas could not be read")
    held = world.held.held(world.namespace)
    factor = max(world.settings.memory_factor, 1)
    counted, unread = [], []
    for quota in snapshot.quotas:
        hard, name = quota["spec"]["hard"], cap(quota["metadata"]["name"], 64)
        memory, cores = (model.parse_quantity(hard.get(key)) for key in READ_BY_HAMI)
        if memory is not None:
            counted.append(f"{name}: {mib(held.memory_mib)} of {mib(memory * factor)} are held")
        if cores is not None:
            counted.append(f"{name}: {held.core_percent} % of {cores} % of cores are held")
        for key in hard:
            # Kubernetes itself counts requests.nvidia.com/gpu, the number of slices.
            if "nvidia.com/" in key and key not in (*READ_BY_HAMI, f"requests.{COUNT}"):
                form = f"requests.{COUNT}" if key.endswith(COUNT) else READ_BY_HAMI["core" in key]
                unread.append(f"{name}: HAMi does not read {cap(key, 128)}; what counts is {form}")
    if counted and not snapshot.is_own_read:
        said = "what pods hold of the ResourceQuota could not be read"
        return Gate(QUOTA, GateVerdict.UNKNOWN, said, facts=tuple(unread))
    if is_refused:
        said = f"the ResourceQuota of {namespace} has no room for the pod"
        most = sorted((-held_by(one).memory_mib, one.name) for one in world.neighbours)
        told = [f"{cap(name, 128)} {mib(-total)}" for total, name in most[:HOLDERS_TOLD]]
        counted += [f"most is held by {', '.join(told)}"] if told else []
        facts = (*counted, *unread)
        return Gate(QUOTA, GateVerdict.BLOCKED, said, "ResourceQuotaNotFit", facts=facts)
    said = f"no ResourceQuota limits GPU memory or cores in {namespace}"
    said = f"the ResourceQuota of {namespace} has room" if counted else said
    verdict = GateVerdict.NOTED if unread else GateVerdict.PASSED
    reason = "E-QUOTA" if unread else ""
    return Gate(QUOTA, verdict, said, reason, facts=(*counted, *unread))


def binding_gate(
    world: World, pod: JsonObject, chosen: str, attempt: story.Attempt | None, now: dt.datetime
) -> Gate:
    """Whether the Node `chosen` can be bound. `chosen` is empty if there is none yet."""
    if bound := pod["spec"].get("nodeName"):
        text = (pod["metadata"].get("annotations") or {}).get(annotations.BIND_TIME, "")
        since = ""
        if re.fullmatch("[0-9]{1,10}", text):
            since = f", {when(dt.datetime.fromtimestamp(int(text), dt.UTC), now)}"
        return Gate(BINDING, GateVerdict.PASSED, f"bound to {cap(bound, 128)}{since}")
    node = world.nodes.get(chosen)
    failure = story.last_event(world.snapshot.events, "BindingFailed")
    said, at = (failure.message, failure.last) if failure else ("", None)
    if not said and attempt is not None and attempt.stage is story.AttemptStage.CHOSEN:
        said, at = attempt.text, attempt.at
    facts = (f"last attempt {when(at, now)}: {cap(said, TEXT)}",) if said else ()
    if node is not None and annotations.MUTEX_LOCK in node.annotations:
        return _locked(world, pod, node, facts, now)
    text = f"binding failed, {when(at, now)}: {cap(said, TEXT)}"
    if "locked" in said or "node lock" in said:
        if not world.snapshot.has("nodes"):
            advice = "who may read Nodes sees the holder: `hami-agent explain` with such an account"
            return Gate(BINDING, GateVerdict.BLOCKED, text, "E-LOCK", advice)
    elif said and not said.startswith("find fit node"):
        advice = "kube-scheduler tries again; look at what the message names"
        return Gate(BINDING, GateVerdict.BLOCKED, text, "E-BIND", advice)
    if node is None:
        return Gate(BINDING, GateVerdict.NOT_REACHED, "not reached")
    return Gate(BINDING, GateVerdict.PASSED, f"no lock on {cap(node.name, 128)}")


def _locked(
    world: World, pod: JsonObject, node: ClusterNode, facts: tuple[str, ...], now: dt.datetime
) -> Gate:
    name = cap(node.name, 128)
    try:
        lock = decode_node_lock(node.annotations[annotations.MUTEX_LOCK])
    except MalformedText as error:
        said = f"the lock of {name} cannot be read, so HAMi binds no pod there ({error})"
        return Gate(BINDING, GateVerdict.BLOCKED, said, "E-LOCK", UNLOCK.format(node=name), facts)
    age, key = (now - lock.stamp).total_seconds(), (lock.namespace, lock.name)
    if key == (pod["metadata"].get("namespace"), pod["metadata"].get("name")):
        said = f"the pod itself holds the lock of {name} for {span(age)}"
        return Gate(BINDING, GateVerdict.WAITING, said, "E-LOCK", facts=facts)
    owner = f"{cap(lock.namespace, 64)}/{cap(lock.name, 128)}"
    owner = owner if lock.name else "no pod (it names none)"
    held = f"the lock of {name} is held by {owner} for {span(age)}"
    old = "at its next attempt" if age > LOCK_TIMEOUT else f"when it is {span(LOCK_TIMEOUT)} old"
    take_over = f"HAMi's scheduler takes it over {old}"
    phases = {(one.namespace, one.name): one.phase for one in world.snapshot.holders}
    phase = phases.get(key)
    if phase in TERMINAL:
        said, limit = f"{held}, and that pod has ended ({phase})", span(ENDED_FREED_WITHIN)
        frees = f"its agent frees it within {limit}"
        if age > ENDED_FREED_WITHIN:
            frees = f"its agent should have freed it within {limit}: look at its pod"
        advice = f"{frees}; {take_over}; {UNLOCK.format(node=name)}"
        return Gate(BINDING, GateVerdict.BLOCKED, said, "E-LOCK", advice, facts)
    if age < LONG:
        said = f"{held}; this is normal for seconds"
        return Gate(BINDING, GateVerdict.WAITING, said, "E-LOCK", facts=facts)
    advice = f"{take_over}; see why its holder has no GPUs yet: `hami-agent explain {owner}`"
    if phase is None:
        advice = f"{take_over}; look whether its holder exists, and at the agent's pod on {name}"
    return Gate(BINDING, GateVerdict.BLOCKED, f"{held}, too long", "E-LOCK", advice, facts)


def allocation_gate(world: World, pod: JsonObject, now: dt.datetime) -> Gate:
    """Whether the device plugin answered; a refusal with its id, or its cause by its text."""
    status, node = pod["status"], str(pod["spec"].get("nodeName") or "")
    phase = (pod["metadata"].get("annotations") or {}).get(annotations.BIND_PHASE, "")
    # A refusal stands in the status, at a waiting container, or in an Event if the status is late.
    texts = [str(status.get("message") or ""), *(message for *_, message in _waits(pod))]
    if status.get("phase") in (None, "Pending", "Failed"):
        event = story.last_event(world.snapshot.events, REFUSED, "AllocationRefused")
        texts += [event.message] if event else []
    facts = agent_words(_of_node(world, pod, node), now, node) if node else ()
    stays = " The pod stays Failed." if status.get("phase") == "Failed" else ""
    refused = ((sentence, ha) for sentence, ha in map(story.agent_refusal, texts) if ha)
    sentence, reason = next(refused, ("", ""))
    if reason:
        said = f"the agent refused the GPUs: {cap(sentence, TEXT)}"
        advice = f"do what it says; then {story.recreated(pod)}" if stays else ""
        return Gate(ALLOCATION, GateVerdict.BLOCKED, said, reason, advice, facts)
    if status.get("reason") == REFUSED:
        cause, remedy = story.meaning(texts[0], node)
        said = f"the kubelet refused the pod: {cap(texts[0], TEXT)}"
        facts = (*((cause,) if cause else ()), *facts)
        advice = f"{remedy or 'look at what the message names'}.{stays}"
        return Gate(ALLOCATION, GateVerdict.BLOCKED, said, "E-ALLOCATE", advice, facts)
    if phase == annotations.PHASE_FAILED:
        said = "the pod's bind-phase is failed: the device plugin of the node refused it"
        advice = f"look at the agent's log on {cap(node, 128)}.{stays}"
        return Gate(ALLOCATION, GateVerdict.BLOCKED, said, "E-ALLOCATE", advice, facts)
    if not node:
        return Gate(ALLOCATION, GateVerdict.NOT_REACHED, "not reached")
    statuses = status.get("containerStatuses") or ()
    has_run = bool(statuses) and all(map(_is_started, statuses))
    if phase == annotations.PHASE_SUCCESS or has_run:
        return Gate(ALLOCATION, GateVerdict.PASSED, "every container has the agent's answer")
    said = "the kubelet has not asked for all containers yet, or the answer is not on the pod yet"
    advice = "if it stays, look at the agent's pod on that node"
    return Gate(ALLOCATION, GateVerdict.WAITING, said, "E-ALLOCATE", advice, facts)


def _of_node(world: World, pod: JsonObject, node: str) -> Iterator[PodEventView]:
    """The Events of the pod's Node that may say why it has no answer.

    Those that name GPUs count if one is the pod's, all others if they fall into its life.
    """
    groups, offer = (world.view.groups if world.view else None), world.offers.get(node)
    gpus = {share.uuid for group in groups or () for share in group}
    indexes = {str(gpu.index) for gpu in (offer.gpus if offer else ()) if gpu.uuid in gpus}
    created = decode_moment(pod["metadata"].get("creationTimestamp"))

    for event in world.snapshot.node_events:
        if _NAMED.search(event.message) or event.reason.startswith("Allocation"):
            # Several are named by their indexes, one also by its UUID.
            listed = {word for text in _SEVERAL.findall(event.message) for word in text.split(", ")}
            is_ours = any(uuid in event.message for uuid in gpus) or not indexes.isdisjoint(listed)
        else:
            is_ours = created is None or event.last is None or event.last >= created
        if is_ours:
            yield event


def start_gate(world: World, pod: JsonObject, now: dt.datetime) -> Gate:
    """Whether the containers started; what kubelet, runtime and agent say if they did not."""
    phase, node = pod["status"].get("phase"), str(pod["spec"].get("nodeName") or "")
    waits = [wait for wait in _waits(pod) if wait[1] not in _NORMAL_WAITS]
    ended = tuple(_ends(pod))
    facts = (*ended, *agent_words(world.snapshot.events, now))
    if waits:
        name, reason, message = waits[0]
        text = f": {cap(message, TEXT)}" if message else ""
        said = f"container {cap(name, 64)} waits: {cap(reason, 64)}{text}"
        cause, remedy = story.meaning(" ".join((message, *ended)), node)
        facts = (cause, *facts) if cause else facts
        advice = remedy or "kubectl describe pod and kubectl logs --previous say more"
        return Gate(START, GateVerdict.BLOCKED, said, "E-START", advice, facts)
    if phase == "Failed" and not any(map(_is_started, _statuses(pod))):
        text = f"{pod['status'].get('reason') or ''} {story.status_text(pod)}"
        cause, remedy = story.meaning(text, node)
        said = (
            f"no container has started: {cap(story.status_text(pod), TEXT) or 'no reason is told'}"
        )
        advice = f"{remedy or 'remove what the message names'}. The pod stays Failed."
        return Gate(START, GateVerdict.BLOCKED, said, "E-START", advice, (cause,) if cause else ())
    if not node:
        return Gate(START, GateVerdict.NOT_REACHED, "not reached")
    if phase == "Pending":
        said = "the kubelet pulls images, mounts volumes or runs init containers"
        return Gate(START, GateVerdict.WAITING, said, "E-START", facts=facts)
    return Gate(START, GateVerdict.PASSED, "the containers have started")


def running_gate(world: World, pod: JsonObject, now: dt.datetime) -> Gate:
    """What the pod holds and uses, and whether its GPUs are still well."""
    phase = pod["status"].get("phase") or "Pending"
    held, words = tuple(_held(world)), agent_words(world.snapshot.events, now)
    fallen = [one.reason == DEGRADED for one in story.agent_events(world.snapshot.events)]
    node = cap(str(pod["spec"].get("nodeName", "")), 128)
    if phase == "Running":
        if sick := tuple(_sick(world)):
            said = "it runs on a GPU that its node does not report as healthy"
            advice = f"`hami-agent status --node {node}` says what the GPU has and what to do"
            facts = (*held, *sick, *words)
            return Gate(RUNNING, GateVerdict.NOTED, said, "CardNotHealth", advice, facts)
        if deleting := deletion(pod, now):
            return Gate(RUNNING, GateVerdict.NOTED, *deleting, (*held, *words))
        said = "it runs and holds:" if held else "it runs"
        is_read = str(pod["spec"].get("nodeName")) in world.nodes
        is_well = ("its node reports all of its GPUs as healthy now",)
        facts = (*held, *words, *(is_well if any(fallen) and is_read else ()))
        # What the agent said of a GPU is over; what it said of the pod itself may not be.
        is_over = all(fallen) and (is_read or not fallen)
        verdict = GateVerdict.PASSED if is_over else GateVerdict.NOTED
        return Gate(RUNNING, verdict, said, "" if is_over else "E-START", facts=facts)
    if phase in TERMINAL:
        said = f"it has ended ({phase}) and holds nothing"
        facts = (
            *((cap(story.status_text(pod), TEXT),) if story.status_text(pod) else ()),
            *_ends(pod),
            *words,
        )
        if deleting := deletion(pod, now):
            return Gate(RUNNING, GateVerdict.NOTED, *deleting, facts)
        if phase == "Succeeded":
            return Gate(RUNNING, GateVerdict.PASSED, said, facts=facts)
        _, remedy = story.meaning(" ".join(facts), node)
        return Gate(RUNNING, GateVerdict.BLOCKED, said, "E-START", remedy, facts)
    return Gate(RUNNING, GateVerdict.NOT_REACHED, "not reached", facts=held)


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


def _ends(pod: JsonObject) -> Iterator[str]:
    """How containers that failed ended last."""
    for status in _statuses(pod):
        for key in ("state", "lastState"):
            ended = (status.get(key) or {}).get("terminated") or {}
            if ended.get("exitCode"):
                text = str(ended.get("message") or ended.get("reason") or "")
                name = cap(str(status.get("name", "")), 64)
                said = f"{name} ended with exit code {ended['exitCode']}"
                yield f"{said}: {cap(text, TEXT)}" if text else said
                break


def _is_started(status: Mapping[str, Any]) -> bool:
    state = status.get("state") or {}
    return "running" in state or "terminated" in state


def _held(world: World) -> Iterator[str]:
    """What the scheduler's annotation gives each container."""
    view = world.view
    if view is not None and view.groups_error:
        yield f"the pod's devices annotation cannot be read: {view.groups_error}"
    if view is None or not view.groups:
        return
    try:
        pairs = pair_groups(view.groups, view.containers)
        paired = [(name, shares) for name, (_, shares) in pairs.items()]
    except Refusal as refusal:
        yield cap(refusal.sentence, TEXT)
        paired = [("a container", group) for group in view.groups if group]
    offer = world.offers.get(view.node)
    indexes = {gpu.uuid: f"GPU {gpu.index}" for gpu in offer.gpus} if offer else {}
    for name, group in paired:
        for share in group:
            said = (
                f"{cap(name, 64)}: {indexes.get(share.uuid, 'GPU')} ({cap(share.uuid, 64)}), "
                f"{mib(share.memory_mib)}, {story.core_words(share.core_percent)}"
            )
            if unkept := view.unkept(name):
                said += f", not kept: {unkept}"
            yield said


def _sick(world: World) -> Iterator[str]:
    """The GPUs of the pod that its Node reports as unhealthy, or does not report any more."""
    groups, node = (world.view.groups or (), world.view.node) if world.view else ((), "")
    offer = world.offers.get(node)
    known = {gpu.uuid: gpu for gpu in offer.gpus} if offer else {}
    for uuid in dict.fromkeys(share.uuid for group in groups for share in group):
        if uuid not in known and node in world.nodes:
            yield f"no Node reports GPU {cap(uuid, 64)} any more: it is lost, or was taken out"
        elif uuid in known and not known[uuid].healthy:
            yield f"GPU {known[uuid].index} ({cap(uuid, 64)}) is unhealthy"

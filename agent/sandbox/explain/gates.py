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
from agent.kube.reader import REFUSED, ClusterNode, PodEventView
from agent.model import gpu_title
from agent.sandbox.explain import story
from agent.sandbox.explain.placement import ADVICE, HOLDERS_TOLD, World, held_by
from agent.sandbox.explain.story import TEXT, Gate, GateVerdict, agent_words, mib, when
from agent.sandbox.scheduler import model
from agent.sandbox.scheduler.model import CORES, COUNT, MEMORY, all_containers, lookup
from agent.sandbox.scheduler.registry import TERMINAL
from agent.sandbox.scheduler.verbs import LOCK_TIMEOUT
from agent.sandbox.scheduler.webhook import DEFAULT_SCHEDULER, REVIEWED, DeniedError, review_pod
from agent.sandbox.store import Json

ADMISSION: Final = "admission"
QUOTA: Final = "quota"
BINDING: Final = "binding"
ALLOCATION: Final = "allocation"
START: Final = "start"
RUNNING: Final = "running"
RESOURCES: Final = (COUNT, MEMORY, model.MEMORY_PERCENT, CORES)
READ_BY_HAMI: Final = (f"limits.{MEMORY}", f"limits.{CORES}")
"""The names in a ResourceQuota that HAMi's scheduler reads."""
LONG: Final = 60.0
"""Seconds after which a lock is no longer normal: it is held for seconds."""
_NORMAL_WAITS: Final = frozenset({"", "ContainerCreating", "PodInitializing"})
_UUID: Final = re.compile(r"\bGPU-[\w-]+")


def asks_for_gpus(pod: Json) -> bool:
    """Whether a container names one of HAMi's resources."""
    return any(lookup(one, key) is not None for one in all_containers(pod) for key in RESOURCES)


def admission_gate(world: World) -> Gate:
    """Who schedules the pod, whether it may be tried, and whether HAMi's webhook saw it."""
    deleting = None if world.node else deletion(world)
    if deleting is not None:
        return Gate(ADMISSION, GateVerdict.BLOCKED, *deleting)
    if not asks_for_gpus(world.pod):
        return Gate(ADMISSION, GateVerdict.PASSED, "the pod asks for no GPU of HAMi")
    dropped = {}
    for name, container, request in world.containers():
        count = model.parse_quantity(lookup(container, COUNT))
        if count and count > 0 and request is None:
            dropped[name] = str(lookup(container, MEMORY))
    if dropped:
        found = ", ".join(f"{cap(text, 64)} ({name})" for name, text in dropped.items())
        said = f"HAMi drops the whole GPU request, because {MEMORY} is a number of MiB, and this is"
        said += f" not one, or too great: {found}"
        amounts = [model.parse_quantity(text) or 0 for text in dropped.values()]
        meant = next((amount // 2**20 for amount in amounts if amount >= 2**20), 16000)
        advice = f"write MiB without a unit: `{MEMORY}: {meant}`"
        return Gate(ADMISSION, GateVerdict.BLOCKED, said, "E-REQUEST", advice)
    found = world.spec.get("schedulerName") or ""
    if found != world.settings.scheduler_name:
        return _not_ours(world, found)
    if held := world.spec.get("schedulingGates"):
        names = ", ".join(cap(str(one.get("name", "")), 128) for one in held)
        said = f"kube-scheduler does not try the pod while it has scheduling gates: {names}"
        advice = "look at the program that set the gate, such as a job queue: it removes it"
        return Gate(ADMISSION, GateVerdict.BLOCKED, said, "E-GATED", advice)
    admitted = reviewed_again(world)
    if not isinstance(admitted, str) and _limits(admitted) != _limits(world.pod):
        said = f"scheduler is {cap(found, 64)}; the webhook did not see the pod, so defaults are "
        advice = f"{story.recreated(world.pod)} where HAMi's webhook sees it"
        return Gate(ADMISSION, GateVerdict.NOTED, f"{said}missing", "E-WEBHOOK", advice)
    said = f"scheduler is {cap(found, 64)}, with the webhook's defaults"
    ignored = ", ".join(key for key in RESOURCES if key in world.noted)
    also = f"; the annotation {ignored} is ignored" if ignored else ""
    whole = tuple(
        f"{name} asks for whole GPUs, because its limits have no {MEMORY}{also}"
        for name, container, request in world.containers()
        if request is not None and model.names_no_memory(container)
    )
    return Gate(ADMISSION, GateVerdict.PASSED, said, facts=() if world.node else whole)


def deletion(world: World) -> tuple[str, str, str] | None:
    """Sentence, id and advice about a pod that is being deleted; None if it is not."""
    deleted = decode_moment(world.metadata.get("deletionTimestamp"))
    if deleted is None:
        return None
    finalizers = [cap(str(one), 128) for one in world.metadata.get("finalizers") or ()]
    said = f"the pod was deleted {when(deleted, world.now)} and is still there"
    if not finalizers:
        return said, "E-DELETED", "its kubelet, or the API server, removes it"
    advice = "look at the program that set the finalizer: it removes it when its work is done"
    return f"{said}: finalizers keep it ({', '.join(finalizers)})", "E-DELETED", advice


def _not_ours(world: World, found: str) -> Gate:
    shown, wanted = cap(found, 64) or "not set", cap(world.settings.scheduler_name, 64)
    if found not in ("", DEFAULT_SCHEDULER):
        said = f"the pod names the scheduler {shown}, and HAMi's is {wanted}"
        advice = f"leave schedulerName out, or write `schedulerName: {wanted}`"
        return Gate(ADMISSION, GateVerdict.BLOCKED, said, "E-SCHEDULER", advice)
    label = f"label {REVIEWED.key}=ignore"
    why = f"its namespace may be excluded ({label}), or the webhook did not answer when the pod "
    why += "was created"
    if not REVIEWED.holds(world.metadata.get("labels") or {}):
        why = f"its {label} excludes it"
    reviewed = reviewed_again(world)
    denied = (f"it would refuse the pod: {cap(reviewed)}",) if isinstance(reviewed, str) else ()
    said = f"HAMi's webhook did not see the pod: scheduler is {shown}, not {wanted}"
    advice = f"{story.recreated(world.pod)} where HAMi's webhook sees it"
    return Gate(ADMISSION, GateVerdict.BLOCKED, said, "E-WEBHOOK", advice, (why, *denied))


def reviewed_again(world: World) -> Json | str:
    """The pod as HAMi's webhook would change it if it were created again, or why it refuses it."""
    # The webhook sees a pod before it has a Node.
    spec = {**world.spec, "schedulerName": "", "nodeName": ""}
    try:
        return review_pod({**world.pod, "spec": spec}, world.settings)
    except DeniedError as denied:
        return str(denied)


def _limits(pod: Json) -> list[object]:
    return [(one.get("resources") or {}).get("limits") for one in all_containers(pod)]


def quota_gate(world: World, verdict: GateVerdict) -> Gate:
    """Whether HAMi's quota has room. `verdict`: passed, blocked by it, or noted beside others."""
    snapshot, namespace = world.snapshot, cap(world.namespace, 64)
    if not snapshot.has("resourcequotas"):
        return Gate(QUOTA, GateVerdict.UNKNOWN, "the ResourceQuotas could not be read")
    held, factor = world.held.held(world.namespace), max(world.settings.rules.memory_factor, 1)
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
    if verdict is not GateVerdict.PASSED:
        said = f"the ResourceQuota of {namespace} has no room for the pod"
        most = sorted((-held_by(one).memory_mib, one.name) for one in world.neighbours)
        told = [f"{cap(name, 128)} {mib(-total)}" for total, name in most[:HOLDERS_TOLD]]
        counted += [f"most is held by {', '.join(told)}"] if told else []
        return Gate(QUOTA, verdict, said, "ResourceQuotaNotFit", facts=(*counted, *unread))
    said = f"no ResourceQuota limits GPU memory or cores in {namespace}"
    said = f"the ResourceQuota of {namespace} has room" if counted else said
    verdict = GateVerdict.NOTED if unread else GateVerdict.PASSED
    return Gate(QUOTA, verdict, said, "E-QUOTA" if unread else "", facts=(*counted, *unread))


def binding_gate(world: World, chosen: str) -> Gate:
    """Whether the Node `chosen` can be bound. `chosen` is empty if there is none yet."""
    if world.node:
        text, since = world.noted.get(annotations.BIND_TIME, ""), ""
        if re.fullmatch("[0-9]{1,10}", text):
            since = f", {when(dt.datetime.fromtimestamp(int(text), dt.UTC), world.now)}"
        return Gate(BINDING, GateVerdict.PASSED, f"bound to {cap(world.node, 128)}{since}")
    node, attempt = world.nodes.get(chosen), world.attempt
    is_chosen = attempt is not None and attempt.stage is story.AttemptStage.CHOSEN
    said = attempt.text if attempt and is_chosen else ""
    if node is not None and annotations.MUTEX_LOCK in node.annotations:
        return _locked(world, node, (attempt.said(world.now),) if attempt and said else ())
    if attempt and said and not said.startswith("find fit node"):
        text = f"binding failed, {when(attempt.at, world.now)}: {cap(said, TEXT)}"
        if "locked" not in said and "node lock" not in said:
            advice = "kube-scheduler tries again; look at what the message names"
            return Gate(BINDING, GateVerdict.BLOCKED, text, "E-BIND", advice)
        if not world.snapshot.has("nodes"):
            advice = "who may read Nodes sees the holder: `hami-agent explain` with such an account"
            return Gate(BINDING, GateVerdict.BLOCKED, text, "E-LOCK", advice)
    if node is None:
        return Gate(BINDING, GateVerdict.NOT_REACHED, "not reached")
    return Gate(BINDING, GateVerdict.PASSED, f"no lock on {cap(node.name, 128)}")


def _locked(world: World, node: ClusterNode, facts: tuple[str, ...]) -> Gate:
    """The gate of a pod whose Node is locked: who holds the lock, how long, and until when."""
    name, verdict = cap(node.name, 128), GateVerdict.BLOCKED
    unlock = f"if it stays, remove it: kubectl annotate node {name} hami.io/mutex.lock-"
    try:
        lock = decode_node_lock(node.annotations[annotations.MUTEX_LOCK])
    except MalformedText as error:
        said = f"the lock of {name} cannot be read, so HAMi binds no pod there ({error})"
        return Gate(BINDING, verdict, said, "E-LOCK", unlock, facts)
    age, key = (world.now - lock.stamp).total_seconds(), (lock.namespace, lock.name)
    if key == (world.namespace, world.metadata.get("name")):
        said = f"the pod itself holds the lock of {name} for {span(age)}"
        return Gate(BINDING, GateVerdict.WAITING, said, "E-LOCK", facts=facts)
    owner = f"{cap(lock.namespace, 64)}/{cap(lock.name, 128)}"
    owner = owner if lock.name else "no pod (it names none)"
    said = f"the lock of {name} is held by {owner} for {span(age)}"
    old = "at its next attempt" if age > LOCK_TIMEOUT else f"when it is {span(LOCK_TIMEOUT)} old"
    advice = f"HAMi's scheduler takes it over {old}"
    phase = {(one.namespace, one.name): one.phase for one in world.snapshot.holders}.get(key)
    if phase in TERMINAL:
        said = f"{said}, and that pod has ended ({phase})"
        advice = f"its agent frees it within 5 s, else look at its pod; {advice}; {unlock}"
    elif age < LONG:
        said, advice, verdict = f"{said}; this is normal for seconds", "", GateVerdict.WAITING
    else:
        look = f"see why its holder has no GPUs yet: `hami-agent explain {owner}`"
        if phase is None:
            look = f"look whether its holder exists, and at the agent's pod on {name}"
        said, advice = f"{said}, too long", f"{advice}; {look}"
    return Gate(BINDING, verdict, said, "E-LOCK", advice, facts)


def allocation_gate(world: World) -> Gate:
    """Whether the device plugin answered; a refusal with its id, or its cause by its text."""
    status, node = world.status, world.node
    phase = world.noted.get(annotations.BIND_PHASE, "")
    # A refusal stands in the status, at a waiting container, or in an Event if the status is late.
    texts = [str(status.get("message") or ""), *(message for *_, message in _waits(world))]
    if world.phase in ("Pending", "Failed"):
        event, _ = story.last_event(world.snapshot, REFUSED, "AllocationRefused")
        texts += [event.message] if event else []
    of_node = (event for event in world.snapshot.node_events if _concerns(world, event))
    facts = agent_words(of_node, world.now, node) if node else ()
    stays = " The pod stays Failed." if world.phase == "Failed" else ""
    refused = ((sentence, ha) for sentence, ha in map(story.agent_refusal, texts) if ha)
    sentence, reason = next(refused, ("", ""))
    if reason:
        said = f"the agent refused the GPUs: {cap(sentence, TEXT)}"
        advice = f"do what it says; then {story.recreated(world.pod)}" if stays else ""
        return Gate(ALLOCATION, GateVerdict.BLOCKED, said, reason, advice, facts)
    if status.get("reason") == REFUSED or phase == annotations.PHASE_FAILED:
        causes, remedy = story.meaning(texts[0], node)
        text = cap(texts[0], TEXT) or "its device plugin refused it, by the pod's bind-phase"
        look = f"look at what the message names, and at the agent's log on {cap(node, 128)}"
        said, advice = f"the kubelet refused the pod: {text}", f"{remedy or look}.{stays}"
        return Gate(ALLOCATION, GateVerdict.BLOCKED, said, "E-ALLOCATE", advice, (*causes, *facts))
    if not node:
        return Gate(ALLOCATION, GateVerdict.NOT_REACHED, "not reached")
    statuses = status.get("containerStatuses") or ()
    has_run = bool(statuses) and all(map(_is_started, statuses))
    if phase == annotations.PHASE_SUCCESS or has_run:
        return Gate(ALLOCATION, GateVerdict.PASSED, "every container has the agent's answer")
    said = "the kubelet has not asked for all containers yet, or the answer is not on the pod yet"
    advice = "if it stays, look at the agent's pod on that node"
    return Gate(ALLOCATION, GateVerdict.WAITING, said, "E-ALLOCATE", advice, facts)


def _concerns(world: World, event: PodEventView) -> bool:
    """Whether the Event of the pod's Node may say why the pod has no answer.

    One that names GPUs by UUID may if one is the pod's, any other if it falls into its life.
    """
    created = decode_moment(world.metadata.get("creationTimestamp"))
    if named := _UUID.findall(event.message):
        return not set(world.gpus).isdisjoint(named)
    is_older = created is not None and event.last is not None and event.last < created
    return not is_older and not event.reason.startswith("Allocation")


def start_gate(world: World) -> Gate:
    """Whether the containers started; what kubelet, runtime and agent say if they did not."""
    waits = [wait for wait in _waits(world) if wait[1] not in _NORMAL_WAITS]
    ended, node = tuple(_ends(world)), world.node
    facts = (*ended, *agent_words(world.snapshot.events, world.now))
    if waits:
        name, reason, message = waits[0]
        text = f": {cap(message, TEXT)}" if message else ""
        said = f"container {cap(name, 64)} waits: {cap(reason, 64)}{text}"
        causes, remedy = story.meaning(" ".join((message, *ended)), node)
        advice = remedy or "kubectl describe pod and kubectl logs --previous say more"
        return Gate(START, GateVerdict.BLOCKED, said, "E-START", advice, (*causes, *facts))
    if world.phase == "Failed" and not any(map(_is_started, _statuses(world))):
        text = story.status_text(world.pod)
        causes, remedy = story.meaning(f"{world.status.get('reason') or ''} {text}", node)
        said = f"no container has started: {cap(text, TEXT) or 'no reason is told'}"
        advice = f"{remedy or 'remove what the message names'}. The pod stays Failed."
        return Gate(START, GateVerdict.BLOCKED, said, "E-START", advice, causes)
    if not node:
        return Gate(START, GateVerdict.NOT_REACHED, "not reached")
    if world.phase == "Pending":
        said = "the kubelet pulls images, mounts volumes or runs init containers"
        return Gate(START, GateVerdict.WAITING, said, "E-START", facts=facts)
    return Gate(START, GateVerdict.PASSED, "the containers have started")


def running_gate(world: World) -> Gate:
    """What the pod holds and uses, and whether its GPUs are still well."""
    held, words = tuple(_held(world)), agent_words(world.snapshot.events, world.now)
    deleting = deletion(world)
    if world.phase in TERMINAL:
        text = cap(story.status_text(world.pod), TEXT)
        facts = (*filter(None, [text]), *_ends(world), *words)
        if deleting:
            return Gate(RUNNING, GateVerdict.NOTED, *deleting, facts)
        said = f"it has ended ({world.phase}) and holds nothing"
        if world.phase == "Succeeded":
            return Gate(RUNNING, GateVerdict.PASSED, said, facts=facts)
        _, remedy = story.meaning(" ".join(facts), world.node)
        return Gate(RUNNING, GateVerdict.BLOCKED, said, "E-START", remedy, facts)
    if world.phase != "Running":
        return Gate(RUNNING, GateVerdict.NOT_REACHED, "not reached", facts=held)
    if sick := tuple(_sick(world)):
        said = "it runs on a GPU that its node does not report as healthy"
        advice = ADVICE["CardNotHealth"].format(node=cap(world.node, 128))
        # What was told of the pod stays after its GPU recovered; the Node's Events end.
        of_node = (event for event in world.snapshot.node_events if _concerns(world, event))
        facts = (*held, *sick, *(agent_words(of_node, world.now, world.node) or words))
        return Gate(RUNNING, GateVerdict.NOTED, said, "CardNotHealth", advice, facts)
    if deleting:
        return Gate(RUNNING, GateVerdict.NOTED, *deleting, (*held, *words))
    said = "it runs and holds:" if held else "it runs"
    if not words:
        return Gate(RUNNING, GateVerdict.PASSED, said, facts=held)
    well = ["its node reports all of its GPUs as healthy now"] if world.node in world.nodes else []
    return Gate(RUNNING, GateVerdict.NOTED, said, facts=(*held, *words, *well))


def _statuses(world: World) -> Iterator[Mapping[str, Any]]:
    for key in ("initContainerStatuses", "containerStatuses"):
        yield from world.status.get(key) or ()


def _waits(world: World) -> Iterator[tuple[str, str, str]]:
    """Name, reason and message of each waiting container."""
    for status in _statuses(world):
        if waiting := (status.get("state") or {}).get("waiting"):
            texts = (status.get("name"), waiting.get("reason"), waiting.get("message"))
            name, reason, message = (str(text or "") for text in texts)
            yield name, reason, message


def _ends(world: World) -> Iterator[str]:
    """How containers that failed ended last."""
    for status in _statuses(world):
        states = [(status.get(key) or {}).get("terminated") or {} for key in ("state", "lastState")]
        for ended in [one for one in states if one.get("exitCode")][:1]:
            text = str(ended.get("message") or ended.get("reason") or "")
            name = cap(str(status.get("name", "")), 64)
            said = f"{name} ended with exit code {ended['exitCode']}"
            yield f"{said}: {cap(text, TEXT)}" if text else said


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
    except Refusal as refusal:
        yield cap(refusal.sentence, TEXT)
        return
    indexes = {one.uuid: one.index for one in world.reported(view.node)}
    for name, (_, group) in pairs.items():
        for share in group:
            said = f"{cap(name, 64)}: {gpu_title(share.uuid, indexes.get(share.uuid))}, "
            said += f"{mib(share.memory_mib)}, {story.core_words(share.core_percent)}"
            unkept = view.unkept(name)
            yield f"{said}, not kept: {unkept}" if unkept else said


def _sick(world: World) -> Iterator[str]:
    """The GPUs of the pod that its Node reports as unhealthy, or does not report any more."""
    known = {gpu.uuid: gpu for gpu in world.reported(world.node)}
    for uuid in world.gpus:
        if uuid not in known and world.node in world.nodes:
            yield f"no Node reports {gpu_title(uuid, None)} any more: it is lost, or was taken out"
        elif uuid in known and not known[uuid].healthy:
            yield f"{gpu_title(uuid, known[uuid].index)} is unhealthy"

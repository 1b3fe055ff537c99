"""The gates on a Node: the answer of the device plugin, the start, and what a container holds."""

import datetime as dt
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from agent.codec.cluster import REFUSED
from agent.codec.objects import decode_pod
from agent.codec.pod import decode_pod_devices
from agent.core.cluster import annotations
from agent.core.cluster.snapshot import ClusterSnapshot, JsonObject
from agent.core.errors import MalformedText, cap
from agent.sandbox.explain.binding import last_event
from agent.sandbox.explain.story import Gate, GateVerdict
from agent.sandbox.explain.words import ago, core_words, mib
from agent.sandbox.explain.world import World
from agent.sandbox.scheduler.requests import all_containers

ALLOCATION: Final = "allocation"
START: Final = "start"
RUNNING: Final = "running"
_ID: Final = re.compile(r"\[(HA-\d{4})\]")
_WRAPPED: Final = re.compile(r"rpc error: code = \w+ desc = (.*?) *\[HA-\d{4}\]", re.DOTALL)
_NORMAL_WAITS: Final = frozenset({"", "ContainerCreating", "PodInitializing"})
_TEXT: Final = 512
"""Characters of a message: the sentence of a refusal with the id at its end fits."""


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
    refusal, identifier = "", "E-ALLOCATE"
    if told := next(_refusals(world, pod), None):
        identifier, refusal = told[0], told[1]
        refusal = f"the agent refused the GPUs: {cap(agent_sentence(refusal), _TEXT)}"
    elif pod["status"].get("reason") == REFUSED:
        message = cap(str(pod["status"].get("message", "")), _TEXT)
        refusal = f"the kubelet refused the pod: {message}"
    elif phase == annotations.PHASE_FAILED:
        refusal = "the pod's bind-phase is failed: the device plugin of the node refused it"
    if refusal:
        return Gate(ALLOCATION, GateVerdict.BLOCKED, refusal, identifier, _after(pod))
    if not pod["spec"].get("nodeName"):
        return Gate(ALLOCATION, GateVerdict.NOT_REACHED, "not reached")
    if phase == annotations.PHASE_SUCCESS or _has_run(pod):
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
    if phase == "Failed" and not any(_started(pod)):
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


def _refusals(world: World, pod: JsonObject) -> Iterator[tuple[str, str]]:
    """Ids and texts of refusals: of the status, of waiting containers, of Events."""
    status = pod["status"]
    texts = [str(status.get("message") or "")]
    texts += [message for _, _, message in _waits(pod)]
    if status.get("phase") in (None, "Pending", "Failed"):
        event = last_event(world, REFUSED, "AllocationRefused")
        texts += [event.message] if event else []
    for text in texts:
        if identifier := refusal_id(text):
            yield identifier, text


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


def _has_run(pod: JsonObject) -> bool:
    statuses = pod["status"].get("containerStatuses") or ()
    return bool(statuses) and all(map(_is_started, statuses))


def _started(pod: JsonObject) -> Iterator[bool]:
    """For each container, init containers too, whether it has started."""
    return map(_is_started, _statuses(pod))


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
            unkept = view.unkept(name)
            yield (
                f"{cap(name, 64)}: {gpu} ({cap(share.uuid, 64)}), "
                f"{mib(share.memory_mib)}, {core_words(share.core_percent)}"
                f"{f', not kept: {unkept}' if unkept else ''}"
                f"{_used(world.snapshot, name, share.uuid, now)}"
            )
    if world.snapshot.use_unread:
        yield f"what it uses of that is not known: {cap(world.snapshot.use_unread, _TEXT)}"


def _used(snapshot: ClusterSnapshot, container: str, uuid: str, now: dt.datetime) -> str:
    """What the container uses of the GPU, as a clause; empty if it is not known."""
    for use in snapshot.uses:
        if (use.container, use.uuid) == (container, uuid) and use.used_mib is not None:
            last = f", its last kernel ran {ago(use.last_kernel, now)}" if use.last_kernel else ""
            return f"; it uses {mib(use.used_mib)}{last}"
    return ""


def _sick(world: World, pod: JsonObject) -> Iterator[str]:
    text = (pod["metadata"].get("annotations") or {}).get(annotations.ALLOCATED, "")
    for gpu in _gpus(world, pod):
        if not gpu.capacity.healthy and gpu.capacity.uuid in text:
            yield f"GPU {gpu.capacity.index} ({cap(gpu.capacity.uuid, 64)}) is unhealthy"


def _gpus(world: World, pod: JsonObject) -> tuple[Any, ...]:
    node = pod["spec"].get("nodeName", "")
    state = world.registered(node) if node in world.nodes else None
    return state.gpus if state else ()

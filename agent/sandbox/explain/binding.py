"""The gate of binding: the scheduler's last attempt and the node lock."""

import datetime as dt
from typing import Final

from agent.codec.nodelock import decode_node_lock
from agent.core.cluster import annotations
from agent.core.cluster.pods import NodeLock
from agent.core.cluster.snapshot import ClusterNode, JsonObject, PodEventView
from agent.core.errors import MalformedText, cap
from agent.sandbox.explain.story import Gate, GateVerdict
from agent.sandbox.explain.words import ago, span
from agent.sandbox.explain.world import World
from agent.sandbox.scheduler.usage import TERMINAL

BINDING: Final = "binding"
LONG: Final = 60.0
"""Seconds after which a lock is no longer normal: it is held for seconds."""
UNLOCK: Final = "if it stays, remove it: kubectl annotate node {node} hami.io/mutex.lock-"


def binding_gate(world: World, pod: JsonObject, chosen: str, now: dt.datetime) -> Gate:
    """Whether the Node `chosen` can be bound. `chosen` is empty if there is none yet."""
    if bound := pod["spec"].get("nodeName"):
        return _bound(pod, bound, now)
    node = world.nodes.get(chosen)
    failure = last_event(world, "BindingFailed")
    if node is not None and annotations.MUTEX_LOCK in node.annotations:
        return _locked(world, pod, node, failure, now)
    if failure is not None and not _is_about_a_lock(failure):
        said = f"binding failed, {_when(failure, now)}: {cap(failure.message)}"
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


def _when(event: PodEventView, now: dt.datetime) -> str:
    return ago(event.last, now) if event.last else "at an unknown time"


def _is_about_a_lock(event: PodEventView) -> bool:
    return "locked" in event.message or "node lock" in event.message


def _bound(pod: JsonObject, node: str, now: dt.datetime) -> Gate:
    text = (pod["metadata"].get("annotations") or {}).get(annotations.BIND_TIME, "")
    when = ""
    if text.isascii() and text.isdecimal() and len(text) <= len("9999999999"):
        when = f", {ago(dt.datetime.fromtimestamp(int(text), dt.UTC), now)}"
    return Gate(BINDING, GateVerdict.PASSED, f"bound to {cap(node, 128)}{when}")


def _locked(
    world: World, pod: JsonObject, node: ClusterNode, failure: PodEventView | None, now: dt.datetime
) -> Gate:
    name = cap(node.name, 128)
    facts = (f"last attempt {_when(failure, now)}: {cap(failure.message)}",) if failure else ()
    text = node.annotations[annotations.MUTEX_LOCK]
    try:
        lock = decode_node_lock(text)
    except MalformedText as error:
        said = f"the lock of {name} cannot be read, so HAMi binds no pod there ({error})"
        return Gate(BINDING, GateVerdict.BLOCKED, said, "E-LOCK", UNLOCK.format(node=name), facts)
    age = (now - lock.stamp).total_seconds()
    held = f"the lock of {name} is held by {_owner(lock)} for {span(age)}"
    timeout = world.settings.lock_timeout
    take_over = f"HAMi's scheduler takes it over when it is {span(timeout)} old"
    metadata = pod["metadata"]
    if (lock.namespace, lock.name) == (metadata.get("namespace"), metadata.get("name")):
        said = f"the pod itself holds the lock of {name} for {span(age)}"
        return Gate(BINDING, GateVerdict.WAITING, said, "E-LOCK", facts=facts)
    if gone := _why_gone(world, lock):
        said = f"{held}, and {gone}"
        advice = f"{take_over} or at its next attempt; {UNLOCK.format(node=name)}"
        return Gate(BINDING, GateVerdict.BLOCKED, said, "E-LOCK", advice, facts)
    if age < LONG:
        said = f"{held}; this is normal for seconds"
        return Gate(BINDING, GateVerdict.WAITING, said, "E-LOCK", facts=facts)
    advice = f"{take_over}; look at why that pod's containers have no GPUs yet"
    return Gate(BINDING, GateVerdict.BLOCKED, f"{held}, too long", "E-LOCK", advice, facts)


def _owner(lock: NodeLock) -> str:
    if not lock.name:
        return "no pod (it names none)"
    return f"{cap(lock.namespace, 64)}/{cap(lock.name, 128)}"


def _why_gone(world: World, lock: NodeLock) -> str:
    """Why the owner of a lock cannot release it; empty if it may, or if the pods are unknown."""
    if not lock.name or not world.snapshot.has("pods"):
        return ""
    holder = world.by_name.get((lock.namespace, lock.name))
    if holder is None:
        return "that pod does not exist"
    if holder.phase in TERMINAL:
        return f"that pod has ended ({holder.phase})"
    return ""

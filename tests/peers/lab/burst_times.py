"""Where the time of pods goes that were created at once, by the stamps of all who served them.

All clocks are one machine's. Needs HAMi's own scheduler: its log tells of the attempts.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from agent import cluster as annotations
from tests.peers.lab.clockwork import agent_stamps, klog_stamp, unix
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.identities import EXTENDER
from tests.peers.lab.part import Part
from tests.peers.lab.workloads import NAMESPACE

_ATTEMPTS: Final = {
    "filtered": '"Starting schedule filter process"',
    "told_to_bind": '"Attempting to bind pod to node"',
    "denied": '"Failed to lock node"',
}
"""The words of HAMi's scheduler for the moments of an attempt."""
TAKEN_UP: Final = '"SyncLoop ADD"'
_POD: Final = re.compile(rf'"(?:{NAMESPACE}/)?([a-z0-9-]+)"')


@dataclass(slots=True)
class PodTimes:
    """One pod's way, in Unix seconds."""

    created: float = 0.0
    filtered: list[float] = field(default_factory=list)
    """When HAMi's scheduler was asked for a node; once for each attempt."""
    told_to_bind: list[float] = field(default_factory=list)
    """When it was told to bind; once for each attempt."""
    denied: list[float] = field(default_factory=list)
    """When it found that another pod has the lock: the attempt is over."""
    locked: float = 0.0
    bound: float = 0.0
    taken_up: float = 0.0
    """When the kubelet began with the pod."""
    answered: float = 0.0
    """When the agent answered Allocate."""
    settled: float = 0.0
    """When the API server had the agent's patch of the pod."""
    unlocked: float = 0.0
    ready: float = 0.0


def times_of(cluster: Cluster, names: list[str], mark: int, since: float) -> dict[str, PodTimes]:
    """By name, the ways of pods that were created after a mark of the audit log and a moment.

    What the watch knows is left at 0: when each was created and ready.
    """
    found = {name: PodTimes() for name in names}
    for event in cluster.plane.audit.events(mark):
        _note_request(found, event)
    for what, words in _ATTEMPTS.items():
        for pod, stamp in _told(cluster.parts["extender"], words, since):
            getattr(found.get(pod, PodTimes()), what).append(stamp)
    for pod, stamp in _told(cluster.kubelet.part, TAKEN_UP, since):
        found.get(pod, PodTimes()).taken_up = stamp
    for line, stamp in agent_stamps(cluster.agent, "alloc.answered"):
        found.get(line["pod"], PodTimes()).answered = stamp
    return found


def _told(part: Part, words: str, since: float) -> Iterator[tuple[str, float]]:
    """The pods that a program's log names after those words, with the stamps of klog."""
    for line in part.said().splitlines():
        _, _, rest = line.partition(words)
        # The kubelet's `pods=[...]` as well as `pod=...`.
        pod = _POD.search(rest.partition(" pod")[2])
        if pod and (stamp := klog_stamp(line) or 0.0) >= since:
            yield pod[1], stamp


def _note_request(found: Mapping[str, PodTimes], event: Mapping[str, Any]) -> None:
    """Note what one answered request did to a pod, or to the lock for it."""
    about = event.get("objectRef") or {}
    if (event.get("responseStatus") or {}).get("code", 0) >= 300:
        return
    what = f"{event['verb']} {about.get('resource')}/{about.get('subresource', '')}"
    stamp = unix(event["stageTimestamp"])
    is_agents = event.get("userAgent", "").startswith("hami-agent/")
    if what == "patch nodes/":
        _note_lock(found, event.get("requestObject"), stamp, is_agents=is_agents)
    elif pod := found.get(about.get("name", "")):
        if what == "create pods/binding" and event["user"]["username"] == EXTENDER:
            pod.bound = stamp
        elif what == "patch pods/status" and is_agents:
            pod.settled = pod.settled or stamp


def _note_lock(
    found: Mapping[str, PodTimes], body: object, stamp: float, *, is_agents: bool
) -> None:
    if isinstance(body, list) and is_agents:
        if pod := found.get(_owner(body[0].get("value"))):
            pod.unlocked = pod.unlocked or stamp
    elif isinstance(body, dict) and not is_agents:
        noted = body["metadata"].get("annotations") or {}
        pod = found.get(_owner(noted.get(annotations.MUTEX_LOCK)))
        if pod and not pod.bound:  # a bind that was given up goes on, and takes the lock again
            pod.locked = stamp


def _owner(lock: str | None) -> str:
    return (lock or "").rpartition(",")[2]

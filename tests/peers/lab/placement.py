"""Placing a pod by hand, step by step, as HAMi's scheduler does: for tests that need the gaps."""

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agent import cluster as annotations
from agent.model import Share
from agent.sandbox.scheduler.verbs import encode_node_lock, placement_patch
from tests.peers.lab.agents import Agent
from tests.peers.lab.api import Object
from tests.peers.lab.control import NODE
from tests.peers.lab.node_state import NODE_PATH
from tests.peers.lab.part import until_answer
from tests.peers.lab.pods import NAMESPACE, PODS, WithPods, key

MIB: Final = 3000
"""What a share has where nothing is said, as `a_container` asks for."""

_BY_HAND: Final = "by-hand"


def now() -> dt.datetime:
    """Wall time, as stamps need it."""
    return dt.datetime.now(dt.UTC)  # noqa: TID251 -- what is written is read by others


# When something happened, by the stamps of those who saw it: all clocks here are one machine's.

REGISTERED: Final = '"Got registration request from device plugin with resource"'
ALL_HEALTHY: Final = 'resourceName="nvidia.com/gpu" totalCount=80 healthyCount=80'
_STAMP: Final = re.compile(r"[IWEF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{6})")


def wall() -> float:
    """Now, in Unix seconds."""
    return now().timestamp()


def agent_said(agent: Agent, event: str, since: float) -> list[float]:
    """When the agent logged an event after a moment, in Unix seconds."""
    return [stamp for _, stamp in agent_stamps(agent, event) if stamp >= since]


def agent_stamps(agent: Agent, event: str) -> list[tuple[Mapping[str, Any], float]]:
    """The agent's log lines of an event, each with its stamp in Unix seconds."""
    return [(one, unix(one["ts"])) for one in agent.events(event)]


def unix(text: str) -> float:
    """A stamp of RFC 3339 in Unix seconds."""
    return dt.datetime.fromisoformat(text).timestamp()


def klog_stamp(line: str) -> float | None:
    """A stamp of klog, which names no year and no zone: this one, and the machine's."""
    found = _STAMP.match(line)
    if found is None:
        return None
    month, day, hour, minute, second, micro = map(int, found.groups())
    year = now().astimezone().year
    local = dt.datetime(year, month, day, hour, minute, second, micro)  # noqa: DTZ001 -- made so
    return local.astimezone().timestamp()


class WithPlacement(WithPods):
    """Pods that are placed by hand, and when programs said what."""

    async def create_by_hand(self, pod: Object) -> Object:
        """Create a pod that no scheduler takes; with its node already named it is the kubelet's."""
        if "nodeName" in pod["spec"]:
            return await self.api.create(PODS, pod)
        labels = {**pod["metadata"].get("labels", {}), "hami.io/webhook": "ignore"}
        metadata = {**pod["metadata"], "labels": labels}
        spec = {**pod["spec"], "schedulerName": _BY_HAND}
        return await self.api.create(PODS, {**pod, "metadata": metadata, "spec": spec})

    def share(self, index: int, memory: int = MIB, cores: int = 10) -> Share:
        """A share of the GPU with this index: MiB, and percent of its cores."""
        return Share(self.gpu_uuids()[index], memory, cores)

    async def annotate(self, name: str, groups: Sequence[Sequence[Share]]) -> None:
        """What the filter writes: which GPUs each container gets."""
        shares = tuple(tuple(group) for group in groups)
        patch = placement_patch(NODE, shares, int(now().timestamp()))
        await self.api.patch(f"{PODS}/{name}", patch)

    async def lock(self, name: str, *, age: float = 0.0) -> None:
        """Take the node's lock in the name of a pod, `age` seconds ago. Whoever had it loses it."""
        text = encode_node_lock(now() - dt.timedelta(seconds=age), NAMESPACE, name)
        marks = {annotations.MUTEX_LOCK: text}
        await self.api.patch(NODE_PATH, {"metadata": {"annotations": marks}})

    async def bind(self, name: str) -> None:
        """Mark the pod as allocating and bind it to the node; the kubelet admits it then."""
        marks = {
            annotations.BIND_PHASE: annotations.PHASE_ALLOCATING,
            annotations.BIND_TIME: str(int(now().timestamp())),
        }
        await self.api.patch(f"{PODS}/{name}", {"metadata": {"annotations": marks}})
        target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        await self.api.create(f"{PODS}/{name}/binding", body)

    async def place(self, pod: Object, groups: Sequence[Sequence[Share]]) -> None:
        """All steps for one pod: create, annotate, lock, bind."""
        name = pod["metadata"]["name"]
        await self.create_by_hand(pod)
        await self.annotate(name, groups)
        await self.lock(name)
        await self.bind(name)

    def kubelet_said(self, *words: str, since: float) -> list[float]:
        """When the kubelet logged a line with all those words after a moment, in Unix seconds."""
        said = self.kubelet.part.said().splitlines()
        lines = (line for line in said if all(word in line for word in words))
        stamps = (stamp for line in lines if (stamp := klog_stamp(line)) is not None)
        return [stamp for stamp in stamps if stamp >= since]

    async def until_kubelet_says(self, *words: str, since: float) -> float:
        """When the kubelet logs those words for the first time after a moment, in Unix seconds."""

        async def is_said() -> bool:
            return bool(self.kubelet_said(*words, since=since))

        await until_answer(is_said, 30.0, lambda: f"the kubelet has not said {words}")
        return self.kubelet_said(*words, since=since)[0]

    async def until_taken_up(self, name: str, since: float = 0.0) -> float:
        """When the kubelet has begun with a pod, after a moment; both in Unix seconds.

        Without a moment the pod's name must be new to this kubelet. Raises TimeoutError.
        """
        return await self.until_kubelet_says('"SyncLoop ADD"', f'"{key(name)}"', since=since)

"""When something happened, by the stamps of those who saw it: all clocks here are one machine's."""

import datetime as dt
import re
from collections.abc import Mapping
from typing import Any, Final

from tests.peers.lab.agents import Agent
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.placement import now
from tests.peers.lab.pods import key
from tests.peers.lab.waiting import until_answer

REGISTERED: Final = '"Got registration request from device plugin with resource"'
ALL_HEALTHY: Final = 'resourceName="nvidia.com/gpu" totalCount=80 healthyCount=80'
_STAMP: Final = re.compile(r"[IWEF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{6})")


def wall() -> float:
    """Now, in Unix seconds."""
    return now().timestamp()


def kubelet_said(cluster: Cluster, *words: str, since: float) -> list[float]:
    """When the kubelet logged a line with all those words after a moment, in Unix seconds."""
    said = cluster.kubelet.part.said().splitlines()
    lines = (line for line in said if all(word in line for word in words))
    stamps = (stamp for line in lines if (stamp := klog_stamp(line)) is not None)
    return [stamp for stamp in stamps if stamp >= since]


def agent_said(agent: Agent, event: str, since: float) -> list[float]:
    """When the agent logged an event after a moment, in Unix seconds."""
    return [stamp for _, stamp in agent_stamps(agent, event) if stamp >= since]


def agent_stamps(agent: Agent, event: str) -> list[tuple[Mapping[str, Any], float]]:
    """The agent's log lines of an event, each with its stamp in Unix seconds."""
    return [(one, unix(one["ts"])) for one in agent.events(event)]


def unix(text: str) -> float:
    """A stamp of RFC 3339 in Unix seconds."""
    return dt.datetime.fromisoformat(text).timestamp()


async def until_kubelet_says(cluster: Cluster, *words: str, since: float) -> float:
    """When the kubelet logs those words for the first time after a moment, in Unix seconds.

    Raises:
        TimeoutError: it does not.
    """

    async def is_said() -> bool:
        return bool(kubelet_said(cluster, *words, since=since))

    await until_answer(is_said, 30.0, lambda: f"the kubelet has not said {words}")
    return kubelet_said(cluster, *words, since=since)[0]


async def until_taken_up(cluster: Cluster, name: str, since: float = 0.0) -> float:
    """When the kubelet has begun with a pod, after a moment; both in Unix seconds.

    Without a moment the pod's name must be new to this kubelet. Raises TimeoutError.
    """
    return await until_kubelet_says(cluster, '"SyncLoop ADD"', f'"{key(name)}"', since=since)


def klog_stamp(line: str) -> float | None:
    """A stamp of klog, which names no year and no zone: this one, and the machine's."""
    found = _STAMP.match(line)
    if found is None:
        return None
    month, day, hour, minute, second, micro = map(int, found.groups())
    year = now().astimezone().year
    local = dt.datetime(year, month, day, hour, minute, second, micro)  # noqa: DTZ001 -- made so
    return local.astimezone().timestamp()

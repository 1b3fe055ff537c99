"""Takes what agents wrote off the Nodes, once they are gone."""

import asyncio
from collections.abc import Callable
from typing import Final

from agent.core.errors import ApiConflict, ApiError, ApiNotFound
from agent.core.leftovers import Agents, Cleaned, NodeTraces, Outcome
from agent.core.node_condition import GPU_DEGRADED
from agent.core.ports import Leftovers

PATIENCE: Final = 90.0
"""Seconds for the agents' pods to end."""
PAUSE: Final = 1.0
TRIES: Final = 5
Told = Callable[[Cleaned], None]


async def clean_all(
    api: Leftovers, agents: Agents, told: Told, *, patience: float = PATIENCE
) -> Outcome:
    """Wait for the agents' pods to end, then clean every Node without an agent.

    A pod that does not end keeps its own Node as it is, and no other. On a Node without a kubelet a
    pod stays for ever, but nothing runs it and its account is gone: such a Node is cleaned, too.

    Raises ApiError: the pods or the Nodes cannot be listed.
    """
    occupied = await _waited(api, agents, patience)
    cleaned = []
    for node in await api.nodes():
        if node.name not in occupied:
            cleaned.append(await clean(api, node))
            told(cleaned[-1])
    return Outcome(tuple(cleaned), occupied)


async def _waited(api: Leftovers, agents: Agents, patience: float) -> dict[str, str]:
    """The Nodes on which an agent may be alive after that time, each with its pod."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + patience
    while pods := await api.agents(agents):
        if loop.time() >= ends:
            nodes = {node: pod for pod, node in pods.items() if node}
            return {node: pod for node, pod in nodes.items() if await api.has_kubelet(node)}
        await asyncio.sleep(PAUSE)
    return {}


async def clean(api: Leftovers, node: NodeTraces) -> Cleaned:
    """Remove what is ours from one Node. What fails is told; a Node that is gone is clean."""
    removed: list[str] = []
    try:
        if node.condition:
            await api.forget_condition(node.name)
            removed.append(f"condition {GPU_DEGRADED}")
            node = await api.node(node.name)
        return await _cleaned(api, node, removed)
    except ApiNotFound:
        return Cleaned(node.name, tuple(removed))
    except ApiError as error:
        return Cleaned(node.name, tuple(removed), failure=str(error))


async def _cleaned(api: Leftovers, node: NodeTraces, removed: list[str]) -> Cleaned:
    """The annotations; a change in between is looked at anew. Raises ApiError."""
    for _ in range(TRIES):
        keys = node.ours
        if not keys:
            return Cleaned(node.name, tuple(removed), node.others)
        try:
            await api.remove(node, keys)
        except ApiConflict:
            node = await api.node(node.name)
        else:
            return Cleaned(node.name, (*removed, *keys), node.others)
    failure = f"it changed {TRIES} times while it was looked at"
    return Cleaned(node.name, tuple(removed), failure=failure)

"""Removes what agents wrote from the Nodes, after the agents have ended."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from agent.core.errors import ApiConflict, ApiError, ApiGone, ApiNotFound, ApiThrottled
from agent.core.node.leftovers import (
    CONDITION,
    Agents,
    Cleaned,
    LeftoverOutcome,
    NodeLeftovers,
    NodeTraces,
    due,
)
from agent.core.ports import Leftovers

PATIENCE: Final = 90.0
"""Seconds for the agents' pods to end."""
VACATING: Final = 30.0
"""Seconds for the kubelets to report that no plugin serves; they report every 10 s."""
PAUSE: Final = 1.0
NEWS: Final = 10.0
"""Seconds between two progress lines."""
SHOWN: Final = 5
"""The most names in a sentence."""
TRIES: Final = 5
Told = Callable[[Cleaned], None]
Say = Callable[[str], None]
"""Takes a progress line."""


class BoundedWait:
    """A wait of at most `seconds`, with progress lines."""

    def __init__(self, seconds: float, say: Say) -> None:
        self.seconds = seconds
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._ends = self._loop.time() + seconds
        self._next_word = 0.0

    @property
    def is_over(self) -> bool:
        """True when the time is up."""
        return self._loop.time() >= self._ends

    async def pause(self, what: str) -> None:
        """Wait PAUSE seconds. Print a progress line at most every NEWS seconds."""
        now = self._loop.time()
        if now >= self._next_word:
            self._say(f"waiting up to {max(0.0, self._ends - now):.0f} s {what}")
            self._next_word = now + NEWS
        await asyncio.sleep(PAUSE)


async def clean_all(
    api: Leftovers, agents: Agents, told: Told, say: Say, *, patience: float = PATIENCE
) -> LeftoverOutcome:
    """Wait for the agents' pods to end, then clean every Node on which no plugin serves.

    - A pod that does not end keeps only its own Node from being cleaned.
    - A Node without a kubelet is cleaned even if its pod stays, because nothing runs that pod.
    - If the API server stops answering, the rest is left: each of the Nodes would wait for it.

    Raises ApiError: the pods or the Nodes cannot be listed, or a Node cannot be read.
    """
    occupied = await _waited(api, agents, BoundedWait(patience, say))
    nodes = [node for node in await api.nodes() if node.name not in occupied]
    touched = [node.name for node in nodes if node.is_touched]
    states = await vacated(api, touched, agents.resource, say)
    cleaned: list[Cleaned] = []
    for place, node in enumerate(nodes):
        state = states.get(node.name, NodeLeftovers())
        cleaned.append(await clean(api, node, state, agents.resource))
        told(cleaned[-1])
        if cleaned[-1].silent:
            unreached = tuple(rest.name for rest in nodes[place + 1 :] if rest.is_touched)
            return LeftoverOutcome(tuple(cleaned), occupied, unreached)
    return LeftoverOutcome(tuple(cleaned), occupied)


async def _waited(api: Leftovers, agents: Agents, wait: BoundedWait) -> dict[str, str]:
    """The Nodes on which an agent may still run after the wait, each with its pod."""
    answered = False
    while True:
        try:
            names = await api.agents(agents)
            if not names:
                return {}
            if wait.is_over:
                return await _occupied(api, agents)
            what = f"for the agents' pods to end: {_listed(names)}"
            answered = True
        except ApiError as error:
            if not answered or wait.is_over or _is_final(error):
                raise
            what = f"for the agents' pods to end; {error}"
        await wait.pause(what)


async def _occupied(api: Leftovers, agents: Agents) -> dict[str, str]:
    places = await api.places(agents)
    nodes = {node: pod for pod, node in places.items() if node}
    return {
        node: pod for node, pod in nodes.items() if (await api.look(node, agents.resource)).kubelet
    }


async def vacated(
    api: Leftovers, nodes: Iterable[str], resource: str, say: Say, *, patience: float = VACATING
) -> Mapping[str, NodeLeftovers]:
    """The status of these Nodes, once no plugin serves on them or after `patience` seconds.

    Raises ApiError: a Node cannot be read.
    """
    wait = BoundedWait(patience, say)
    states: dict[str, NodeLeftovers] = {}
    rest = list(nodes)
    while True:
        try:
            for name in tuple(rest):
                states[name] = await api.look(name, resource)
                if not states[name].served:
                    rest.remove(name)
            if not rest or wait.is_over:
                return states
            what = f"for the kubelets to report that no plugin serves {resource}: {_listed(rest)}"
        except ApiError as error:
            if wait.is_over or _is_final(error):
                raise
            what = f"for the API server; {error}"
        await wait.pause(what)


async def clean(
    api: Leftovers, node: NodeTraces, state: NodeLeftovers, resource: str, *, here: bool = False
) -> Cleaned:
    """Remove from one Node what `core.node.leftovers.due` returns; `here`: see there.

    The result names a failure. A Node that does not exist is clean.
    """
    removed: list[str] = []
    try:
        if due(node, state, here=here).condition:
            await api.forget_condition(node.name)
            removed.append(CONDITION)
            node, state = await _again(api, node, resource)
        return await _cleaned(api, node, state, resource, removed, here=here)
    except ApiNotFound:
        return Cleaned(node.name, tuple(removed))
    except ApiError as error:
        silent = not error.status
        return Cleaned(node.name, tuple(removed), failure=str(error), silent=silent)


async def _cleaned(
    api: Leftovers,
    node: NodeTraces,
    state: NodeLeftovers,
    resource: str,
    removed: list[str],
    *,
    here: bool,
) -> Cleaned:
    """Remove the annotations. If the Node changes meanwhile, decide again. Raises ApiError."""
    for _ in range(TRIES):
        wanted = due(node, state, here=here)
        try:
            if wanted.keys:
                await api.remove(node, wanted.keys)
        except ApiConflict:
            node, state = await _again(api, node, resource)
        else:
            return Cleaned(node.name, (*removed, *wanted.keys), wanted.left)
    failure = f"it changed {TRIES} times during the removal; try again"
    return Cleaned(node.name, tuple(removed), failure=failure)


async def _again(
    api: Leftovers, node: NodeTraces, resource: str
) -> tuple[NodeTraces, NodeLeftovers]:
    return await api.node(node.name), await api.look(node.name, resource)


def _is_final(error: ApiError) -> bool:
    """True for an error that a retry would repeat."""
    passing = isinstance(error, ApiThrottled | ApiGone | ApiConflict)
    return 400 <= error.status < 500 and not passing


def _listed(names: Iterable[str]) -> str:
    known = sorted(names)
    more = f" and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
    return ", ".join(known[:SHOWN]) + more

"""A trace is played to the agent on virtual time.

Everybody but the agent does what the trace says, when it says so. An answer that took longer than
the recorded one delays all that comes after it: the kubelet waits for it, and the pod with it.
"""

import asyncio
import dataclasses

from agent.errors import Refusal
from agent.ledger import ContainerEdits, Ledger
from agent.model import SliceId
from tests.machine.agent_life import AgentServices
from tests.services.at_work import at_work
from tests.traces.cluster import TracedApi, TracedCluster
from tests.traces.kubelet import TracedKubelet
from tests.traces.node import traced_agent
from tests.traces.trace import CallEnd, PodEvent, Trace, TracedCall, TracedNodeEvent

AFTERWARDS = 40.0
"""Seconds after the trace's last event: a lock may stand for 35."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReplayedAnswer:
    """What a call of the trace was answered, on the loop's clock. `ids`: named by the kubelet."""

    call: TracedCall
    ids: tuple[SliceId, ...]
    began: float
    ended: float
    edits: ContainerEdits | None
    refusal: str

    @property
    def uid(self) -> str:
        return self.call.uid


@dataclasses.dataclass(frozen=True, slots=True)
class ReplayedStory:
    """How a replay went."""

    trace: Trace
    cluster: TracedCluster
    answers: tuple[ReplayedAnswer, ...]
    ledger: Ledger


async def replay(
    trace: Trace, *, pods_lag: float, node_lag: float, can_get: bool = True
) -> ReplayedStory:
    """The whole trace, with watches that lag by so many seconds, maybe on an old kubelet."""
    cluster, kubelet = TracedCluster(trace.node), TracedKubelet(trace.ids, can_get=can_get)
    agent = traced_agent(trace, TracedApi(cluster, pods_lag=pods_lag, node_lag=node_lag), kubelet)
    loop = asyncio.get_running_loop()
    begin = loop.time()
    answers: list[ReplayedAnswer] = []
    call: asyncio.Task[ReplayedAnswer] | None = None
    async with at_work(*agent.runs):
        for event in trace.events:
            await asyncio.sleep(begin + event.t - loop.time())
            match event:
                case PodEvent():
                    cluster.take_pod(event)
                    kubelet.see(event.pod, deleted=event.kind == "DELETED")
                case TracedNodeEvent():
                    cluster.take_node(event)
                case TracedCall():
                    began = loop.time()
                    ids = await _ids(event, agent, kubelet)
                    # What happened during the call happens during the call.
                    begin += loop.time() - began
                    call = loop.create_task(_ask(event, ids, began, (agent, kubelet)))
                case CallEnd():
                    assert call is not None
                    answers.append(await call)
                    begin = max(begin, loop.time() - event.t)
        await asyncio.sleep(AFTERWARDS)
        ledger = agent.state.ledger.value
    return ReplayedStory(trace, cluster, tuple(answers), ledger)


async def _ids(
    call: TracedCall, agent: AgentServices, kubelet: TracedKubelet
) -> tuple[SliceId, ...]:
    """The ids that the kubelet takes: those that the agent prefers, if it asks."""
    kubelet.begin(call.pod)
    reused = kubelet.reused(call)
    return reused or await agent.allocation.prefer(kubelet.free(), (), len(call.ids))


async def _ask(
    call: TracedCall,
    ids: tuple[SliceId, ...],
    began: float,
    node: tuple[AgentServices, TracedKubelet],
) -> ReplayedAnswer:
    """The kubelet's Allocate, and what it makes of the answer."""
    agent, kubelet = node
    edits, refusal = None, ""
    try:
        edits = await agent.allocation.allocate(ids)
    except Refusal as error:
        refusal = str(error)
    kubelet.end(call.pod, call.container if edits else "", ids)
    return ReplayedAnswer(call, ids, began, asyncio.get_running_loop().time(), edits, refusal)

"""A trace is played to the agent on virtual time.

Everybody but the agent does what the trace says, when it says so. An answer that took longer than
the recorded one delays all that comes after it: the kubelet waits for it, and the pod with it.
"""

import asyncio
import dataclasses
import datetime as dt

from agent.allocate.match import MatchSettings
from agent.allocate.room import RequestRules
from agent.errors import Refusal
from agent.kit.cell import Cell
from agent.ledger import ContainerEdits, KubeletEpoch, State
from agent.model import SliceId
from agent.state import StateService
from tests.builders import a_gpu, a_shared_gpu, an_inventory
from tests.fakes.chance import Seeded
from tests.fakes.clock import LoopClock
from tests.fakes.disk import MemoryDisk
from tests.fakes.kubelet_side import FakeHookDirs
from tests.machine.agent_life import AgentServices
from tests.services.at_work import at_work
from tests.traces.cluster import TracedApi, TracedCluster
from tests.traces.kubelet import TracedKubelet
from tests.traces.trace import CallEnd, PodEvent, Trace, TracedCall, TracedNodeEvent

AFTERWARDS = 40.0
"""Seconds after the trace's last event: a lock may stand for 35."""
FSYNC = 0.002
"""Seconds for one write of the ledger."""


class SlowDisk(MemoryDisk):
    """A disk that takes its time."""

    async def replace(self, name: str, data: bytes, *, keep: str | None = None) -> None:
        await asyncio.sleep(FSYNC)
        await super().replace(name, data, keep=keep)


def traced_agent(trace: Trace, api: TracedApi, kubelet: TracedKubelet) -> AgentServices:
    """One agent's real services on the trace's Node, with the GPUs that it had registered."""
    gpus = [
        a_shared_gpu(
            gpu=a_gpu(uuid=one["id"], index=one.get("index", 0), memory_mib=one["devmem"]),
            split_count=one["count"],
            core_percent=one["devcore"],
        )
        for one in trace.gpus
    ]
    agent = AgentServices(
        StateService(disk=SlowDisk(), recovered=State(), boot_id="boot"),
        api,
        (kubelet, kubelet.read, kubelet),
        FakeHookDirs(),
        inventory=Cell(an_inventory(gpus=gpus)),
        epoch=Cell[KubeletEpoch | None](KubeletEpoch(7, int(trace.begin * 1e9))),
        match=MatchSettings(trace.node["metadata"]["name"], requests=RequestRules(known=True)),
        clock=LoopClock(dt.datetime.fromtimestamp(trace.begin, dt.UTC)),
        chance=Seeded(),
    )
    agent.streams.set(1)
    return agent


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
                    kubelet.begin(event.pod)
                    # The ids that the kubelet takes: those that the agent prefers, if it asks.
                    ids = kubelet.reused(event) or await agent.allocation.prefer(
                        kubelet.free(), (), len(event.ids)
                    )
                    # What happened during the call happens during the call.
                    begin += loop.time() - began
                    call = loop.create_task(_ask(event, ids, began, (agent, kubelet)))
                case CallEnd():
                    assert call is not None
                    answers.append(await call)
                    begin = max(begin, loop.time() - event.t)
        await asyncio.sleep(AFTERWARDS)
    return ReplayedStory(trace, cluster, tuple(answers))


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

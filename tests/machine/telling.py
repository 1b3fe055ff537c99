"""Stories are told: one, as many as are wanted on all processors, or one with ever fewer deeds."""

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial

from agent.sandbox.scheduler.verbs import REGISTER_INTERVAL
from agent.sandbox.store import Json
from tests.machine.agent_life import AgentLife, start_agent
from tests.machine.calm import CalmSite, MachineStory, a_story
from tests.machine.playing import silence
from tests.machine.refusals import wrong_in
from tests.machine.sides import VirtualClock, VirtualLoop
from tests.machine.site import MachineSite
from tests.services.at_work import at_work

SETTLES_WITHIN = 240.0
"""Seconds for all that was begun to come to its end: a burst of 30 with a slow queue takes most."""

TAIL = 135.0
"""Seconds after which no row, lock or effect may be left: the longest patience of the agent."""

_LOOK = 5.0

Life = Callable[..., Coroutine[object, object, AgentLife]]


@dataclasses.dataclass(frozen=True)
class ToldVerdict:
    """What came of a story: what was wrong, what was counted, and what happened."""

    seed: int
    breaches: tuple[str, ...]
    tally: Mapping[str, int]
    told_of: tuple[str, ...] = ()


def tell(story: MachineStory, life: Life = start_agent) -> ToldVerdict:
    """Play the story to its end, or to the first breach."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(_played(story, VirtualClock(loop), life))
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def tell_number(seed: int) -> ToldVerdict:
    """The story of that number, without a word in the log; what happened only where it is asked."""
    with silence():
        verdict = tell(a_story(seed))
    return verdict if verdict.breaches else dataclasses.replace(verdict, told_of=())


async def _played(story: MachineStory, clock: VirtualClock, life: Life) -> ToldVerdict:
    site = CalmSite(story.seed, clock, life, story.pace)
    ready = asyncio.Event()
    task = asyncio.get_running_loop().create_task(site.run(ready))
    try:
        await ready.wait()
        found = await _course(story, site)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    judge = site.judge
    return ToldVerdict(story.seed, tuple(found), Counter(judge.tally), tuple(judge.told_of))


async def _course(story: MachineStory, site: CalmSite) -> list[str]:
    """All deeds, and time for what comes of them. What was wrong, if anything was."""
    async with at_work(site.placer.run, partial(site.crowd_in, story.pace.crowd)):
        await asyncio.sleep(REGISTER_INTERVAL + 1.0)  # then HAMi has seen the node's GPUs
        async with at_work(site.controllers.run):
            await _begin_all(story, site)
            await _settle(site)
        site.drop_unbound()
        if not site.judge.breaches:
            await asyncio.sleep(TAIL)
    site.judge.finish()
    return [*site.judge.breaches] or list(_left(site))


async def _begin_all(story: MachineStory, site: CalmSite) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    for deed in story.deeds:
        await asyncio.sleep(max(0.0, began + deed.at - loop.time()))
        if site.judge.breaches:
            return
        site.begin(deed)


async def _settle(site: CalmSite) -> None:
    ends = asyncio.get_running_loop().time() + SETTLES_WITHIN
    while asyncio.get_running_loop().time() < ends and not site.judge.breaches:
        await asyncio.sleep(_LOOK)
        if site.is_settled():
            return


def _left(site: CalmSite) -> Iterator[str]:
    """What is not as it must be at the end."""

    def is_excused(_: MachineSite, pod: Json) -> bool:
        return pod["metadata"]["uid"] in site.judge.excused

    yield from wrong_in(site, reasons=(), is_excused=is_excused)

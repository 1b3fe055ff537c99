"""Random histories of one node: no container gets what is not its own, and all ends well.

A history is up to 30 steps of what happens to pods, kubelet, scheduler, API server, GPUs and the
agent itself, on virtual time. After every step the audit holds what the agent said and wrote
against what the scheduler decided and what the kubelet asked for; at the end all troubles stop, and
five minutes later no pod, lock, row or effect may be left over.
"""

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from agent.sandbox.kubelet.pods import KubeletEvent
from tests.machine.agent_life import live_objects
from tests.machine.audit import HEARD_BY_A_GHOST, HEARD_BY_A_STATIC_POD, UNPLACED, Audit
from tests.machine.histories import Histories
from tests.machine.mutants import MUTANTS, Mutant
from tests.machine.one_node import play as play_one
from tests.machine.playing import Many, play, play_chunk, play_many, silence
from tests.machine.pods import Box, Shape
from tests.machine.world import MachineWorld

PARTS, HISTORIES = 5, 50
"""Histories that every run of the tests plays, and of how many seeds."""
MOST_WRONG = 10
"""Answers of 1,000 histories to a pod that they were not for, which nobody could know."""

ENOUGH = 1500
"""Histories within which each planted bug is found."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(PARTS))
def test_no_history_breaks_an_invariant(number: int) -> None:
    play_chunk(Histories, number, HISTORIES)


@pytest.mark.histories
@pytest.mark.timeout(7200)
def test_none_of_ten_thousand_histories_breaks_an_invariant(
    many: Many, say: Callable[[str], None]
) -> None:
    counted = play_many(Histories, many)
    say(f"{counted['histories']} histories were clean, from --history-seed={many.first} on")
    say("\n".join(f"{n:8} {kind}" for kind, n in sorted(counted.items())))
    kinds = (HEARD_BY_A_GHOST, HEARD_BY_A_STATIC_POD, UNPLACED)
    wrong = sum(counted[f"excused: {one}"] for one in kinds)
    assert wrong <= MOST_WRONG * max(1, counted["histories"] / 1000), counted


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_bug_is_found(mutant: Callable[[], Mutant]) -> None:
    planted = mutant()

    with planted.patch, pytest.raises(AssertionError, match=planted.breach):
        play(Histories, ENOUGH, same_ones=True)


# Pods come and go for hours and days, and the agent holds no more than before.

EVERY = 3.0
"""Seconds from one pod to the next: 1,200 in an hour."""
LONG = 600.0
"""Seconds after which whatever was begun is over and forgotten."""
FEW = 64
"""Objects that one moment has more than another: timers, counts of the last round."""


async def churn(world: MachineWorld, first: int, count: int) -> None:
    """So many pods, each of which works for 2 s and is deleted when it has succeeded."""
    for number in range(first, first + count):
        world.create_and_schedule(f"p{number}", Shape(seconds=2))
        await asyncio.sleep(EVERY)
        for pod in world.pods():
            if pod["status"].get("phase") == "Succeeded":
                world.delete(pod, 0)
    await asyncio.sleep(LONG)


def leave_no_object_more(count: int) -> None:
    """So many pods, and as many again."""

    async def history(world: MachineWorld) -> None:
        await churn(world, 0, count)
        once = live_objects(world.agent)
        await churn(world, count, count)
        twice = live_objects(world.agent)
        assert twice.total() <= once.total() + FEW, twice - once

    with silence():
        play_one(history)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_as_many_pods_again_leave_no_object_more() -> None:
    leave_no_object_more(1200)


@pytest.mark.histories
@pytest.mark.timeout(7200)
def test_days_of_pods_leave_no_object_more(many: Many) -> None:
    leave_no_object_more(max(1200, 5 * many.count))


# Of which of the kubelet's panics the agent could have known when it answered.


def breaches_after(*events: tuple[str, str]) -> list[str]:
    """What the audit notes when the kubelet does this; each event names a pod."""
    heard: list[Callable[[KubeletEvent], None]] = []
    kubelet: Any = SimpleNamespace(history=SimpleNamespace(listen=heard.append))
    audit = Audit(SimpleNamespace(), kubelet, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    for kind, pod in events:
        heard[0](KubeletEvent(0.0, kind, pod=pod, container="c"))  # type: ignore[arg-type]
    return audit.breaches


PANIC = ("panicked", "")
A_ANSWERED = ("allocated", "a")
TWO_ASKED = ("allocating", "a"), ("allocating", "b")


@pytest.mark.parametrize(
    ("is_known", "events"),
    [
        (True, [("preferring", "a"), ("allocating", "a"), ("preferring", "b"), A_ANSWERED]),
        (True, [("preferring", "a"), ("preferring", "b"), ("allocating", "a"), A_ANSWERED]),
        (True, [("allocating", "a"), ("allocating", "b"), A_ANSWERED]),
        (
            True,
            [
                *(("preferring", "a"), ("allocating", "a"), ("preferring", "b"), A_ANSWERED),
                *(("allocating", "b"), ("allocated", "b")),
            ],
        ),
        # Of a beginning that nobody told it, or that came later, the agent cannot know.
        (False, [("preferring", "a"), ("allocating", "a"), A_ANSWERED]),
        (False, [("allocating", "a"), A_ANSWERED, ("preferring", "b")]),
        (False, [("preferring", "b"), ("preferring", "a"), ("allocating", "a"), A_ANSWERED]),
        (False, [*TWO_ASKED, ("allocate_refused", "a"), ("allocated", "b")]),
        (False, [*TWO_ASKED, A_ANSWERED, ("started", "")]),
    ],
)
def test_a_panic_after_an_answer_beside_another_question_is_the_agents(is_known, events):
    assert is_known == bool(breaches_after(*events, PANIC))


# The kubelet lost its checkpoint and asks for dead containers that nothing tells apart.
#
# They ask every few seconds, and in vain until all but one are deleted. They must not cost the pods
# that come meanwhile their start, and none may get another's share.

DEAD, NEW = 8, 30


# A pod is refused if a dead container's call overtakes its own, or if it comes while one is under
# way that began after the kubelet knew the pod. If each call beside it counted: 4.
@pytest.mark.timeout(240)  # some seconds of CPU alone; the machine may be busy
def test_good_pods_that_come_meanwhile_run() -> None:
    ends = list[str]()

    async def history(world):
        world.set_split(10)
        for number in range(DEAD):
            uid = world.create(f"old-{number}", Shape((Box(mib=300 + number, cores=0),)))
            await world.scheduler.schedule(uid)
            await asyncio.sleep(1)
        await asyncio.sleep(60)
        await world.restart_kubelet(lose=True)
        await asyncio.sleep(120)
        await world.end_containers(0, DEAD)
        await asyncio.sleep(30)
        dice = random.Random(3)  # noqa: S311 -- moments, no secrets
        for number in range(NEW):
            await asyncio.sleep(dice.uniform(2, 9))
            uid = world.create(f"good-{number}", Shape((Box(mib=400 + number, cores=0),)))
            await world.scheduler.schedule(uid)
            await asyncio.sleep(8)
            (pod,) = (one for one in world.pods() if one["metadata"]["uid"] == uid)
            ends.append(pod["status"].get("phase", "Pending"))
            world.delete(pod, 0)

    play_one(history)

    assert NEW == len(ends)
    assert ends.count("Failed") <= 1
    assert ends.count("Running") == NEW - ends.count("Failed")

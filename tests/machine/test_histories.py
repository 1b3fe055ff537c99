"""Histories of one node: no container gets what is not its own, no good pod is refused.

Three kinds, each on virtual time, and each held to what the planted bugs of `mutants` break:

- Random ones of up to 30 steps, of what happens to pods, kubelet, scheduler, API server, GPUs and
  the agent itself. After every step the audit holds what the agent said and wrote against what the
  scheduler decided and what the kubelet asked for; at the end all troubles stop, and five minutes
  later no pod, lock, row or effect may be left over.
- Stories of a cluster in which nothing fails: no good pod is refused, and no lock stays. Both
  watches are late, HAMi's scheduler waits in its own queue, names return with other shares, and
  bursts contend for the lock. What may be refused is a pod that was deleted before its Allocate was
  over. With a kubelet before 1.34 others may be as well; there the refusals are counted.
- Random ones of the driver: whatever it does, the kubelet is told the truth of each GPU.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from agent.sandbox.kubelet.pods import KubeletEvent
from tests.app.story import AllocationStory, a_story, told
from tests.machine import calm
from tests.machine.agent_life import live_objects
from tests.machine.audit import HEARD_BY_A_GHOST, HEARD_BY_A_STATIC_POD, UNPLACED, Audit
from tests.machine.calm import ToldVerdict, tell_number
from tests.machine.gpu_histories import GpuHistories
from tests.machine.histories import Histories
from tests.machine.mutants import CALM_MUTANTS, GPU_MUTANTS, MUTANTS
from tests.machine.playing import Many, play, play_chunk, play_many, side_by_side
from tests.machine.pods import Shape

SEEDS, HISTORIES = 5, 50
STORIES, PART = range(40), 10
"""Histories and stories that every run of the tests plays."""
GPU_HISTORIES = 15
ENOUGH = {"histories": 1500, "stories": 200, "drivers": 300}
"""Those within which each planted bug is found."""
MOST_WRONG = 10
"""Answers of 1,000 histories to a pod that they were not for, which nobody could know."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(SEEDS))
def test_no_history_breaks_an_invariant(number: int) -> None:
    play_chunk(Histories, number, HISTORIES)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", STORIES[::PART])
def test_no_good_pod_is_refused_where_nothing_fails(first: int) -> None:
    _require_clean(map(tell_number, STORIES[first : first + PART]))


@pytest.mark.timeout(300)
def test_no_history_of_a_driver_breaks_an_invariant() -> None:
    play(GpuHistories, GPU_HISTORIES, same_ones=True)


def test_a_story_is_the_same_whenever_it_is_told() -> None:
    assert tell_number(7) == tell_number(7)


# Planted bugs.


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(name: str) -> None:
    mutant = MUTANTS[name]

    with mutant.planted(), pytest.raises(AssertionError, match=mutant.breach):
        play(Histories, ENOUGH["histories"], same_ones=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CALM_MUTANTS)
def test_a_planted_bug_is_found_where_nothing_fails(name: str) -> None:
    mutant = CALM_MUTANTS[name]

    with mutant.planted(), pytest.raises(AssertionError, match=mutant.breach):
        _require_clean(map(tell_number, range(ENOUGH["stories"])))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", GPU_MUTANTS)
def test_a_planted_bug_in_health_is_found(name: str) -> None:
    mutant = GPU_MUTANTS[name]
    breaches = AssertionError, BaseExceptionGroup

    with mutant.planted(), pytest.raises(breaches, match=mutant.breach):
        play(GpuHistories, ENOUGH["drivers"], same_ones=True)


# Ten thousand of each kind, or as many as the command line says.


@pytest.mark.histories
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", [Histories, GpuHistories])
def test_none_of_ten_thousand_histories_breaks_an_invariant(
    kind: type[Histories] | type[GpuHistories], many: Many, say: Callable[[str], None]
) -> None:
    counted = play_many(kind, many)
    say(f"{counted['histories']} histories were clean, from --history-seed={many.first} on")
    say("\n".join(f"{n:8} {what}" for what, n in sorted(counted.items())))
    kinds = (HEARD_BY_A_GHOST, HEARD_BY_A_STATIC_POD, UNPLACED)
    wrong = sum(counted[f"excused: {one}"] for one in kinds)
    assert wrong <= MOST_WRONG * max(1, counted["histories"] / 1000), counted


@pytest.mark.histories
@pytest.mark.timeout(7200)
def test_no_good_pod_is_refused_in_ten_thousand_stories(
    many: Many, say: Callable[[str], None]
) -> None:
    with side_by_side(tell_number, many.seeds, many.jobs, 10) as verdicts:
        say(_require_clean(verdicts))
    say(f"from --history-seed={many.first} on")


def _require_clean(verdicts: Iterable[ToldVerdict]) -> str:
    """What was counted in all of them. The first that is not clean is told."""
    tally: Counter[str] = Counter()
    clean = 0
    for verdict in verdicts:
        tally.update(verdict.tally)
        again = f"{clean} stories were clean, then --history-seed={verdict.seed} --histories=1"
        lines = again, str(calm.a_story(verdict.seed)), *verdict.breaches
        assert not verdict.breaches, "\n".join(lines)
        clean += 1
    return f"{clean} stories were clean: {dict(sorted(tally.items()))}"


# Of which of the kubelet's panics the agent could have known when it answered.

KINDS = {"p": "preferring", "q": "allocating", "a": "allocated", "r": "allocate_refused"}
KINDS |= {"s": "started", "!": "panicked"}


@pytest.mark.parametrize(
    ("is_known", "events"),
    [
        (True, "pA qA pB aA"),
        (True, "pA pB qA aA"),
        (True, "qA qB aA"),
        (True, "pA qA pB aA qB aB"),
        # Of a beginning that nobody told it, or that came later, the agent cannot know.
        (False, "pA qA aA"),
        (False, "qA aA pB"),
        (False, "pB pA qA aA"),
        (False, "qA qB rA aB"),
        (False, "qA qB aA s"),
    ],
)
def test_a_panic_after_an_answer_beside_another_question_is_the_agents(is_known, events):
    heard: list[Callable[[KubeletEvent], None]] = []
    kubelet: Any = SimpleNamespace(history=SimpleNamespace(listen=heard.append))
    audit = Audit(SimpleNamespace(), kubelet, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    for kind, *pod in (*events.split(), "!"):
        heard[0](KubeletEvent(0.0, KINDS[kind], pod="".join(pod), container="c"))

    assert is_known == bool(audit.breaches)


# Pods come and go for hours and days, and the agent holds no more than before.

EVERY, LONG = 3.0, 600.0
"""Seconds from one pod to the next; and after which whatever was begun is over and forgotten."""
FEW = 64
"""Objects that one moment has more than another: timers, counts of the last round."""


async def churn(story: AllocationStory, count: int) -> Counter[str]:
    """So many pods, each of which works for 2 s and is deleted; what the agent holds then."""
    for number in range(count):
        story.world.create_and_schedule(f"p{number}", Shape(seconds=2))
        await asyncio.sleep(EVERY)
        for pod in story.world.pods():
            if pod["status"].get("phase") == "Succeeded":
                story.world.delete(pod, 0)
    await asyncio.sleep(LONG)
    return live_objects(story.world.agent)


@pytest.mark.parametrize(
    "most",
    [
        pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(900)], id="hours"),
        pytest.param(5, marks=[pytest.mark.histories, pytest.mark.timeout(7200)], id="days"),
    ],
)
@told
async def test_as_many_pods_again_leave_no_object_more(most, many):
    """1,200 pods come in an hour; in days, five for each history that is asked for."""
    count = max(1200, most * many.count if most > 1 else 0)
    async with a_story() as story:
        once, twice = await churn(story, count), await churn(story, count)

        assert twice.total() <= once.total() + FEW, twice - once

"""Stories of a cluster in which nothing fails: no good pod is refused, and no lock stays.

Both watches are late, HAMi's scheduler waits in its own queue, names return with other shares, and
bursts of pods contend for the lock. What may be refused is a pod that was deleted before its
Allocate was over. With a kubelet before 1.34 others may be as well; there the shares and the locks
are judged, and the refusals counted.
"""

from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from tests.machine.calm import a_story
from tests.machine.mutants import CALM_MUTANTS, Mutant
from tests.machine.playing import Many, side_by_side
from tests.machine.telling import ToldVerdict, tell_number

STORIES = range(40)
PART = 10
ENOUGH = 200
"""Stories within which each planted bug is found."""

_LINES = 60


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", STORIES[::PART])
def test_no_good_pod_is_refused_where_nothing_fails(first: int) -> None:
    _require_clean(map(tell_number, STORIES[first : first + PART]))


@pytest.mark.histories
@pytest.mark.timeout(7200)
def test_no_good_pod_is_refused_in_ten_thousand_stories(
    many: Many, say: Callable[[str], None]
) -> None:
    with side_by_side(tell_number, many.seeds(), many.jobs, 10) as verdicts:
        say(_require_clean(verdicts))
    say(f"from --history-seed={many.first} on")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", CALM_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_bug_is_found_where_nothing_fails(mutant: Callable[[], Mutant]) -> None:
    planted = mutant()

    with planted.patch, pytest.raises(AssertionError, match=planted.breach):
        _require_clean(map(tell_number, range(planted.first, planted.first + ENOUGH)))


def test_a_story_is_the_same_whenever_it_is_told() -> None:
    assert tell_number(7) == tell_number(7)


def _require_clean(verdicts: Iterable[ToldVerdict]) -> str:
    """What was counted in all of them. The first that is not clean is told."""
    tally: Counter[str] = Counter()
    clean = 0
    for verdict in verdicts:
        tally.update(verdict.tally)
        if verdict.breaches:
            raise AssertionError(_told(clean, verdict))
        clean += 1
    return f"{clean} stories were clean: {dict(sorted(tally.items()))}"


def _told(clean: int, found: ToldVerdict) -> str:
    return "\n".join(
        (
            f"{clean} stories were clean, then --history-seed={found.seed} --histories=1",
            f"{a_story(found.seed)}",
            *found.told_of[-_LINES:],
            *found.breaches,
        )
    )

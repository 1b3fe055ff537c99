"""Random histories of one node: no container gets what is not its own, and all ends well.

A history is up to 30 steps of what happens to pods, kubelet, scheduler, API server, GPUs and the
agent itself, on virtual time. After every step the audit holds what the agent said and wrote
against what the scheduler decided and what the kubelet asked for; at the end all troubles stop, and
five minutes later no pod, lock, row or effect may be left over.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.machine.audit import HEARD_BY_A_GHOST, HEARD_BY_A_STATIC_POD, UNPLACED
from tests.machine.histories import Histories
from tests.machine.mutants import MUTANTS, Mutant
from tests.machine.playing import CHUNK, Many, play, play_chunk, side_by_side, silence

PARTS, HISTORIES = 5, 50
"""Histories that every run of the tests plays, and of how many seeds."""
MOST_WRONG = 10
"""Answers of 1,000 histories to a pod that they were not for, which nobody could know."""

ENOUGH = 1500
"""Histories within which each planted bug is found."""


def chunk_of(number: int) -> tuple[str, Counter[str]]:
    """What was wrong in the histories of that seed and in which of them; what they counted."""
    try:
        with silence():
            return "", play_chunk(Histories, number)
    except AssertionError as error:
        return "\n".join((str(error), *getattr(error, "__notes__", ()))), Counter()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(PARTS))
def test_no_history_breaks_an_invariant(number: int) -> None:
    play_chunk(Histories, number, HISTORIES)


@pytest.mark.histories
@pytest.mark.timeout(7200)
def test_none_of_ten_thousand_histories_breaks_an_invariant(
    many: Many, say: Callable[[str], None]
) -> None:
    seeds = many.seeds(CHUNK)
    counted: Counter[str] = Counter()
    with side_by_side(chunk_of, seeds, many.jobs, 1) as chunks:
        for number, (found, counts) in zip(seeds, chunks, strict=True):
            counted.update(counts)
            clean = (number - many.first) * CHUNK
            again = f"--history-seed={number} --histories={CHUNK}"
            assert not found, f"{clean} histories were clean, then ({again}): {found}"
    say(f"{len(seeds) * CHUNK} histories were clean, from --history-seed={many.first} on")
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


def test_a_planted_bug_is_gone_when_its_test_is_over() -> None:
    for mutant in MUTANTS:
        patch: AbstractContextManager[None] = mutant().patch
        with patch:
            pass

"""Delays follow their row, repeat the last entry, and grow by chance only as far as allowed."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from agent.kit.tasks import Backoff, Throttle
from tests.fakes.chance import Seeded


def test_the_last_delay_repeats():
    backoff = Backoff((1.0, 2.0, 4.0), 0.0, Seeded(0))

    assert [1.0, 2.0, 4.0, 4.0, 4.0] == [backoff.next() for _ in range(5)]


def test_reset_starts_over():
    backoff = Backoff((1.0, 2.0), 0.0, Seeded(0))
    backoff.next()
    backoff.next()

    backoff.reset()

    assert 1.0 == backoff.next()


@given(st.integers(), st.floats(0, 3))
def test_jitter_only_adds_and_never_more_than_its_fraction(seed, jitter):
    backoff = Backoff((2.0, 8.0), jitter, Seeded(seed))

    assert 2.0 <= backoff.next() <= 2.0 * (1 + jitter)
    assert 8.0 <= backoff.next() <= 8.0 * (1 + jitter)


def test_the_same_seed_gives_the_same_delays():
    delays = [Backoff((1.0,), 0.5, Seeded(7)).next() for _ in range(2)]

    assert delays[0] == delays[1]
    assert 1.0 != delays[0]


async def test_one_is_let_through_in_a_period_and_the_next_one_counts_the_rest():
    throttle = Throttle(1.0)
    said = [throttle.admit() for _ in range(4)]
    await asyncio.sleep(1.0)

    assert [0, None, None, None] == said
    assert [3, None] == [throttle.admit(), throttle.admit()]
    await asyncio.sleep(5.0)
    assert 1 == throttle.admit()

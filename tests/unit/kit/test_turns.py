"""Which turn of a client may be granted: the last that it began with, and when nobody can tell."""

import pytest

from agent.kit.timing import MOST_QUESTIONS, CallOrder


@pytest.fixture
def order() -> CallOrder:
    return CallOrder(lambda: "client")


async def test_of_those_that_heard_the_same_none_is_the_last(order):
    for _ in range(2):
        order.begin().ids = frozenset("a")
    with order.asked(["a"]) as one, order.asked(["a"]) as other:
        assert one.overtaken
        assert other.overtaken
    with order.asked(["a"]) as later:
        assert not later.overtaken


async def test_questions_that_nobody_follows_up_are_forgotten(order):
    for number in range(2 * MOST_QUESTIONS):
        order.begin().ids = frozenset([str(number)])

    assert MOST_QUESTIONS == len(order.offered())

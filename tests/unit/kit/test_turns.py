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


async def test_a_new_client_goes_on_with_nothing():
    client = "old"
    order = CallOrder(lambda: client)
    order.begin().ids = frozenset("a")
    client = "new"
    order.begin().ids = frozenset("a")

    with order.asked(["a"]) as turn:
        assert not turn.overtaken


async def test_questions_that_nobody_follows_up_are_forgotten(order):
    for number in range(2 * MOST_QUESTIONS):
        order.begin().ids = frozenset([str(number)])

    assert MOST_QUESTIONS == len(order.offered())


async def test_one_alone_or_that_follows_an_answer_at_once_is_in_no_doubt(order):
    for text in "ab":
        with order.asked([text]) as turn:
            assert [False, False] == [turn.overtaken, turn.may_be_stale]

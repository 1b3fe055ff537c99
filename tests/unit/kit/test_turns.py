"""Which turn of a client may be granted: the last that it began with, and when nobody can tell."""

import pytest

from agent.kit.turns import MOST, Turns


@pytest.fixture
def turns() -> Turns:
    return Turns(lambda: "client")


async def test_of_those_that_heard_the_same_none_is_the_last(turns):
    for _ in range(2):
        turns.begin().ids = frozenset("a")
    with turns.asked(["a"]) as one, turns.asked(["a"]) as other:
        assert one.overtaken
        assert other.overtaken
    with turns.asked(["a"]) as later:
        assert not later.overtaken


async def test_a_new_client_goes_on_with_nothing():
    client = "old"
    turns = Turns(lambda: client)
    turns.begin().ids = frozenset("a")
    client = "new"
    turns.begin().ids = frozenset("a")

    with turns.asked(["a"]) as turn:
        assert not turn.overtaken


async def test_questions_that_nobody_follows_up_are_forgotten(turns):
    for number in range(2 * MOST):
        turns.begin().ids = frozenset([str(number)])

    assert MOST == len(turns.offered())


async def test_one_alone_or_that_follows_an_answer_at_once_is_in_no_doubt(turns):
    for text in "ab":
        with turns.asked([text]) as turn:
            assert [False, False] == [turn.overtaken, turn.doubted]

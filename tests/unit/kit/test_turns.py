"""Which turn of a client may be granted: the last that it began with, and when nobody can tell."""

import asyncio
import contextlib

import pytest

from agent.kit.turns import BEGUN, BOOKING, MOST, Turns


@pytest.fixture
def turns() -> Turns:
    return Turns(lambda: "client")


async def test_all_that_were_begun_before_the_last_are_overtaken(turns):
    turns.begin().ids = frozenset("a")
    with turns.asked(["b"]) as early:
        turns.begin().ids = frozenset("c")
        with turns.asked(["a"]) as first, turns.asked(["c"]) as last:
            assert [True, True, False] == [early.overtaken, first.overtaken, last.overtaken]


async def test_of_those_that_heard_the_same_none_is_the_last(turns):
    for _ in range(2):
        turns.begin().ids = frozenset("a")
    with turns.asked(["a"]) as one, turns.asked(["a"]) as other:
        assert one.overtaken
        assert other.overtaken
    with turns.asked(["a"]) as later:
        assert not later.overtaken


async def test_what_was_heard_is_on_offer_until_it_is_asked_for_or_was_long_ago(turns):
    turns.begin().ids = frozenset("ab")
    turns.begin().ids = frozenset("c")
    assert {"a", "b", "c"} == turns.offered()

    with turns.asked(["c"]):
        assert {"a", "b"} == turns.offered()
    await asyncio.sleep(BEGUN)
    assert set() == turns.offered()


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


async def test_one_that_yields_is_lost_if_another_was_open_beside_it_though_it_is_the_last(turns):
    with turns.asked(["a"]) as alone:
        alone.yields = True
        assert not alone.is_lost
    with turns.asked(["a"]), turns.asked(["b"]) as last:
        last.yields = True
        assert (False, True) == (last.overtaken, last.is_lost)


async def test_who_waits_for_the_others_leaves_after_those_that_may_be_granted(turns):
    start = asyncio.get_running_loop().time()
    async with contextlib.AsyncExitStack() as stack:
        turn, beside = (stack.enter_context(turns.asked([text])) for text in "ab")
        beside.yields = True

        async def ask() -> None:
            with turns.asked(["c"]):
                await asyncio.sleep(1)

        async with asyncio.TaskGroup() as group:
            group.create_task(ask())
            await asyncio.sleep(0)
            await turns.until_alone(turn)

    assert 1 + BOOKING == pytest.approx(asyncio.get_running_loop().time() - start)


async def test_one_alone_or_that_follows_an_answer_at_once_is_in_no_doubt(turns):
    for text in "ab":
        with turns.asked([text]) as turn:
            assert [False, False] == [turn.overtaken, turn.doubted]

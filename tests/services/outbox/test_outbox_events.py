"""Events are words: refused, old or too many, they are dropped; locks and pods never are."""

import asyncio
import errno

import msgspec
import pytest
from structlog.testing import capture_logs

from agent.errors import ApiConflict, ApiError, ApiForbidden, ApiThrottled
from agent.ledger import EffectKind
from agent.settle import EVENTS
from tests.services.outbox.owing import a_placed_pod, owing, releasing, settling, telling

POD = a_placed_pod()
FORBIDDEN = ApiForbidden("may not", status=403)


def words(count):
    return [msgspec.structs.replace(telling(POD), value=f"no {n}") for n in range(count)]


def told(logs):
    return [line for line in logs if line["event"] == "outbox.event_dropped"]


@pytest.mark.parametrize("status", [400, 403, 405, 413])
async def test_an_event_that_is_refused_is_dropped_at_once(status):
    async with owing(POD) as desk:
        desk.api.fail(ApiError("no", status=status))

        await desk.owe(telling(POD))
        await asyncio.sleep(1)

        assert () == desk.owed
        assert {("post-event", "dropped"): 1} == desk.results
        assert 1 == desk.api.writes


@pytest.mark.parametrize("error", [ApiThrottled("busy", status=429), ApiError("no", status=500)])
async def test_an_event_that_is_put_off_is_tried_again(error):
    async with owing(POD) as desk:
        desk.api.fail(error)

        await desk.owe(telling(POD))
        await asyncio.sleep(1)

        assert 1 == len(desk.api.events)


async def test_an_event_is_given_up_after_an_hour():
    async with owing(POD) as desk:
        desk.api.begin_outage()
        await desk.owe(telling(POD))
        await asyncio.sleep(3500)
        assert 1 == len(desk.owed)

        await asyncio.sleep(200)

        assert not desk.owed
        assert 1 == desk.results["post-event", "dropped"]


async def test_the_oldest_of_too_many_events_are_dropped():
    async with owing(POD) as desk:
        desk.api.begin_outage()
        first, last = words(EVENTS + 10)[:EVENTS], words(EVENTS + 10)[EVENTS:]
        await desk.owe(*first)
        await asyncio.sleep(60)
        await desk.owe(*last)
        await asyncio.sleep(60)

        assert EVENTS == len(desk.owed)
        assert set(last) <= set(desk.owed)
        assert 10 == desk.results["post-event", "dropped"]


async def test_two_thousand_events_against_a_403_are_gone_soon_with_few_words():
    async with owing(POD) as desk:
        desk.api.fail(FORBIDDEN, count=9999, call="post_event")
        with capture_logs() as logs:
            await desk.owe(*words(2000), releasing(POD))
            await asyncio.sleep(1)

        assert () == desk.owed
        assert not desk.locked
        assert 2000 == desk.results["post-event", "dropped"]
        assert EVENTS + 10 > desk.api.calls["post_event"]
        assert {"": 1, "Refused": 1} == {
            reason: sum(line["reason"] == reason for line in told(logs))
            for reason in ("", "Refused")
        }


async def test_a_refusal_that_goes_on_is_told_once_a_minute():
    async with owing(POD) as desk:
        desk.api.fail(FORBIDDEN, count=9999, call="post_event")
        with capture_logs() as logs:
            for word in words(18):
                await desk.owe(word)
                await asyncio.sleep(10)

        assert 3 == len(told(logs))
        assert 18 == desk.results["post-event", "dropped"]


async def test_a_pod_and_a_lock_that_may_not_be_written_are_tried_until_they_may():
    async with owing(POD) as desk:
        desk.api.fail(FORBIDDEN, count=2000, call="release_lock")
        desk.api.fail(FORBIDDEN, count=300, call="annotate_pod")
        await desk.owe(releasing(POD), settling(POD))
        await asyncio.sleep(2 * 3600)
        assert 2 == len(desk.owed)

        await asyncio.sleep(2 * 3600)

        assert not desk.owed
        assert not desk.locked


async def test_events_that_the_disk_does_not_let_go_are_dropped_when_it_does():
    async with owing(POD) as desk:
        desk.api.begin_outage()
        await desk.owe(*words(EVENTS))
        await asyncio.sleep(0.1)
        await desk.owe(*words(EVENTS + 5)[EVENTS:])
        desk.disk.faults.fail_at(0, errno.ENOSPC, times=500)
        await asyncio.sleep(8)
        assert EVENTS + 5 == len(desk.owed)
        desk.disk.faults.revive()

        await asyncio.sleep(10)

        kinds = {effect.kind for effect in desk.owed}
        assert (EVENTS, {EffectKind.POST_EVENT}) == (len(desk.owed), kinds)


async def test_an_event_that_collides_is_not_tried_for_ever():
    async with owing(POD) as desk:
        desk.api.fail(ApiConflict("the object has been modified", status=409), count=99)

        await desk.owe(telling(POD))
        await asyncio.sleep(60)

        assert {("post-event", "dropped"): 1} == desk.results
        assert () == desk.owed

"""How long a server waits for the rest of an admission: not at all where none is under way."""

import asyncio
from typing import Any

import pytest

from agent.plugin.calls import ALLOCATE_FOLLOWED, PREFERENCE_FOLLOWED, AdmissionCalls


async def answer(_: Any) -> None:
    """A call that is answered at once."""


async def waited(calls: AdmissionCalls) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await calls.over()
    return loop.time() - began


async def test_without_a_call_it_does_not_wait():
    assert 0 == await waited(AdmissionCalls())


@pytest.mark.parametrize("followed", [PREFERENCE_FOLLOWED, ALLOCATE_FOLLOWED])
async def test_behind_a_call_it_waits_for_the_next_one(followed: float):
    calls = AdmissionCalls()
    await calls.watched(answer, followed)(None)  # type: ignore[arg-type]

    assert followed == pytest.approx(await waited(calls))


async def test_long_behind_a_call_it_does_not_wait():
    calls = AdmissionCalls()
    await calls.watched(answer, PREFERENCE_FOLLOWED)(None)  # type: ignore[arg-type]
    await asyncio.sleep(1)

    assert 0 == await waited(calls)


async def test_the_allocate_behind_a_preference_ends_the_long_wait():
    calls = AdmissionCalls()
    await calls.watched(answer, PREFERENCE_FOLLOWED)(None)  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(waited(calls))
        await asyncio.sleep(0.2)
        await calls.watched(answer, ALLOCATE_FOLLOWED)(None)  # type: ignore[arg-type]

    assert waiting.result() == pytest.approx(0.2 + ALLOCATE_FOLLOWED)


async def test_a_call_that_is_being_answered_is_waited_for_and_what_follows_it():
    calls = AdmissionCalls()

    async def slow(_: Any) -> None:
        await asyncio.sleep(0.3)

    async with asyncio.TaskGroup() as group:
        group.create_task(calls.watched(slow, ALLOCATE_FOLLOWED)(None))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        waiting = group.create_task(waited(calls))

    assert waiting.result() == pytest.approx(0.3 + ALLOCATE_FOLLOWED)


async def test_a_call_that_fails_is_over_too():
    calls = AdmissionCalls()

    async def failing(_: Any) -> None:
        raise OSError

    with pytest.raises(OSError):  # noqa: PT011 -- ours
        await calls.watched(failing, ALLOCATE_FOLLOWED)(None)  # type: ignore[arg-type]

    assert ALLOCATE_FOLLOWED == pytest.approx(await waited(calls))

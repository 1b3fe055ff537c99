"""How long a server waits for the rest of an admission: not at all where none is under way."""

import asyncio
import contextlib

import pytest

from agent.kubelet.door import ALLOCATE_FOLLOWED, PREFERENCE_FOLLOWED, AdmissionCalls
from tests.machine.sides import stall, virtual


async def call(calls: AdmissionCalls, followed: float, seconds: float = 0.0) -> None:
    """A call that is answered after so long."""
    with calls.counted(followed):
        await asyncio.sleep(seconds)


async def waited(calls: AdmissionCalls) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await calls.over()
    return loop.time() - began


@pytest.mark.parametrize("followed", [PREFERENCE_FOLLOWED, ALLOCATE_FOLLOWED])
@pytest.mark.parametrize("fails", [False, True])
async def test_behind_a_call_it_waits_for_the_next_one(followed: float, *, fails: bool):
    calls = AdmissionCalls()

    with (
        pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext(),
        calls.counted(followed),
    ):
        if fails:
            raise ZeroDivisionError

    assert followed == pytest.approx(await waited(calls))


@virtual
async def test_an_agent_that_stands_still_behind_a_call_reads_the_next_one_first():
    calls, loop = AdmissionCalls(), asyncio.get_running_loop()
    tasks = []

    async def read() -> None:
        for _ in range(5):  # a call passes through several callbacks
            await asyncio.sleep(0)
        await call(calls, ALLOCATE_FOLLOWED, 0.2)

    def stop() -> None:
        stall(3.5)  # the kubelet's call lies there
        tasks.append(loop.create_task(read()))

    await call(calls, PREFERENCE_FOLLOWED)
    loop.call_later(0.1, stop)
    await calls.over()

    assert [True] == [task.done() for task in tasks]


async def test_without_a_call_or_long_behind_one_it_does_not_wait():
    calls = AdmissionCalls()
    assert 0 == await waited(calls)
    await call(calls, PREFERENCE_FOLLOWED)
    await asyncio.sleep(1)

    assert 0 == await waited(calls)


@pytest.mark.parametrize(
    ("before", "after"), [(0.0, 0.2), (0.3, 0.0)], ids=["it follows", "it is being answered"]
)
async def test_the_allocate_behind_a_preference_ends_the_long_wait(before: float, after: float):
    calls = AdmissionCalls()
    await call(calls, PREFERENCE_FOLLOWED)
    async with asyncio.TaskGroup() as group:
        if before:
            group.create_task(call(calls, ALLOCATE_FOLLOWED, before))
            await asyncio.sleep(0)
        waiting = group.create_task(waited(calls))
        if after:
            await asyncio.sleep(after)
            await call(calls, ALLOCATE_FOLLOWED)

    assert before + after + ALLOCATE_FOLLOWED == pytest.approx(waiting.result())

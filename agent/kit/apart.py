"""Runs work in a task of its own, so that its cancellations are not the caller's."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def apart(work: Awaitable[T]) -> T:
    """Return the result of `work` or raise its error; CancelledError if the caller is cancelled.

    To end a call, grpclib cancels the task of the call, raises the error in its place, and lets the
    cancellation count; so does a TaskGroup on Python 3.11. In the caller's task, an outer
    `asyncio.timeout` would take its own cancellation for another's, and an error that comes with a
    cancellation of the caller would hide it. (So give a call of grpclib no `timeout` of its own.)
    """
    caller = asyncio.current_task()
    before = caller.cancelling() if caller else 0
    try:
        return await asyncio.ensure_future(work)  # noqa: TID251 -- a group would hide errors
    finally:
        if caller and caller.cancelling() > before:
            raise asyncio.CancelledError

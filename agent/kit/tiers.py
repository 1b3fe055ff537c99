"""Runs standing tasks in nested tiers: the outer tier starts first and stops last."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import structlog

log = structlog.get_logger(__name__)


class Task(msgspec.Struct, frozen=True):
    """A standing task: `run` ends only when it is cancelled."""

    name: str
    run: Callable[[], Awaitable[None]]


class TaskEnded(Exception):  # noqa: N818 -- names what happened
    """A standing task ended without being stopped."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} ended although it was not stopped")
        self.name = name


async def run_tiers(tiers: Sequence[Sequence[Task]], stop: asyncio.Event, deadline: float) -> None:
    """Run all tasks until `stop` is set; then stop tier by tier, the last one first.

    Each tier is cancelled and awaited before the next. All tiers together have `deadline` seconds:
    each gets an equal share of the time left. A task that exceeds its share is cancelled a second
    time, which interrupts its clean-up.

    Raises:
        ExceptionGroup: a task failed or ended (TaskEnded). All tiers are stopped.
    """
    await _run_from(0, tiers, stop, deadline)


async def _run_from(
    depth: int, tiers: Sequence[Sequence[Task]], stop: asyncio.Event, deadline: float
) -> float:
    """Run the tiers from `depth` inwards; return the loop time at which all must have ended."""
    loop = asyncio.get_running_loop()
    if depth == len(tiers):
        await stop.wait()
        return loop.time() + deadline
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_stand(task), name=task.name) for task in tiers[depth]]
        over_at = await _run_from(depth + 1, tiers, stop, deadline)
        # Not after a failure: the group has cancelled them already, and a second cancel would
        # interrupt their clean-up.
        await _end(tasks, max(0.0, over_at - loop.time()) / (depth + 1))
    return over_at


async def _stand(task: Task) -> None:
    """Run a task; any end but a requested cancellation is a failure."""
    try:
        await task.run()
    except asyncio.CancelledError as error:
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise
        raise TaskEnded(task.name) from error
    raise TaskEnded(task.name)


async def _end(tasks: Sequence[asyncio.Task[None]], share: float) -> None:
    for task in tasks:
        task.cancel()
    if not tasks:
        return
    _, overdue = await asyncio.wait(tasks, timeout=share)
    for task in overdue:
        log.warning("tier.overdue", task=task.get_name(), share=round(share, 3))
        task.cancel()

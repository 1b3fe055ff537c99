"""Playing histories, and telling nothing of them: the lines would cost more than the histories."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager

import structlog
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

STEPS = 30

Deed = Callable[[], object]
"""A step: done when called, or when awaited."""


def play(machine: type[RuleBasedStateMachine], histories: int, *, same_ones: bool) -> None:
    """So many histories; `same_ones`: the same at every run."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=histories,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            derandomize=same_ones,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )


async def passing(pause: float, deed: Deed | None) -> None:
    """The deed is done, and time passes."""
    going_on = deed() if deed is not None else None
    if isinstance(going_on, Coroutine):
        await going_on
    await asyncio.sleep(pause)


@contextmanager
def silence() -> Iterator[None]:
    """No log lines."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.configure(**before)

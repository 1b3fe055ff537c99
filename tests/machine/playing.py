"""Playing histories, and telling nothing of them: the lines would cost more than the histories."""

import asyncio
import dataclasses
import multiprocessing
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import structlog
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.machine.sides import VirtualLoop

STEPS = 30
CHUNK = 250
"""Histories with faults that are drawn from one seed."""

T = TypeVar("T")

Deed = Callable[[], object]
"""A step: done when called, or when awaited."""


class SameEverywhere(HypothesisProvider):
    """Draws from the seed alone.

    Hypothesis also draws the constants of the modules that are loaded, so what other tests ran
    before in the same process would decide which histories are played.
    """

    def _maybe_draw_constant(self, *_args: object, **_kwargs: object) -> None:
        return None


AVAILABLE_PROVIDERS["same-everywhere"] = f"{__name__}.{SameEverywhere.__name__}"


def play(machine: type[RuleBasedStateMachine], histories: int, *, same_ones: bool) -> None:
    """So many histories; `same_ones`: the same at every run."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=histories,
            stateful_step_count=STEPS,
            backend="same-everywhere",
            deadline=None,
            database=None,
            derandomize=same_ones,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )


def play_chunk(
    machine: type[RuleBasedStateMachine], number: int, histories: int = CHUNK
) -> Counter[str]:
    """So many histories of that seed: always the same. Returns what they counted."""
    counted: Counter[str] = Counter()
    drawn = type(machine.__name__, (machine,), {"counted": counted})
    play(seed(number)(drawn), histories, same_ones=False)
    return counted


@dataclasses.dataclass(frozen=True)
class Many:
    """So many histories, beginning with those of the seed `first`, on so many processors."""

    first: int
    count: int
    jobs: int

    def seeds(self, of_each: int = 1) -> range:
        """The seeds, of each of which so many are drawn."""
        return range(self.first, self.first + -(-self.count // of_each))


@contextmanager
def side_by_side(
    play_one: Callable[[int], T], seeds: Sequence[int], jobs: int, at_once: int
) -> Iterator[Iterator[T]]:
    """What comes of each seed, in their order; each process takes `at_once` seeds at a time.

    What is left of them when the block ends is not played.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        try:
            yield pool.map(play_one, seeds, chunksize=at_once)
        finally:
            pool.shutdown(cancel_futures=True)


class OneHistory(RuleBasedStateMachine):
    """A history on a loop of its own: steps, time that passes, and what must hold after each."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.is_broken = False

    def breaches(self) -> list[str]:
        """What is wrong now."""
        raise NotImplementedError

    def after(self, pause: float, deed: Deed | None = None) -> None:
        """Do it, let time pass, and look whether all invariants hold."""

        async def passing() -> None:
            going_on = deed() if deed is not None else None
            if isinstance(going_on, Coroutine):
                await going_on
            await asyncio.sleep(pause)

        self.loop.run_until_complete(passing())
        self.require(self.breaches())

    def require(self, breaches: list[str]) -> None:
        if breaches:
            self.is_broken = True
            raise AssertionError("; ".join(breaches))


@contextmanager
def silence() -> Iterator[None]:
    """No log lines."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    try:
        yield
    finally:
        structlog.configure(**before)

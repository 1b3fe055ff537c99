"""Playing histories, and telling nothing of them: the lines would cost more than the histories."""

import asyncio
import dataclasses
import multiprocessing
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import ClassVar, TypeVar

import structlog
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.machine.sides import VirtualLoop

STEPS = 30
CHUNK = 250
"""At most so many histories are drawn from one seed."""

S = TypeVar("S")
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

    @property
    def seeds(self) -> range:
        """One seed for each history."""
        return range(self.first, self.first + self.count)


@contextmanager
def side_by_side(
    play_one: Callable[[S], T], seeds: Sequence[S], jobs: int, at_once: int = 1
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


def play_many(machine: type[RuleBasedStateMachine], many: Many) -> Counter[str]:
    """All of them, on all processors. Returns what they counted; the first breach fails."""
    sizes = [min(CHUNK, many.count - drawn) for drawn in range(0, many.count, CHUNK)]
    chunks = list(enumerate(sizes, many.first))
    counted: Counter[str] = Counter()
    with side_by_side(partial(_chunk, machine), chunks, many.jobs) as played:
        for (number, size), (found, counts) in zip(chunks, played, strict=True):
            clean = counted["histories"]
            again = f"--history-seed={number} --histories={size}"
            assert not found, f"{clean} histories were clean, then ({again}): {found}"
            counted.update(counts)
    return counted


def _chunk(
    machine: type[RuleBasedStateMachine], chunk: tuple[int, int]
) -> tuple[str, Counter[str]]:
    """What was wrong in the histories of that seed and in which of them; what they counted."""
    try:
        with silence():
            return "", play_chunk(machine, *chunk)
    except Exception as error:  # noqa: BLE001 -- what the agent raised, in a group or not
        return "".join(traceback.format_exception(error)), Counter()


class OneHistory(RuleBasedStateMachine):
    """A history on a loop of its own: steps, time that passes, and what must hold after each."""

    counted: ClassVar[Counter[str]] = Counter()

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

"""A GPU that an operator releases for work on it, and takes back."""

import datetime as dt

from agent.health.judge import released, taken_back
from agent.model import Cause, Condition
from tests.builders import NOON, a_health

LATER = NOON + dt.timedelta(minutes=5)


def test_a_gpu_that_is_released_already_is_released_since_then() -> None:
    once = released(a_health(), NOON)

    assert (Condition.UNMONITORED, Cause.RELEASED, False) == (
        *(once.condition, once.cause),
        once.serving,
    )
    assert once == released(once, LATER)


def test_a_gpu_that_was_not_released_cannot_be_taken_back() -> None:
    well = a_health()

    assert well == taken_back(well, LATER)


def test_a_gpu_that_was_well_is_not_served_before_it_answers() -> None:
    back = taken_back(released(a_health(), NOON), LATER)

    assert (LATER, Cause.DRIVER, False) == (back.since, back.cause, back.serving)

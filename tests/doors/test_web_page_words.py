"""Times and sizes in words."""

import datetime as dt

import pytest

from agent.web.page.words import age, ago, gib
from tests.builders import NOON


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5, "0 s"),
        (0, "0 s"),
        (59, "59 s"),
        (60, "1 min"),
        (3599, "59 min"),
        (3600, "1 h"),
        (3660, "1 h 1 min"),
        (9 * 3600 + 59 * 60, "9 h 59 min"),
        (10 * 3600 + 59 * 60, "10 h"),
        (86_400 * 3 + 4 * 3600, "3 d 4 h"),
        (86_400 * 30, "30 d"),
    ],
)
def test_an_age_has_one_or_two_units(seconds, words):
    assert words == age(NOON - dt.timedelta(seconds=seconds), NOON)


def test_an_age_says_its_time_in_utc():
    zone = dt.timezone(dt.timedelta(hours=2))

    found = ago(NOON.astimezone(zone), NOON + dt.timedelta(minutes=4))

    assert (
        '<time datetime="2026-09-01T12:00:00Z" title="2026-09-01 12:00:00 UTC">4 min ago</time>'
        == found
    )


def test_memory_has_one_decimal():
    assert ("0.5", "79.6") == (gib(512), gib(81_559))

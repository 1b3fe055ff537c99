"""Durations are read with a unit or as seconds, printed as they are read, and refused in words."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.cli.config import plain, table
from agent.setting import WrongValue, duration, seconds_of, written
from agent.settings.schema import BY_KEY, json_schema
from agent.settings.sources import NodeFacts, Sources
from tests.fakes.settings_files import load

KEYS = (
    "health.driverHang",
    "health.quietPeriod",
    "health.longestQuietPeriod",
    "health.probePeriod",
)
FORM = "expected a duration such as 500ms, 2s, 10m or 1h"


def loaded(path: Path, text: str = "", environ: dict[str, str] | None = None):
    file = path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    return load(Sources(file, environ or {}, {})).resolve(NodeFacts())


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("2s", 2.0),
        ("10m", 600.0),
        ("1h", 3600.0),
        ("1.5h", 5400.0),
        ("0.1s", 0.1),
        ("100ms", 0.1),
    ],
)
def test_a_duration_is_seconds(text, seconds):
    assert seconds == seconds_of(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.1, "100ms"),
        (0.0015, "0.0015s"),
        (1.0, "1s"),
        (60.0, "1m"),
        (90.0, "90s"),
        (600.0, "10m"),
        (7200.0, "2h"),
        (86400.0, "24h"),
    ],
)
def test_a_duration_is_printed_in_the_greatest_unit_that_fits(seconds, text):
    assert text == written(seconds)


@given(st.floats(0.001, 1e12) | st.integers(1, 10**9).map(float))
def test_what_is_printed_is_read_as_the_very_same_number(seconds):
    assert seconds == seconds_of(written(seconds))
    assert seconds == duration(0, math.inf)(written(seconds))


@pytest.mark.parametrize("seconds", [7.609477375418206e-06, 5e-324, 2.5e-7])
def test_what_is_less_than_a_microsecond_is_read_as_it_is_printed(seconds):
    assert seconds == seconds_of(written(seconds))


@given(st.text(max_size=12))
def test_no_text_is_read_as_something_that_is_no_bounded_number(text):
    try:
        found = duration(1, 3600)(text)
    except WrongValue:
        return
    assert isinstance(found, float)
    assert 1 <= found <= 3600


@pytest.mark.parametrize(
    "value",
    [
        *("-2s", "+2s", "2 s", " 2s", "2S", "2sec", "2d", "s", "", ".5s", "1_0s", "\u0662s"),
        *("1h30m", "1e400s", "1e400", "nan", "nans", "inf", "infs", "9" * 400 + "s"),
        *(True, None, math.nan, math.inf, [2]),
    ],
)
def test_what_is_no_duration_is_refused(value):
    with pytest.raises(WrongValue, match=FORM):
        duration(1, 3600)(value)


@pytest.mark.parametrize("value", ["999ms", "61m", "0s", 0.999, 3601, -2, "-2", "0.5", 10**20])
def test_what_is_out_of_bounds_is_refused_with_the_bounds(value):
    with pytest.raises(WrongValue, match="expected 1s to 1h"):
        duration(1, 3600)(value)


def test_all_settings_that_are_durations_say_their_unit_and_are_shown_with_it(tmp_path):
    settings = loaded(tmp_path, "health: {probePeriod: 0.5}\n")
    lines = table([settings[key] for key in KEYS], origin=False, columns=1000)

    assert ["VALUE", "1m", "10m", "2h", "500ms"] == [line.split()[1] for line in lines]
    for key in KEYS:
        assert "a number alone is seconds" in BY_KEY[key].text
    assert 0.5 == plain(settings["health.probePeriod"])["value"]
    schema = json.loads(json.dumps(json_schema()))["properties"]["health"]["properties"]
    assert ["1m", "10m", "2h", "10s"] == [schema[key.split(".")[1]]["default"] for key in KEYS]

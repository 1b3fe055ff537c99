"""Label selectors select what kubectl selects."""

import pytest

from agent.cluster import parse_selector
from agent.errors import MalformedText

LABELS = {"gpu": "h100", "zone": "a", "example.com/pool": "big", "empty": ""}


@pytest.mark.parametrize(
    "text",
    [
        "gpu",
        "gpu=h100",
        "gpu==h100",
        "gpu = h100 , zone=a",
        "gpu!=a100",
        "nothing!=x",
        "zone in (a, b)",
        "zone notin (b,c)",
        "nothing notin (b)",
        "!spot",
        "example.com/pool=big,!spot,zone in (a)",
        "empty=",
        "empty in (,x)",
    ],
)
def test_a_selector_that_holds_selects(text: str):
    assert parse_selector(text).matches(LABELS)


@pytest.mark.parametrize(
    "text",
    ["!gpu", "gpu=a100", "gpu!=h100", "zone in (b)", "zone notin (a)", "spot", "spot=", "gpu,spot"],
)
def test_a_selector_that_does_not_hold_does_not(text: str):
    assert not parse_selector(text).matches(LABELS)


@pytest.mark.parametrize(
    "text", ["", "gpu=h100,", "gpu=a b", "gpu in a", "gpu in (a b)", "=x", "gpu>3", "-a", "a in (a"]
)
def test_what_is_no_selector_is_refused(text: str):
    with pytest.raises(MalformedText):
        parse_selector(text)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("text", ["," * 200_000, "(" + "," * 1_000_000])
def test_a_great_text_is_refused_and_soon(text: str):
    with pytest.raises(MalformedText):
        parse_selector(text)

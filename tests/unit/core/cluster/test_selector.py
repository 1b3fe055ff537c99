"""Label selectors select what kubectl selects."""

import pytest

from agent.cluster import parse_selector
from agent.errors import MalformedText
from tests.unit.rows import rows_of

LABELS = {"gpu": "h100", "zone": "a", "example.com/pool": "big", "empty": ""}


def judged(text: str) -> str:
    try:
        holds = all(one.holds(LABELS) for one in parse_selector(text))
    except MalformedText:
        return "is refused"
    return "holds" if holds else "fails"


@pytest.mark.parametrize(("text", "expected"), rows_of(__file__, "selectors.txt"))
def test_a_selector_selects_where_it_holds(text: str, expected: str):
    assert expected == judged(text)


LONG = ["", "," * 200_000, "(" + "," * 1_000_000]
BEGINS = ["", "!", "k", "k=", "k!=", "k=v", "k in", "k in ()"]


@pytest.mark.timeout(10)
@pytest.mark.parametrize("text", [*LONG, *(f"{begin}{' ' * 200_000}(" for begin in BEGINS)])
def test_what_is_no_selector_is_refused_and_soon(text: str):
    assert "is refused" == judged(text)

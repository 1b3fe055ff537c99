"""Label selectors select what kubectl selects."""

import pytest

from agent.cluster import parse_selector
from agent.errors import MalformedText

LABELS = {"gpu": "h100", "zone": "a", "example.com/pool": "big", "empty": ""}


HOLD = [
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
    "empty= , gpu = h100 ",
    "empty in (,x)",
]
FAIL = ["!gpu", "gpu=a100", "gpu!=h100", "zone in (b)", "zone notin (a)", "spot", "spot="]


@pytest.mark.parametrize(
    ("text", "holds"),
    [*((text, True) for text in HOLD), *((text, False) for text in (*FAIL, "gpu,spot"))],
)
def test_a_selector_selects_where_it_holds(text: str, *, holds: bool):
    assert holds is all(one.holds(LABELS) for one in parse_selector(text))


WRONG = ["", "gpu=h100,", "gpu=a b", "gpu in a", "gpu in (a b)", "=x", "gpu>3", "-a", "a in (a"]
LONG = ["," * 200_000, "(" + "," * 1_000_000]
BEGINS = ["", "!", "k", "k=", "k!=", "k=v", "k in", "k in ()"]
SPACES = [f"{begin}{' ' * 200_000}(" for begin in BEGINS]


@pytest.mark.timeout(10)
@pytest.mark.parametrize("text", [*WRONG, *LONG, *SPACES])
def test_what_is_no_selector_is_refused_and_soon(text: str):
    with pytest.raises(MalformedText):
        parse_selector(text)

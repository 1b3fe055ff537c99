"""Kubernetes quantities."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.kube.objects import decode_quantity


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("2", 2),
        ("+3", 3),
        ("-1", -1),
        ("1k", 1000),
        ("1.5Gi", 1610612736),
        ("2.", 2),
        (".5", 1),
        ("500m", 1),
        ("1001m", 2),
        ("1e2", 100),
        ("5e-1", 1),
        ("1E2", 100),
        ("1E", 10**18),
        ("1Ei", 2**60),
    ],
)
def test_a_quantity_is_a_whole_number_rounded_up(text: str, number: int):
    assert number == decode_quantity(text)


@pytest.mark.parametrize(
    "text", ["", "abc", ".", "1ki", "1KB", "1 ", "1e", "--1", "1e999", "9" * 65]
)
def test_what_is_no_quantity_is_none(text: str):
    assert decode_quantity(text) is None


@given(st.integers(-(10**60), 10**60))
def test_every_whole_number_is_a_quantity(number: int):
    assert number == decode_quantity(str(number))


@given(st.text())
def test_any_text_is_a_number_or_none(text: str):
    assert isinstance(decode_quantity(text), int | None)

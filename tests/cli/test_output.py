"""Tables fit the terminal; what the output can show, and what is said while a command waits."""

import contextlib
import io
import os
import sys

import hypothesis.strategies as st
import pytest
from hypothesis import given

from agent.cli.output import OwnStream, Unwritten, table, terminal_width, working
from agent.errors import cut
from agent.kit.units import Column

COLUMNS = (
    Column("GPU"),
    Column("MODEL", rank=2, least=6),
    Column("SLICES", right=True),
    Column("UTIL", rank=1, right=True),
)
ROWS = (("0", "H100 80GB HBM3", "3/10", "7%"), ("10", "A100", "10/10", "100%"))


@pytest.mark.parametrize(
    ("rows", "width", "lines"),
    [
        (
            *(ROWS, 80),
            [
                "GPU  MODEL           SLICES  UTIL",
                "0    H100 80GB HBM3    3/10    7%",
                "10   A100             10/10  100%",
            ],
        ),
        (
            *(ROWS, 26),
            [
                "GPU  MODEL    SLICES  UTIL",
                "0    H100 8…    3/10    7%",
                "10   A100      10/10  100%",
            ],
        ),
        (
            *(ROWS, 20),
            ["GPU  SLICES  UTIL", "0      3/10    7%", "10    10/10  100%", "no room for MODEL: …"],
        ),
        (ROWS, 12, ["GPU  SLICES", "0      3/10", "10    10/10", "no room for…"]),
        (ROWS, 8, ["GPU  SL…", "0      …", "10    1…", "no room…"]),
        ((), 80, ["GPU  MODEL  SLICES  UTIL"]),
    ],
    ids=["room", "cut", "left out", "the next left out", "cut at the edge", "no rows"],
)
def test_a_table_cuts_what_may_be_cut_then_leaves_out_and_never_wraps(rows, width, lines):
    assert lines == list(table(COLUMNS, rows, width))


@given(st.lists(st.tuples(*[st.text(max_size=30)] * 4), max_size=5), st.integers(4, 200))
def test_no_line_is_wider_than_the_terminal(rows, width):
    assert all(len(line) <= width for line in table(COLUMNS, rows, width))


@given(st.text(), st.integers(1, 40))
def test_a_shortened_text_fits_and_one_that_fits_is_unchanged(text, width):
    short = cut(text, width)

    assert len(short) <= width
    assert short == text or len(text) > width


@pytest.mark.parametrize(
    ("is_terminal", "begun", "over"),
    [(True, "reading ...", "reading ...\r\x1b[K"), (False, "", "")],
)
def test_on_a_terminal_a_wait_is_named_and_leaves_no_trace(is_terminal, begun, over, monkeypatch):
    monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
    monkeypatch.setattr(shown, "isatty", lambda: is_terminal)
    with contextlib.suppress(ValueError), working("reading"):
        assert begun == shown.getvalue()
        int("x")

    assert over == shown.getvalue()


@pytest.mark.parametrize(
    ("given", "width"),
    [("80", 80), ("5", 20), ("", 120), ("wide", 120), ("-1", 120), ("9" * 5000, 120)],
)
def test_without_a_terminal_the_width_is_that_of_columns_if_it_is_one(given, width):
    assert width == terminal_width({"COLUMNS": given})


@pytest.mark.parametrize("is_answer", [False, True])
def test_a_pipe_that_is_full_and_never_blocks_loses_a_log_line_but_no_answer(*, is_answer):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with os.fdopen(reader, "rb"), OwnStream(writer, "wb") as stream:
        stream.is_answer = is_answer
        with pytest.raises(Unwritten) if is_answer else contextlib.nullcontext():
            for _ in range(100):
                assert 4096 == stream.write(bytes(4096))

"""Tables fit the terminal: they cut what may be cut, then leave out, and never wrap."""

import hypothesis.strategies as st
from hypothesis import given

from agent.cli.output import Column, shorten, table, wide

COLUMNS = (
    Column("GPU"),
    Column("MODEL", rank=2, flexible=True),
    Column("SLICES", right=True),
    Column("UTIL", rank=1, right=True),
)
ROWS = (("0", "H100 80GB HBM3", "3/10", "7%"), ("10", "A100", "10/10", "100%"))


def test_a_table_with_room_shows_all_of_it_aligned():
    assert [
        "GPU  MODEL           SLICES  UTIL",
        "0    H100 80GB HBM3    3/10    7%",
        "10   A100             10/10  100%",
    ] == list(table(COLUMNS, ROWS, 80))


def test_a_flexible_column_is_cut_first_and_left_out_next():
    assert "0    H100 8…    3/10    7%" == list(table(COLUMNS, ROWS, 26))[1]
    assert "GPU  SLICES  UTIL" == next(table(COLUMNS, ROWS, 20))
    assert "GPU  SLICES" == next(table(COLUMNS, ROWS, 12))


def test_what_is_never_left_out_is_cut_at_the_edge():
    assert ["GPU  SL…", "0      …", "10    1…"] == list(table(COLUMNS, ROWS, 8))


def test_a_table_without_rows_is_its_titles():
    assert ["GPU  MODEL  SLICES  UTIL"] == list(table(COLUMNS, (), 80))


@given(st.lists(st.lists(st.text(max_size=30), min_size=4, max_size=4)), st.integers(4, 200))
def test_no_line_is_wider_than_the_terminal(rows, width):
    assert all(wide(line) <= width for line in table(COLUMNS, rows, width))


@given(st.text(), st.integers(1, 40))
def test_a_shortened_text_fits_and_one_that_fits_is_unchanged(text, width):
    short = shorten(text, width)

    assert wide(short) <= width
    assert short == text or wide(text) > width

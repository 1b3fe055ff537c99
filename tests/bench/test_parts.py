"""Which parts of the bench are meant."""

import pytest

from tests.bench.__main__ import LONG, PARTS, asked


def test_without_a_word_all_parts_run_but_the_long_ones():
    assert [name for name in PARTS if name not in LONG] == asked([])


def test_a_word_is_a_part_or_the_beginning_of_several():
    assert ["starts", "idle"] == asked(["idle", "starts"])
    assert {name for name in PARTS if name.startswith("real-")} - {*LONG} == {*asked(["real"])}
    assert [*LONG] == asked([*LONG])


def test_a_word_that_means_no_part_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match="no part naps; there are floors, starts"):
        asked(["naps"])

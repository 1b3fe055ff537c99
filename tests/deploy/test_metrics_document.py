"""METRICS.md is what the code says; that it is what an agent serves, tests/process compares."""

from pathlib import Path

import pytest

from deploy import metrics
from tests.shape import tree


def test_the_document_is_what_the_code_says():
    assert metrics.document() == tree.text(metrics.DOCUMENT), "run make metrics"


def test_no_series_is_listed_twice():
    names = [one.name for one in metrics.described()]

    assert len(names) > 50
    assert len(set(names)) == len(names)


def test_a_counter_whose_text_is_no_literal_is_refused(tmp_path: Path):
    (tmp_path / "a.py").write_text('TEXT = "Things."\nTally("things_total", TEXT)\n')

    with pytest.raises(ValueError, match="malformed"):
        list(metrics.of_services(tmp_path))

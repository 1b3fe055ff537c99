import json

from tests.bench.figures import Figure, keep, percentile, table


def test_percentiles_are_nearest_ranks():
    samples = [float(number) for number in range(100, 0, -1)]

    assert [1.0, 50.0, 99.0, 100.0] == [percentile(samples, p) for p in (1, 50, 99, 100)]


def test_a_figure_is_its_median_beside_its_budget(tmp_path):
    figure = Figure("x", "a thing", "ms", [3.0, 1.0, 2.0], "here", budget=4)
    file = tmp_path / "build" / "bench.json"
    keep([figure], file)
    (kept,) = json.loads(file.read_text())["figures"]

    assert (2.0, 1.0, 3.0, 3, 0.5) == tuple(
        kept[k] for k in ("value", "min", "max", "samples", "ratio")
    )
    assert ["a thing", "2 ms", "1..3", "4 ms", "0.50"] == [
        cell.strip() for cell in list(table([figure]))[1].split("  ") if cell.strip()
    ]


def test_a_figure_without_a_budget_has_no_ratio():
    assert Figure("x", "a thing", "ms", [1.0], "here").ratio is None

import json

from tests.bench.figures import Figure, keep, percentile, table


def test_percentiles_are_nearest_ranks():
    samples = [float(number) for number in range(100, 0, -1)]

    assert [1.0, 50.0, 99.0, 100.0] == [percentile(samples, p) for p in (1, 50, 99, 100)]


def test_a_figure_is_its_median_beside_its_budget(tmp_path):
    figure = Figure("x", "a thing", "ms", [3.0, 1.0, 2.0], "here", budget=1.5, peers="9 ms")
    file = tmp_path / "build" / "bench.json"
    keep([figure], file)
    (kept,) = json.loads(file.read_text())["figures"]

    assert (2.0, 3.0, 3, 1.3333, [3.0, 1.0, 2.0]) == tuple(
        kept[name] for name in ("value", "p99", "n", "ratio", "samples")
    )
    assert ["a thing", "3", "2 ms", "3 ms", "1.5 ms **over**", "9 ms"] == cells(figure)


def test_numbers_have_three_digits_that_count():
    figure = Figure("x", "a thing", "ms", [1234.5, 0.012345, 60.0], "here", value=981_234.0)

    assert ["a thing", "3", "981,000 ms", "1,230 ms", "-", "-"] == cells(figure)


def test_a_figure_without_a_budget_has_no_ratio():
    assert Figure("x", "a thing", "ms", [1.0], "here").ratio is None


def test_what_could_not_be_measured_is_told_with_its_reason(tmp_path):
    figure = Figure("x", "a thing", "ms", [], "there is no clock", budget=4)
    keep([figure], tmp_path / "bench.json")

    assert ["a thing", "0", "not measured: there is no clock", "-", "4 ms", "-"] == cells(figure)


def test_what_other_parts_measured_before_is_kept_where_that_is_asked_for(tmp_path):
    file = tmp_path / "bench.json"
    old, other, new = (
        Figure("x", "a thing", "ms", [value], "here", part=part)
        for value, part in ((1.0, "starts"), (2.0, "rest"), (3.0, "starts"))
    )
    keep([old, other], file)
    keep([new], file, add=True)
    assert [2.0, 3.0] == [one["value"] for one in json.loads(file.read_text())["figures"]]

    keep([new], file)
    assert [3.0] == [one["value"] for one in json.loads(file.read_text())["figures"]]


def cells(figure: Figure) -> list[str]:
    head, line, row = table([figure])
    assert len({head.count("|"), line.count("|"), row.count("|")}) == 1
    return [cell.strip() for cell in row[1:-1].split("|")]

"""The figures that documents repeat are those of BENCHMARKS.md, and say where they are from."""

import re
from collections.abc import Iterator

import pytest

from tests.shape import tree
from tests.shape.typed import told

README = tree.text("README.md")
BENCHMARKS = tree.text("BENCHMARKS.md")
MEASURED = BENCHMARKS + tree.text("COMPATIBILITY.md")
UNIT = "ms|s|MB|%|writes|reads|answers"
FIGURE = re.compile(rf"(\d[\d.,]*(?: to [\d.]+)? (?:{UNIT}))(?![A-Za-z])")
SINGLE = re.compile(rf"(?:[\d.]+ to )?([\d.]+) ({UNIT})(?![A-Za-z])")
"""A figure with its unit; of a range, the worse end."""
MARK = re.compile(r"(\(\*[mkrd]\*(, once)?\)|\u2013)$")
"""A source, or the dash of what is not established."""
SECTIONS = ["hami-agent", "Try it", "Install", "What it promises", "Read on"]


def tables(text: str) -> Iterator[list[list[str]]]:
    """The rows of each table, with its head first and without the line below that."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = (line.strip()[1:-1] for line in block.splitlines())
        rows = [[cell.strip() for cell in line.split("|")] for line in lines]
        yield [rows[0], *rows[2:]]


def promises() -> list[list[str]]:
    (table,) = (rows for rows in tables(README) if rows[0][0] == "promise")
    return table[1:]


def compared() -> Iterator[list[str]]:
    """The rows of the tables that have a column for each program."""
    for rows in tables(tree.text("COMPARISON.md")):
        if "hami-agent" in rows[0][-1]:
            assert 5 == len(rows[0])
            yield from rows[1:]


def bounded() -> Iterator[list[str]]:
    """What was measured, the figure and its bound, from tables that have them."""
    for rows in tables(BENCHMARKS):
        head = rows[0]
        if "median" in head:
            places = [head.index(name) for name in ("what", "median", "budget")]
            yield from ([row[place].replace(",", "") for place in places] for row in rows[1:])
        elif len(head) == 3:
            yield from rows[1:]


def is_measured(figure: str) -> bool:
    return re.search(rf"(?<![\d.,]){re.escape(figure)}(?![A-Za-z])", MEASURED) is not None


def test_the_readme_says_what_how_to_try_how_to_install_what_is_promised_and_where_to_read_on():
    assert SECTIONS == re.findall(r"^##? (.+)$", README, re.MULTILINE)
    assert README.count("\n") <= 100


def test_two_commands_try_it_and_ten_lines_promise():
    (block,) = re.findall(r"^## Try it\n.*?^```\n(.*?)^```", README, re.MULTILINE | re.DOTALL)

    assert 2 == block.count("\n")
    assert 10 == len(promises())


def test_the_readme_leads_to_every_document_at_the_top():
    documents = {str(path) for path in tree.files() if path.suffix == ".md" and not path.parts[1:]}

    assert documents - {"README.md"} <= set(re.findall(r"\]\(([A-Z]+\.md)\)", README))


def test_what_the_readme_installs_with_is_what_the_document_of_the_chart_says():
    typed = {one for one in told("README.md") if one.startswith(("helm", "kubectl"))}

    assert 2 == len(typed)
    assert typed <= told("deploy/README.md")


@pytest.mark.parametrize("row", promises(), ids=lambda row: row[0][:30])
def test_a_figure_of_a_promise_was_measured(row: list[str]):
    figures = FIGURE.findall(" | ".join(row[1:]))

    assert figures or "0 pods" in row[1] or "exposure" in row[1]
    assert [] == [one for one in figures if not is_measured(one)]


def test_a_figure_that_was_not_measured_is_found():
    assert not is_measured("266 ms")
    assert not is_measured("35 ms")
    assert is_measured("308 ms")


def test_a_figure_beyond_its_bound_is_marked_and_no_other_one():
    judged = 0
    for what, measured, bound in bounded():
        found, most = SINGLE.match(measured), SINGLE.search(bound)
        if found and most and found[2] == most[2]:
            judged += 1
            assert (float(found[1]) > float(most[1])) == ("**over**" in bound), what

    assert judged >= 20


def test_the_readme_marks_the_figures_that_are_beyond_their_bounds():
    judged = 0
    for _, measured, bound in promises():
        found = [SINGLE.findall(text) for text in (measured, bound)]
        for value, most in zip(*found, strict=False):
            if value[1] == most[1]:
                judged += 1
                marked = f"{most[0]} {most[1]} **over**" in bound
                assert (float(value[0]) > float(most[0])) == marked, measured

    assert 7 == judged


def test_a_statement_about_another_program_says_where_it_is_from():
    rows = list(compared())

    assert len(rows) > 20
    assert [] == [cell for row in rows for cell in row[1:4] if not MARK.search(cell)]


def test_what_is_said_to_be_measured_here_was_measured():
    cells = [row[4] for row in compared() if "(*m*)" in row[4]]

    assert len(cells) > 8
    assert [] == [
        figure for cell in cells for figure in FIGURE.findall(cell) if not is_measured(figure)
    ]

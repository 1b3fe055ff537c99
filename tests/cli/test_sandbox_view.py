"""What `hami-agent sandbox` shows fits the terminal, and words come before colours."""

import io

from agent.cli.output import painter
from agent.cli.sandbox import moment_lines as painted_lines
from agent.cli.sandbox import summary_lines
from agent.sandbox.scenario.stage import NOT_REACHED, Moment, ScenarioClaim

LONG = "word " * 60


class ColourTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def moment_lines(moment, width=80, out=None):
    return painted_lines(moment, width, painter({}, out or io.StringIO()))


def test_a_short_finding_stands_on_the_line_and_a_long_one_below():
    short = Moment(1.234, "80 slices are allocatable", "80 on the Node", ok=True, claim="x")
    first, *lines = moment_lines(Moment(1, "a claim", LONG, ok=True))

    assert ["t+  1.23s  ok      80 slices are allocatable: 80 on the Node"] == [
        *moment_lines(short)
    ]
    assert "t+  1.00s  ok      a claim" == first
    assert LONG.split() == " ".join(lines).split()
    assert {" " * 19 + "word"} == {line[:23] for line in lines}


def test_no_line_is_wider_than_the_terminal():
    moments = [Moment(1, LONG, LONG, ok=False), Moment(99999, LONG), Moment(0, "x", "y" * 500)]
    claims = [ScenarioClaim("a.very.long.name.of.a.claim", LONG, ok=False, measured=LONG)]
    for width in (40, 80, 132):
        lines = [line for moment in moments for line in moment_lines(moment, width)]
        lines += summary_lines(claims, {"exec_to_registered": 0.2, "xid_to_kubelet": 2}, width)

        assert width >= max(map(len, lines))


def test_colour_is_added_to_the_word_and_only_where_it_is_wanted():
    moment = Moment(0, "a claim", "", ok=False)
    (plain,), (coloured,) = (
        list(moment_lines(moment, out=out)) for out in (io.StringIO(), ColourTerminal())
    )

    assert "FAILED" in plain
    assert plain == coloured.replace("\x1b[31m", "").replace("\x1b[0m", "")
    assert "\x1b" not in plain


def test_the_summary_counts_claims_and_names_those_that_are_not_true():
    claims = [
        ScenarioClaim("a", "a holds", ok=True, measured="1"),
        ScenarioClaim("b", "b holds", ok=False, measured="2"),
        ScenarioClaim("c", "c holds", ok=False, measured=NOT_REACHED),
    ]
    lines = list(summary_lines(claims, {"xid_to_kubelet": 0.0042, "unknown": 1}, 80))

    assert "1 of 3 claims checked and true, 1 not, 1 not checked" == lines[-1]
    assert ["b", "2"] == lines[-2].split()
    assert "XID 79 → list at the kubelet  4 ms" in lines
    assert not any(line.startswith("c ") for line in lines)

"""What `hami-agent sandbox` shows fits the terminal, and words come before colours."""

from agent.cli.sandbox import moment_lines, summary_lines
from agent.sandbox.scenario.stage import NOT_REACHED, Moment, ScenarioClaim
from tests.recorded import golden

LONG = "word " * 60
MOMENTS = (
    Moment(1.234, "80 slices are allocatable", "80 on the Node", ok=True, claim="x"),
    Moment(1, "a claim", LONG, ok=True),
    Moment(0, "a claim", "", ok=False),
    Moment(99999, LONG),
    Moment(0, "x", "y" * 500),
)
CLAIMS = (
    ScenarioClaim("a", "a holds", ok=True, measured="1"),
    ScenarioClaim("b", "b holds", ok=False, measured="2"),
    ScenarioClaim("c", "c holds", ok=False, measured=NOT_REACHED),
    ScenarioClaim("a.very.long.name.of.a.claim", LONG, ok=False, measured=LONG),
)
MEASURED = {"exec_to_registered": 0.2, "xid_to_kubelet": 0.0042, "unknown": 1}


def screens(paint=lambda text, _: text) -> str:
    """The output at three widths."""
    lines = list[str]()
    for width in (40, 80, 132):
        lines += [line for moment in MOMENTS for line in moment_lines(moment, width, paint)]
        lines += summary_lines(CLAIMS, MEASURED, width)
        assert width >= max(len(line.replace("<", "").replace(">", "")) for line in lines)
    return "".join(f"{line}\n" for line in lines)


def test_what_is_shown_is_as_it_was_and_no_wider_than_the_terminal():
    assert golden("sandbox.txt", screens()) == screens()


def test_a_colour_adds_nothing_to_the_words():
    painted = screens(lambda text, _: f"<{text}>")

    assert painted.replace("<", "").replace(">", "") == screens()
    assert "<t+  0.00s  FAILED  >a claim\n" in painted

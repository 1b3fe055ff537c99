"""The picture of a burst tells what the moments say."""

import re
from xml.etree import ElementTree as ET

from tests.bench.burst_picture import AGENT, HAMI, NODE, STARTS, WAITS, BurstRun, picture, spans

TWICE = {
    "created": 0.0,
    "filtered": [0.5, 3.0],
    "told_to_bind": [0.6, 3.1],
    "denied": [1.0],
    "locked": 4.0,
    "bound": 4.2,
    "taken_up": 4.21,
    "answered": 4.25,
    "settled": 4.26,
    "unlocked": 4.3,
    "ready": 5.0,
}


def test_an_attempt_ends_with_the_lock_of_another_pod_or_with_the_bind():
    assert [(HAMI, 0.5, 1.0), (HAMI, 3.0, 4.2)] == [one for one in spans(TWICE) if one[0] == HAMI]


def test_an_attempt_that_was_given_up_ends_with_the_next_and_a_bound_pod_has_none():
    given_up = TWICE | {"denied": [], "filtered": [0.5, 3.0, 9.0]}

    assert [(HAMI, 0.5, 3.0), (HAMI, 3.0, 4.2)] == [
        one for one in spans(given_up) if one[0] == HAMI
    ]


def test_the_other_spans_follow_each_other():
    assert [
        (WAITS, 0.0, 4.0),
        (NODE, 4.2, 4.25),
        (AGENT, 4.25, 4.3),
        (STARTS, 4.3, 5.0),
    ] == [one for one in spans(TWICE) if one[0] != HAMI]


def test_the_picture_is_svg_with_a_line_for_each_pod_and_says_how_long_a_lock_is_held():
    once = TWICE | {"filtered": [3.0], "denied": []}
    drawn = picture([BurstRun("two pods, <fast>", {"a": once, "b": TWICE})])
    texts = "\n".join(ET.fromstring(drawn).itertext())  # noqa: S314 -- our own

    assert "two pods, <fast>: all Ready after 5.0 s, 1 binds found the lock taken" in texts
    assert "agent: answered → lock gone: 50 ms" in texts
    waits = re.search(r'stroke="#d9d9d9"[^>]* d="([^"]+)"', drawn)
    assert waits is not None
    assert 2 == waits[1].count("M")

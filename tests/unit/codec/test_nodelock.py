"""The node lock against HAMi v2.10's own parser."""

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.cluster import MUTEX_LOCK, NodeView
from agent.errors import MalformedText
from agent.hami.pod import decode_node_lock, decode_stamp, encode_node_lock, encode_stamp, held_lock
from tests.builders import NODE, NOON, a_lock
from tests.hami_vectors import Vector, cases

names = st.text(alphabet="abcdefghijklmnopqrstuvwxyz0123456789.-", min_size=1, max_size=63)
moments = st.datetimes(
    min_value=dt.datetime(2, 1, 1),  # noqa: DTZ001 -- hypothesis wants naive bounds
    max_value=dt.datetime(9998, 12, 31),  # noqa: DTZ001
    timezones=st.just(dt.UTC),
)


@pytest.mark.parametrize("vector", cases("node_lock_parse"), ids=str)
def test_a_lock_is_read_or_refused_as_hami_does(vector: Vector):
    if vector.expected["error"] is not None:
        with pytest.raises(MalformedText):
            decode_node_lock(vector.given)
        return
    lock = decode_node_lock(vector.given)
    assert dt.datetime.fromisoformat(vector.expected["time"]) == lock.stamp
    assert (vector.expected["namespace"], vector.expected["name"]) == (lock.namespace, lock.name)
    assert vector.given == lock.value


def test_a_lock_names_its_owner_and_a_legacy_lock_names_none():
    assert ("team-a", "train-0") == decode_node_lock(a_lock().value).owner
    assert decode_node_lock("2026-08-21T10:00:00Z").owner is None
    assert decode_node_lock("2026-08-21T10:00:00Z,,").owner is None


@pytest.mark.parametrize("fraction", ["", ".5", ".120", ".123456789"])
def test_a_lock_is_read_with_any_fraction_and_keeps_its_text(fraction: str):
    """HAMi writes RFC3339Nano since #3127, seconds before."""
    text = f"2026-10-09T12:00:00{fraction}Z,ns,p"
    lock = decode_node_lock(text)

    assert (text, ("ns", "p")) == (lock.value, lock.owner)
    assert (12, f"{fraction[1:7]:0<6}") == (lock.stamp.hour, f"{lock.stamp.microsecond:06}")


@given(moments, names, names)
def test_decoding_what_was_encoded_gives_the_same_whole_second(stamp, namespace, name):
    lock = decode_node_lock(encode_node_lock(stamp, namespace, name))
    assert (stamp.replace(microsecond=0), (namespace, name)) == (lock.stamp, lock.owner)


def test_a_stamp_of_another_zone_is_written_in_utc():
    zone = dt.timezone(dt.timedelta(hours=8))
    assert "2026-09-01T12:00:00Z,a,b" == encode_node_lock(NOON.astimezone(zone), "a", "b")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-08-21T10:00:00.5Z", "2026-08-21T10:00:00.500000+00:00"),
        ("2026-08-21T10:00:00.123456789Z", "2026-08-21T10:00:00.123456+00:00"),
        ("2026-08-21T10:00:00-05:30", "2026-08-21T15:30:00+00:00"),
        ("2026-08-21T10:00:00+08:00", "2026-08-21T02:00:00+00:00"),
    ],
)
def test_a_stamp_is_read_with_fraction_and_offset(text: str, expected: str):
    assert dt.datetime.fromisoformat(expected) == decode_stamp(text)


@pytest.mark.parametrize(
    "text",
    [
        "2026-13-01T00:00:00Z",
        "2026-08-21T10:00:00",
        "2026-08-21T10:00:00Z\n",
        "2026-08-21T10:00:00+25:00",
        "2026-08-21T10:00:00+01:60",
        "0001-01-01T00:00:00+01:00",
        "9999-12-31T23:59:59-01:00",
        "0000-01-01T00:00:00Z",
        "\N{ARABIC-INDIC DIGIT TWO}026-08-21T10:00:00Z",
    ],
)
def test_what_is_no_moment_is_refused(text: str):
    with pytest.raises(MalformedText, match="is not an RFC 3339 time"):
        decode_stamp(text)


def a_node(annotations: dict[str, str]) -> NodeView:
    return NodeView(NODE, "uid-1", "1", annotations)


def test_a_node_holds_the_lock_that_its_annotation_says():
    assert a_lock() == held_lock(a_node({MUTEX_LOCK: a_lock().value}))


@pytest.mark.parametrize("node", [None, a_node({}), a_node({MUTEX_LOCK: "a,b,c"})])
def test_a_node_without_a_readable_lock_holds_none(node: NodeView | None):
    assert held_lock(node) is None


@given(st.text() | st.text(alphabet="0123456789-:.TZ+,", max_size=40))
def test_any_text_is_read_or_refused_and_nothing_else(text: str):
    try:
        lock = decode_node_lock(text)
    except MalformedText:
        return
    assert text == lock.value
    assert lock.stamp.replace(microsecond=0) == decode_stamp(encode_stamp(lock.stamp))

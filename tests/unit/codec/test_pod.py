"""A pod's devices text and the node lock: as HAMi v2.10's own code, and what is stricter here."""

import datetime as dt
from typing import Any

import pytest

from agent.cluster import MUTEX_LOCK, NodeView
from agent.errors import MalformedText
from agent.hami.annotations import (
    GROUP_LIMIT,
    LENGTH_LIMIT,
    consume,
    decode_node_lock,
    decode_pod_devices,
    decode_stamp,
    held_lock,
)
from agent.model import Share
from agent.sandbox.scheduler.verbs import encode_node_lock, encode_pod_devices
from tests.builders import G1, NODE, a_lock
from tests.hami_vectors import Vector, cases

PLACEHOLDER = "pod_decode-044"
KEY_ABSENT = "pod_decode-056"


def groups_of(containers: list[list[dict[str, Any]]]) -> tuple[tuple[Share, ...], ...]:
    """HAMi's PodSingleDevice in our words."""
    return tuple(
        tuple(Share(device["UUID"], device["Usedmem"], device["Usedcores"]) for device in group)
        for group in containers
    )


@pytest.mark.parametrize(
    "vector",
    cases("pod_decode", without={PLACEHOLDER: "tested below", KEY_ABSENT: "in test_objects"}),
    ids=str,
)
def test_a_text_is_read_or_refused_as_hami_does(vector: Vector):
    if vector.expected["error"] is None:
        assert groups_of(vector.expected["containers"]) == decode_pod_devices(vector.given)
    else:
        with pytest.raises(MalformedText):
            decode_pod_devices(vector.given)


@pytest.mark.parametrize("vector", cases("pod_encode"), ids=str)
def test_the_text_is_byte_for_byte_what_hami_writes(vector: Vector):
    assert vector.expected == encode_pod_devices(groups_of(vector.given or []))


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("G,NVIDIA,1", "group 1: 'G,NVIDIA,1' has 3 of 4 fields"),
        ("G,NVIDIA,1_0,5", "group 1: memory is '1_0'"),
        ("G,NVIDIA,10,\N{ARABIC-INDIC DIGIT FIVE}", "group 1: cores"),
        ("G,NVIDIA,-2147483649,5", "group 1: memory is '-2147483649', not an integer"),
        (f"G,NVIDIA,1{'0' * 5_000},5", "group 1: memory is '1000"),
        ("G,NVIDIA,,5", "group 1: memory is ''"),
        ("G,NVIDIA,5,1 ", "group 1: cores is '1'"),
        ("\x00,\ud800", "has 2 of 4 fields"),
    ],
)
def test_a_refusal_says_where_and_what(device: str, words: str):
    with pytest.raises(MalformedText) as caught:
        decode_pod_devices(f";{device}:;")
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_text_that_no_pod_needs_is_refused_unread():
    assert GROUP_LIMIT + 1 == len(decode_pod_devices(";" * GROUP_LIMIT))
    assert 1 == len(decode_pod_devices(":" * LENGTH_LIMIT))
    with pytest.raises(MalformedText, match=r"257 characters and 257 groups"):
        decode_pod_devices(";" * (GROUP_LIMIT + 1))
    with pytest.raises(MalformedText, match=r"65537 characters and 0 groups"):
        decode_pod_devices(":" * (LENGTH_LIMIT + 1))


@pytest.mark.parametrize(
    ("device", "count", "is_served"),
    [
        (f"{G1},NVIDIA,1,1", 1, True),
        (f"{G1},NVIDIA,0,0", 1, True),
        (",,0,0", 0, True),  # the placeholder of old schedulers, which HAMi takes for a GPU
        (f"{G1},NVIDIA,-5,1", 1, False),
        (f"{G1},NVIDIA,1,-1", 1, False),
        *((f"{G1},{word},1,1", 1, False) for word in ("MLU", "nvidia", "", "NVIDIA ")),
        (",NVIDIA,0,0", 1, True),
        (",,1,0", 1, False),
        (",,0,1", 1, False),
    ],
)
def test_only_our_type_with_amounts_from_0_on_is_served(device, count, *, is_served: bool):
    text = f";{device}:;"
    assert count == len(decode_pod_devices(text)[1])
    if is_served:
        assert count == len(decode_pod_devices(text, is_served=True)[1])
        return
    with pytest.raises(MalformedText, match=r"group 1: .* is served here"):
        decode_pod_devices(text, is_served=True)


def test_consuming_twice_or_beyond_the_end_changes_nothing():
    once = consume(f"{G1},NVIDIA,1,2:;junk;", {0})
    assert ";junk;" == once == consume(once, {0, 9})


# The node lock.


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-08-21T10:00:00.5Z", "2026-08-21T10:00:00.500000+00:00"),
        ("2026-08-21T10:00:00.123456789Z", "2026-08-21T10:00:00.123456+00:00"),
        ("2026-08-21T10:00:00-05:30", "2026-08-21T15:30:00+00:00"),
        ("2026-08-21T10:00:00+08:00", "2026-08-21T02:00:00+00:00"),
    ],
)
def test_a_stamp_is_read_with_fraction_and_offset_and_written_in_utc(text: str, expected: str):
    moment = dt.datetime.fromisoformat(expected)
    zone = dt.timezone(dt.timedelta(hours=8))

    assert moment == decode_stamp(text)
    assert f"{expected[:19]}Z,a,b" == encode_node_lock(moment.astimezone(zone), "a", "b")


@pytest.mark.parametrize(
    "text",
    [
        "2026-13-01T00:00:00Z",
        "2026-08-21T10:00:00",
        "2026-08-21T10:00:00Z\n",
        "2026-08-21T10:00:00+24:00",  # Go reads it; no zone has such an offset
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


@pytest.mark.parametrize("text", [None, "a,b,c", a_lock().value])
def test_a_node_holds_the_lock_that_its_annotation_says_if_it_can_be_read(text: str | None):
    node = NodeView(NODE, "uid-1", "1", {} if text is None else {MUTEX_LOCK: text})

    assert (a_lock() if text == a_lock().value else None) == held_lock(node)
    assert held_lock(None) is None

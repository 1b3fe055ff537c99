"""The handshake: which word it says, and when it was written, as HAMi's scheduler takes it."""

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import MalformedText
from agent.hami.register import Handshake, HandshakeWord, decode_handshake, encode_reported
from tests.hami_vectors import Vector, cases

ABSENT = "handshake_check-145"
MOMENT = dt.datetime(2026, 8, 21, 10, 0, 0)  # noqa: DTZ001 -- the scheduler names no zone


@pytest.mark.parametrize(
    "vector", cases("handshake_check", without={ABSENT: "an absent annotation"}), ids=str
)
def test_the_scheduler_reads_again_whatever_is_no_request_of_its_own(vector: Vector):
    found = decode_handshake(vector.given["handshake"])
    assert vector.expected["needUpdate"] is (found.word is not HandshakeWord.REQUESTING)


@pytest.mark.parametrize(
    ("number", "dated"), [("148", True), ("149", True), ("150", False), ("151", False)]
)
def test_a_request_without_a_time_never_runs_out(number: str, *, dated: bool):
    (vector,) = (v for v in cases("handshake_check") if v.id.endswith(number))
    stamp = decode_handshake(vector.given["handshake"]).stamp
    assert dated is (stamp is not None)
    if vector.given["allocatable"] == "0":
        assert dated is not vector.expected["healthy"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Requesting_2026-08-21 10:00:00", Handshake(HandshakeWord.REQUESTING, MOMENT)),
        ("Requesting_2026.08.21 10:00:00", Handshake(HandshakeWord.REQUESTING, MOMENT)),
        ("Deleted_2026-08-21 10:00:00", Handshake(HandshakeWord.DELETED, MOMENT)),
        (
            "Reported 2026-08-21 18:00:00.123456789 +0800 CST m=+12.3",
            Handshake(
                HandshakeWord.REPORTED,
                dt.datetime(
                    *(2026, 8, 21, 18, 0, 0, 123456), tzinfo=dt.timezone(dt.timedelta(hours=8))
                ),
            ),
        ),
        ("Reported anything", Handshake(HandshakeWord.REPORTED, None)),
        ("Requesting_2026-13-21 10:00:00", Handshake(HandshakeWord.REQUESTING, None)),
    ],
)
def test_each_writers_form_is_read(text: str, expected: Handshake):
    assert expected == decode_handshake(text)


@pytest.mark.parametrize("text", ["", "garbage", "reported", " Reported"])
def test_a_text_without_one_of_the_words_is_refused(text: str):
    with pytest.raises(MalformedText, match="none of Reported, Requesting, Deleted"):
        decode_handshake(text)


@given(st.text(max_size=60).map(lambda text: f"Reported {text}"))
def test_whatever_follows_the_word_is_a_time_or_none(text: str):
    assert HandshakeWord.REPORTED is decode_handshake(text).word


def test_our_stamp_has_the_form_of_the_old_plugin():
    moment = dt.datetime(2026, 8, 21, 12, 0, 0, 42, tzinfo=dt.timezone(dt.timedelta(hours=2)))

    assert "Reported 2026-08-21 10:00:00.000042 +0000 UTC" == encode_reported(moment)


@given(st.datetimes(min_value=dt.datetime(1000, 1, 1), timezones=st.just(dt.UTC)))  # noqa: DTZ001 -- the strategy adds the zone
def test_our_stamp_is_read_back(moment: dt.datetime):
    assert Handshake(HandshakeWord.REPORTED, moment) == decode_handshake(encode_reported(moment))

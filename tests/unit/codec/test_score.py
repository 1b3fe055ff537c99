"""The score annotation against HAMi's own encoder and decoder."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.cluster import TEXT_LIMIT
from agent.errors import MalformedText
from agent.hami import gojson
from agent.hami.register import decode_scores, encode_scores, same_scores
from agent.model import GpuUuid
from tests.builders import G1, G2
from tests.hami_vectors import vectors

uuids = st.text(alphabet="GPU-0123456789abcdef", min_size=1, max_size=12).map(GpuUuid)
scores = st.dictionaries(
    uuids, st.dictionaries(uuids, st.integers(0, 1860), max_size=4), max_size=4
)
TEXT = '[{"uuid":"a","score":{"b":10,"c":200}},{"uuid":"b","score":{}}]'


def test_the_text_is_byte_for_byte_what_hami_writes():
    vector = vectors("register_encode_json")["register_encode_json-185"]
    given = {GpuUuid(one["uuid"]): one["score"] for one in vector.given}

    assert vector.expected == encode_scores(given)


def test_a_valid_text_is_read_as_hamis_scheduler_reads_it():
    vector = vectors("register_decode_json")["register_decode_json-181"]

    (expected,) = (device["scores"] for device in vector.expected["devices"])
    assert {G1: expected} == decode_scores(vector.given["score"])
    assert {G2: 200} == expected


def test_a_malformed_text_for_which_hami_rejects_the_node_is_malformed_here():
    vector = vectors("register_decode_json")["register_decode_json-182"]

    assert vector.expected["error"]
    with pytest.raises(MalformedText, match="is JSON, but not an array"):
        decode_scores(vector.given["score"])


def test_null_is_no_list_of_scores_here():
    """HAMi takes it for no scores; nobody writes it."""
    vector = vectors("register_decode_json")["register_decode_json-184"]

    assert vector.expected["error"] is None
    with pytest.raises(MalformedText, match="is JSON, but not an array"):
        decode_scores(vector.given["score"])


@given(scores)
def test_what_is_written_is_read_back(found):
    assert found == decode_scores(encode_scores(found))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "GPU 0 is 1, not an object"),
        ('[{"uuid":1}]', "GPU 0, uuid is 1, not a text"),
        ('[{"uuid":"a","score":[]}]', "GPU 0, score is an array, not an object"),
        ('[{"uuid":"a","score":{"b":1.5}}]', "GPU 0, score, b is 1.5, not an integer"),
        ('[{"uuid":"a","score":{"b":NaN}}]', "is not JSON: NaN is not a JSON value"),
        ('[{"uuid":"a","score":{"b":true}}]', "GPU 0, score, b is True, not an integer"),
        (f'[{{"uuid":"a","score":{{"b":{gojson.INT64[1] + 1}}}}}]', "not an integer from"),
        (" " * (TEXT_LIMIT + 1), "is over 262144 characters"),
    ],
)
def test_a_mistake_is_told(text: str, says: str):
    with pytest.raises(MalformedText, match=says):
        decode_scores(text)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (None, None, True),
        (TEXT, None, False),
        (None, TEXT, False),
        (TEXT, '[{"score":{},"uuid":"b"}, {"uuid":"a","score":{"c":200,"b":10}}]', True),
        (TEXT, TEXT.replace("200", "300"), False),
        (TEXT, TEXT.replace('"uuid"', '"UUID"'), True),
        (TEXT, TEXT.replace("}}]", '},"SCORE":5}]'), False),
        (TEXT, "broken", False),
        ("broken", "broken", True),
    ],
)
def test_texts_are_the_same_when_a_scheduler_reads_the_same(one, other, same):
    assert same is same_scores(one, other)

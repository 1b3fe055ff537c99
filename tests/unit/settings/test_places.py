"""Files are read with the place of every value, from YAML and from JSON alike."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.errors import SettingsError
from agent.settings.files import Place, read_json, read_yaml

LEAF = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
KEY = st.from_regex(r"[a-z]{1,5}", fullmatch=True)
JSON = st.recursive(LEAF, lambda one: st.lists(one) | st.dictionaries(KEY, one), max_leaves=12)


def from_yaml(text: str) -> Place:
    document = read_yaml(text.encode(), "f.yaml")
    assert document is not None
    return document


def from_json(text: str) -> Place:
    return read_json(text.encode(), "f.json")


def test_an_empty_yaml_file_has_no_document():
    assert None is read_yaml(b"# nothing\n", "f.yaml")


def test_a_place_counts_lines_and_columns_from_one():
    (_, here, value), *_ = from_yaml("a:\n  b: 1\n").pairs()
    assert ("f.yaml:1:1", "f.yaml:2:3") == (here.where, value.where)
    (_, here, value), *_ = from_json('{\n  "a": [1]\n}').pairs()
    assert ("f.json:2:3", "f.json:2:8") == (here.where, value.where)
    assert "f.json:2:9" == value.items()[0].where


def test_keys_can_be_compared_in_any_case():
    document = from_json('{"NaMe": 1, "name": 2}')

    assert ["NaMe", "name"] == [key for key, _, _ in document.pairs()]
    with pytest.raises(SettingsError, match=r"1:13: the key `name` stands here twice"):
        list(document.pairs(str.lower))


@settings(deadline=None)
@given(JSON)
def test_json_is_read_as_json_reads_it(value: object):
    for text in (json.dumps(value), json.dumps(value, indent=2, ensure_ascii=False)):
        assert value == from_json(text).value()


def test_a_half_of_a_character_is_replaced_as_go_does():
    assert ["\ufffd"] == from_json(r'["\ud800"]').value()


@pytest.mark.parametrize("read", [read_yaml, read_json])
def test_what_is_no_text_is_refused(read):
    with pytest.raises(SettingsError, match=r"^f:2: is not UTF-8 text \(byte 6\)"):
        read(b"a:\nb: \xff", "f")


@settings(deadline=None)
@given(st.binary(max_size=80) | st.text(alphabet="{}[]\":,-&*!?|>\n a1.~'#", max_size=60))
def test_any_bytes_are_read_or_refused_and_nothing_else(content):
    content = content.encode() if isinstance(content, str) else content
    for read in (read_yaml, read_json):
        try:
            place = read(content, "f")
            _ = place and place.value()
        except SettingsError as error:
            assert str(error).startswith("f")  # noqa: PT017 -- both ways are fine

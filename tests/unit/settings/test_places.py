"""Files are read with the place of every value, from YAML and from JSON alike."""

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.errors import SettingsError
from agent.settings.files import Place, read_json, read_yaml

LEAF = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(max_codepoint=0xD7FF))
)
KEY = st.from_regex(r"[a-z]{1,5}", fullmatch=True)
JSON = st.recursive(LEAF, lambda one: st.lists(one) | st.dictionaries(KEY, one), max_leaves=12)


def from_yaml(text: str) -> Place:
    return read_yaml(text.encode(), "f.yaml")


def from_json(text: str) -> Place:
    return read_json(text.encode(), "f.json")


def test_an_empty_yaml_file_is_null():
    assert read_yaml(b"# nothing\n", "f.yaml").null


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


def plain(place: Place) -> object:
    """The whole value, part by part."""
    if isinstance(place.node, yaml.MappingNode):
        return {key: plain(value) for key, _, value in place.pairs()}
    is_list = isinstance(place.node, yaml.SequenceNode)
    return [plain(item) for item in place.items()] if is_list else place.value()


@settings(deadline=None)
@given(JSON)
def test_json_is_read_as_json_reads_it(value: object):
    for indent in (None, 2, "\t"):
        assert value == plain(from_json(json.dumps(value, indent=indent)))


@pytest.mark.parametrize("read", [read_yaml, read_json])
def test_what_is_no_text_is_refused(read):
    with pytest.raises(SettingsError, match=r"^f:2:4: is not UTF-8 text.* \(byte 6\)"):
        read(b"a:\nb: \xff", "f")


@settings(deadline=None)
@given(st.binary(max_size=80) | st.text(alphabet="{}[]\":,-&*!?|>\n a1.~'#", max_size=60))
def test_any_bytes_are_read_or_refused_and_nothing_else(content):
    content = content.encode() if isinstance(content, str) else content
    for read in (read_yaml, read_json):
        try:
            place = read(content, "f")
            place.value()
        except SettingsError as error:
            assert str(error).startswith("f")  # noqa: PT017 -- both ways are fine

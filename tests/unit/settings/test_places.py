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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": }', "1:7: not valid JSON"),
        ('{"a": 1,\n "b": NaN}', "2:7: NaN is not a JSON value"),
        ("[-Infinity]", "1:2: -Infinity is not a JSON value"),
        ("[" * 21 + "]" * 21, "1:21: nested deeper than 20 levels"),
        ("[" * 200_000, "1:21: nested deeper than 20 levels"),
        ('{"[[": ["' + "[" * 30 + '",\n' + "[" * 200_000, "2:19: nested deeper"),
        ("", " is empty"),
        ('{"a": 1}\n{}', "2:1: not valid JSON: Extra data"),
        ('{"a": 1,}', "1:9: not valid JSON: Expecting property name enclosed"),
        ('{"a": "\t"}', "1:8: not valid JSON: Invalid control character"),
        ('\ufeff{"a": 1}', "1:1: not valid JSON: Unexpected UTF-8 BOM"),
        ('{"a": 1', "1:8: not valid JSON: Expecting"),
        (f'{{"a": {"9" * 5000}}}', "1:7: a: not valid YAML: `999"),
    ],
)
def test_what_is_no_json_is_refused_with_its_place(text: str, says: str):
    with pytest.raises(SettingsError) as caught:
        _ = [value.value() for _, _, value in from_json(text).pairs()]
    assert str(caught.value).startswith(f"f.json:{says}")


@pytest.mark.parametrize("read", [read_yaml, read_json])
def test_what_is_no_text_is_refused(read):
    with pytest.raises(SettingsError, match=r"^f:2: is not UTF-8 text \(byte 6\)"):
        read(b"a:\nb: \xff", "f")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a:\n\tb: 1\n", "2:1: not valid YAML: found character that cannot start"),
        ("a:\n  b: 1\n\tc: 1\n", "3:1: not valid YAML: found a tab character"),
        ("a: 1\n---\nb: 1\n", "2:1: not valid YAML: but found another document"),
        ("a: 1\nb: x\x01y\n", "2:5: not valid YAML: unacceptable character #x0001"),
        ("a: 'x\nb: 1\n", "1:4: not valid YAML: found unexpected end of stream"),
        ("a: @b\n", "1:4: not valid YAML: found character that cannot start"),
        ("a: {b: 1\n", "2:1: not valid YAML: did not find expected ',' or '}'"),
        ("a:\n   b: 1\n  c: 1\n", "3:3: not valid YAML: did not find expected key"),
        ("a: b: c\n", "1:5: not valid YAML: mapping values are not allowed"),
        ("a: !!\n", "1:6: not valid YAML: did not find expected tag URI"),
        ("a: &x 1\nb: *x\n", "2:4: aliases are not allowed here; write the value out"),
        ("a: " + "[" * 30_000, "1:23: nested deeper than 20 levels"),
        # a scalar that its type cannot hold
        ("a: 2026-99-99", "1:4: a: not valid YAML"),
        ("a: " + "9" * 5000, "1:4: a: not valid YAML"),
        ("a: !!python/name:os.system x", "1:4: a: not valid YAML"),
        ("a: {[1]: 2}", "1:4: a: not valid YAML"),
        ("a: !!binary x", "1:4: a: not valid YAML"),
        # no mapping
        ("a: 1\na: 2", "2:1: the key `a` stands here twice"),
        ("? [a]\n: 1", "1:3: a text key is expected, not a list"),
        ("- 1", "1:1: keys and values are expected here, not a list"),
        ("!!x {}", "1:1: the tag tag:yaml.org,2002:x is unknown"),
    ],
)
def test_what_is_no_yaml_and_no_mapping_is_refused_with_its_place(text: str, says: str):
    with pytest.raises(SettingsError) as caught:
        _ = [value.value() for _, _, value in from_yaml(text).pairs()]
    assert str(caught.value).startswith(f"f.yaml:{says}")


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

"""Names that say nothing are refused, and no class name stands for two things."""

import re

import pytest

from tests.shape import tree

EMPTY = {"helper", "helpers", "misc", "util", "utils"}
CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def is_refused(name: str) -> bool:
    return not EMPTY.isdisjoint(word.lower() for word in WORD.findall(name))


def test_a_name_says_what_the_thing_is():
    for path in tree.modules("agent"):
        made = re.findall(
            r"(?:def|class|as) (\w+)|(?:self\.)?(\w+)(?:: [^=\n]+)? = ", tree.text(path)
        )

        assert [] == [one for one in (path.stem, *map("".join, made)) if is_refused(one)], path


@pytest.mark.parametrize("name", ["read_util", "MiscUtils", "_helper"])
def test_an_empty_word_is_found_in_any_spelling(name):
    assert is_refused(name)


@pytest.mark.parametrize("name", ["utilisation", "DeviceManager", "resync", "worker"])
def test_the_words_of_the_field_are_welcome(name):
    assert not is_refused(name)


def test_no_two_classes_of_the_repository_have_one_name():
    places: dict[str, list[str]] = {}
    for path in (*tree.modules("agent"), *tree.modules("tests")):
        for name in CLASS.findall(tree.text(path)):
            places.setdefault(name, []).append(str(path))

    assert {} == {name: paths for name, paths in places.items() if len(paths) > 1}

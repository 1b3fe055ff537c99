"""The repository speaks of the product alone, and works on any machine."""

import re
from pathlib import Path

import pytest

from tests.shape import tree

MACHINE = re.compile(r"(?<![\w.])/(work|root|home|opt/wheels)/|\.pyenv|C:\\\\Users")
REGISTRY = re.compile(r"pypi\.org|pythonhosted|npmjs|(docker|ghcr|quay|gcr)\.io|proxy\.golang")
MAKING = re.compile(r"(?i)\b(authored|coded|drafted) (by|with)\b|co-authored|signed-off|@author")
LATER = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
OUTSIDE = re.compile(
    r"\.\./shared|\bshared/(spec|seeds)|\bDESIGN(\.md)? ?§|\bspec/[a-z-]+\.(md|json)"
)
# Whoever makes one has to undo it: the fixture and `MonkeyPatch.context()` do so by themselves.
PATCH = re.compile(r"\bMonkeyPatch\(\)")

LOCK = Path("uv.lock")
SELF = Path("tests/shape/test_clean.py")
TEXTS = [
    path
    for path in tree.files()
    if path not in (LOCK, SELF, Path("LICENSE")) and not path.is_relative_to("tests/vectors")
]


@pytest.mark.parametrize(
    "pattern",
    [MACHINE, REGISTRY, MAKING, LATER, OUTSIDE, PATCH],
    ids=["machine paths", "registries", "the making", "loose ends", "papers", "kept patches"],
)
def test_the_repository_is_free_of(pattern):
    found = [(path, one[0]) for path in TEXTS for one in pattern.finditer(tree.text(path))]

    assert [] == found


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (MACHINE, "see /home/someone/notes"),
        (REGISTRY, "image: docker.io/library/agent"),
        (MAKING, "Drafted by a person"),
        (LATER, "# TODO later"),
        (OUTSIDE, "as in DESIGN §6"),
        (PATCH, "patch = pytest.MonkeyPatch()"),
    ],
)
def test_the_patterns_find_what_they_are_for(pattern, line):
    assert pattern.search(line)


def test_no_file_is_large():
    sizes = {path: (tree.ROOT / path).stat().st_size for path in tree.files() if path != LOCK}

    assert {} == {path: size for path, size in sizes.items() if size > 300_000}

"""Every file has a subject, and what is named as a subject or as pure is there."""

import itertools

from tests.shape import tree
from tests.shape.subjects import SUBJECTS, pure_files, subject_of

FILES = [path.relative_to("agent").as_posix() for path in tree.modules("agent")]


def test_every_file_of_the_agent_has_a_subject():
    named = [path for path in FILES if not path.endswith("__init__.py")]

    assert [] == [path for path in named if subject_of(path) is None]


def test_every_place_of_a_subject_is_there():
    for place in itertools.chain.from_iterable(SUBJECTS.values()):
        assert any(path == place or path.startswith(place) for path in FILES), place


def test_a_file_is_of_the_subject_that_names_it_most_exactly():
    assert "settings" == subject_of("app/settings.py")
    assert "run" == subject_of("app/main.py")


def test_what_is_pure_is_there():
    patterns = pure_files()

    assert "agent/errors.py" in patterns
    assert "agent/hami/*" in patterns
    for pattern in patterns:
        assert list(tree.ROOT.glob(pattern)), pattern

"""`make size` counts what it says."""

from pathlib import Path

from tests.shape.size import room_of, size_of

TEXT = '''"""A docstring
of two lines."""

import os


def f(x):
    """One line."""
    if x:
        return "a string that is used"
    return os.sep
'''


def test_a_statement_is_no_bare_string_and_a_blank_line_says_nothing(tmp_path: Path):
    path = tmp_path / "module.py"
    path.write_text(TEXT)

    size = size_of([path])

    # import, def, if and two returns; two and one lines of docstrings and three empty ones
    assert (1, 11, 5, 6) == (size.files, size.lines, size.statements, size.blank)


def test_a_room_is_a_folder_of_the_agent():
    assert "agent" == room_of(Path("agent/__main__.py"))
    assert "agent/cli" == room_of(Path("agent/cli/main.py"))
    assert "agent/health" == room_of(Path("agent/health/judge.py"))
    assert "agent/sandbox" == room_of(Path("agent/sandbox/explain/gates.py"))

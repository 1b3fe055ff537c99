"""What errors carry, and how foreign text is cut."""

import pytest

from agent.errors import RefusalReason, cap


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        (" a\n b\tc\r\n", 99, "a b c"),
        ("a\x1b[31mb\x00c", 99, "a\ufffd[31mb\ufffdc"),
        *(("abcd", 4, "abcd"), ("abcde", 4, "abc…"), ("", 4, "")),
    ],
)
def test_foreign_text_is_one_line_that_no_terminal_obeys_and_is_cut_with_a_mark(
    text: str, limit: int, expected: str
):
    assert expected == cap(text, limit)


def test_ids_of_gates_are_unique():
    """An enum makes equal values one member, under two names."""
    assert list(RefusalReason.__members__) == [gate.name for gate in RefusalReason]

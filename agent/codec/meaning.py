"""Compares two texts of an annotation by the value that a scheduler reads from them."""

from collections.abc import Callable

from agent.core.errors import MalformedText


def same(one: str | None, other: str | None, read: Callable[[str], object]) -> bool:
    """True when `read` returns equal values for both, or both are absent.

    A text that cannot be decoded (`read` raises MalformedText) equals only itself.
    """
    if one == other:
        return True
    if one is None or other is None:
        return False
    try:
        return read(one) == read(other)
    except MalformedText:
        return False

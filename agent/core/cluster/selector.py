"""Label selectors in kubectl's grammar: `gpu=h100,zone in (a, b),!spot`."""

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from agent.core.errors import MalformedText, cap

_KEY: Final = r"(?:[A-Za-z0-9][-A-Za-z0-9_.]*/)?[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?"
_VALUE: Final = r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?)?"
_SET: Final = re.compile(rf"({_KEY})\s+(in|notin)\s*\(([^()]*)\)")
_EQUAL: Final = re.compile(rf"({_KEY})\s*(==|=|!=)\s*({_VALUE})")
_THERE: Final = re.compile(rf"(!?)\s*({_KEY})")
_SIGNS: Final = re.compile("([,()])")


class Requirement(msgspec.Struct, frozen=True):
    """`key` has one of `values`; without values: `key` exists. `wanted` False negates it."""

    key: str
    values: tuple[str, ...] = ()
    wanted: bool = True

    @property
    def is_valid(self) -> bool:
        """Whether Kubernetes takes its key and its values."""
        return bool(re.fullmatch(_KEY, self.key)) and all(
            re.fullmatch(_VALUE, value) for value in self.values
        )

    def holds(self, labels: Mapping[str, str]) -> bool:
        """True when the labels meet it. An absent label has none of the values."""
        has_value = self.key in labels and (not self.values or labels[self.key] in self.values)
        return has_value is self.wanted


class Selector(msgspec.Struct, frozen=True):
    """A conjunction of requirements. Without requirements it selects everything."""

    requirements: tuple[Requirement, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """True for an object with these labels."""
        return all(requirement.holds(labels) for requirement in self.requirements)


def parse_selector(text: str) -> Selector:
    """Parse a label selector.

    Raises:
        MalformedText: a part of it has none of the forms.

    Source: kubernetes apimachinery pkg/labels/selector.go.
    """
    return Selector(tuple(_requirement(part.strip()) for part in _parts(text)))


def _parts(text: str) -> list[str]:
    """Split at the commas outside parentheses. Takes time linear in the length of the text."""
    parts: list[list[str]] = [[]]
    inside = False
    for piece in _SIGNS.split(text):
        if piece == "," and not inside:
            parts.append([])
        else:
            inside = piece == "(" or (inside and piece != ")")
            parts[-1].append(piece)
    return ["".join(part) for part in parts]


def _requirement(part: str) -> Requirement:
    if match := _SET.fullmatch(part):
        values = tuple(value.strip() for value in match[3].split(","))
        for value in values:
            if not re.fullmatch(_VALUE, value):
                raise MalformedText(f"{cap(value, 64)!r} is not a valid label value")
        return Requirement(match[1], values, match[2] == "in")
    if match := _EQUAL.fullmatch(part):
        return Requirement(match[1], (match[3],), match[2] != "!=")
    if match := _THERE.fullmatch(part):
        return Requirement(match[2], (), not match[1])
    raise MalformedText(
        f"{cap(part, 64)!r} is not a valid label selector; write key=value, key!=value, "
        "key in (a, b), key notin (a, b), key or !key"
    )

"""Label selectors, by the grammar that kubectl takes: `gpu=h100,zone in (a, b),!spot`."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Final

from agent.core.errors import MalformedText, cap

_KEY: Final = r"(?:[A-Za-z0-9][-A-Za-z0-9_.]*/)?[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?"
_VALUE: Final = r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?)?"
_SET: Final = re.compile(rf"({_KEY})\s+(in|notin)\s*\(([^()]*)\)")
_EQUAL: Final = re.compile(rf"({_KEY})\s*(==|=|!=)\s*({_VALUE})")
_THERE: Final = re.compile(rf"(!?)\s*({_KEY})")
_SIGNS: Final = re.compile("([,()])")


@dataclasses.dataclass(frozen=True, slots=True)
class Requirement:
    """`key` has one of `values`; without values: is there at all. `wanted` False: the opposite."""

    key: str
    values: tuple[str, ...] = ()
    wanted: bool = True

    def holds(self, labels: Mapping[str, str]) -> bool:
        """True when the labels keep it; a label that is absent has none of the values."""
        found = self.key in labels and (not self.values or labels[self.key] in self.values)
        return found is self.wanted


@dataclasses.dataclass(frozen=True, slots=True)
class Selector:
    """All requirements hold; none selects everything."""

    requirements: tuple[Requirement, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """True for an object with these labels."""
        return all(one.holds(labels) for one in self.requirements)


def parse_selector(text: str) -> Selector:
    """The selector that `text` says.

    Raises:
        MalformedText: a part of it follows none of the forms.

    Source: kubernetes apimachinery pkg/labels/selector.go.
    """
    return Selector(tuple(_requirement(part.strip()) for part in _parts(text)))


def _parts(text: str) -> list[str]:
    """What stands between commas, of which those of a list of values are none.

    Each character is looked at once, however long the text is.
    """
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
                raise MalformedText(f"{cap(value, 64)!r} is no value of a label")
        return Requirement(match[1], values, match[2] == "in")
    if match := _EQUAL.fullmatch(part):
        return Requirement(match[1], (match[3],), match[2] != "!=")
    if match := _THERE.fullmatch(part):
        return Requirement(match[2], (), not match[1])
    raise MalformedText(
        f"{cap(part, 64)!r} is no part of a label selector; write key=value, key!=value, "
        "key in (a, b), key notin (a, b), key or !key"
    )

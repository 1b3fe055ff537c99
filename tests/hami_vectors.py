"""HAMi v2.10's own inputs and outputs at the node, by category."""

import dataclasses
import json
import pathlib
from typing import Any

FILE = pathlib.Path(__file__).parent / "vectors" / "hami-node-vectors.json"


@dataclasses.dataclass(frozen=True)
class Vector:
    """What HAMi's code made of `given`; `expected` is its result."""

    id: str
    name: str
    given: Any
    expected: Any

    def __str__(self) -> str:
        return f"{self.id} {self.name}"


def vectors(category: str) -> dict[str, Vector]:
    """All vectors of the category by id."""
    return {
        item["id"]: Vector(item["id"], item["name"], item["input"], item["output"])
        for item in json.loads(FILE.read_text(encoding="utf-8"))["vectors"]
        if item["category"] == category
    }


def cases(category: str, *, without: dict[str, str] | None = None) -> list[Vector]:
    """The vectors of the category that hold here too.

    `without` gives the others, each with the reason; naming one that is not there is an error.
    """
    found = vectors(category)
    assert found, f"there are no vectors of {category}: their tests would pass without a look"
    for name in without or {}:
        del found[name]
    return list(found.values())

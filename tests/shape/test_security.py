"""SECURITY.md has ten promises and THREATS.md every threat, each with tests; the lock is kept.

A test that is named there exists. What is locked is held to its hash, and to the first version
without a known weakness where there was one.
"""

import re
import tomllib
from typing import Any

import pytest

from tests.hostile.lab.node import PODS
from tests.hostile.lab.siege import ATTEMPTS, FLOOR, TIMES, WORST, Round
from tests.shape import tree

PROMISE = re.compile(r"^(\d+)\. \*\*(.+?)(?=^\d+\. \*\*|^\*\*)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| (\d+) \| (.+?) \| .+? \| (.+?) \|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
FIXED = {"h2": (4, 3, 0)}
"""The first version in which CVE-2025-57804, the splitting of headers, is mended."""


def test_there_are_ten_promises_and_38_threats_and_each_has_a_test_or_a_reason():
    promises, rows = PROMISE.findall(tree.text("SECURITY.md")), ROW.findall(tree.text("THREATS.md"))

    assert [str(n) for n in range(1, 11)] == [number for number, _ in promises]
    assert [str(n) for n in range(1, 39)] == [number for number, *_ in rows]
    assert [] == [number for number, text in promises if not TEST.search(text)]
    for _, threat, cell in rows:
        # Nothing else is in a cell with tests: a misspelt one would be passed over.
        untold = TEST.sub("", cell).replace(",", "").strip()
        assert re.fullmatch(r"Not tested: .{20,}\.", cell) or (cell and not untold), threat
    for path, name in {found for row in (*rows, *promises) for found in TEST.findall(row[-1])}:
        assert name in tree.claims_of(path), path


@pytest.mark.parametrize("document", ["README.md", "GUIDE.md"])
def test_whoever_installs_is_led_to_it(document):
    assert re.search(r"\]\(SECURITY\.md\)", tree.text(document))


def test_the_promise_under_attack_is_the_bound_of_the_attack_suite():
    promised = (
        f"an Allocate takes at most {TIMES:g} times as long as before it plus {1000 * FLOOR:g} ms, "
        f"in the median of {PODS} pods in a row, and no single one more than {WORST:g} s. "
        "An attack that exceeds a bound is repeated up to twice"
    )

    assert promised in " ".join(tree.text("SECURITY.md").split())
    assert 3 == ATTEMPTS


@pytest.mark.parametrize(
    ("usual", "median", "worst", "is_slow"),
    [
        (0.020, 0.022, 0.060, False),
        (0.020, 0.049, 0.999, False),
        (0.020, 0.051, 0.060, True),
        (0.020, 0.022, 1.001, True),
        (0.600, 1.300, 1.400, True),
    ],
)
def test_a_siege_is_felt_by_its_median_or_by_one_answer(usual, median, worst, is_slow):
    assert is_slow == Round(usual, median, worst).is_slow


LOCKED: list[dict[str, Any]] = tomllib.loads(tree.text("uv.lock"))["package"]


def test_every_package_that_is_locked_is_held_to_its_hash():
    assert ["hami-agent"] == [one["name"] for one in LOCKED if "registry" not in one["source"]]
    others = [one for one in LOCKED if "registry" in one["source"]]
    files = [[*one.get("wheels", ()), *filter(None, [one.get("sdist")])] for one in others]

    assert len(files) > 50
    assert all(files)
    assert all(
        re.fullmatch("sha256:[0-9a-f]{64}", file["hash"]) for found in files for file in found
    )


@pytest.mark.parametrize("name", FIXED)
def test_no_version_with_a_known_weakness_is_locked(name):
    (version,) = [one["version"] for one in LOCKED if one["name"] == name]
    asked = re.search(rf'"{name}>=([\d.]+)', tree.text("pyproject.toml"))

    assert FIXED[name] <= numbers(version)
    assert asked
    assert FIXED[name] <= numbers(asked[1])


def numbers(version: str) -> tuple[int, ...]:
    return (*(int(part) for part in version.split(".")), 0, 0)[:3]

"""The coverage of branches by subject, for `make cover`; the pure files, of which all are covered.

`BEFORE` is what `make cover` printed last: who lowers a figure says why.
"""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

from tests.shape import tree

SUBJECTS = {
    "allocate": ("allocate/",),
    "settle": ("settle.py",),
    "reconcile": ("reconcile.py",),
    "ledger": ("ledger.py", "state.py"),
    "witness": ("witness.py",),
    "hookdirs": ("hookdirs.py",),
    "hami": ("hami/",),
    "health": ("health/",),
    "inventory": ("inventory.py", "model.py"),
    "usage": ("usage.py",),
    "gpu": ("gpu/",),
    "kube": ("kube/", "cluster.py"),
    "report": ("report.py",),
    "kubelet": ("kubelet/",),
    "settings": ("setting.py", "settings/", "app/settings.py"),
    "web": ("web/", "status.py"),
    "cli": ("cli/", "__main__.py", "node.py"),
    "kit": ("kit/", "errors.py", "ports.py"),
    "run": ("app/", "host/"),
    "sandbox": ("sandbox/",),
}
"""The subjects with their files and folders, relative to agent/. The longest that fits counts."""

BEFORE: dict[str, float] = {
    "allocate": 98.5,
    "settle": 98.0,
    "reconcile": 98.8,
    "ledger": 100.0,
    "witness": 100.0,
    "hookdirs": 96.0,
    "hami": 100.0,
    "health": 99.4,
    "inventory": 98.1,
    "usage": 98.6,
    "gpu": 95.5,
    "kube": 96.6,
    "report": 99.1,
    "kubelet": 98.1,
    "settings": 99.1,
    "web": 97.5,
    "cli": 94.7,
    "kit": 99.2,
    "run": 94.0,
    "sandbox": 94.2,
}
"""Covered branches in per cent, of the tests that are not slow."""


def subject_of(path: str) -> str | None:
    """The subject of a file of agent/, by its path from there."""
    fits = [
        (len(place), subject)
        for subject, places in SUBJECTS.items()
        for place in places
        if path == place or (place.endswith("/") and path.startswith(place))
    ]
    return max(fits)[1] if fits else None


def pure_files() -> list[str]:
    """What the contract of imports names as pure, as patterns for the report of the coverage."""
    tools: dict[str, Any] = tomllib.loads(tree.text("pyproject.toml"))["tool"]
    contracts = tools["importlinter"]["contracts"]
    (modules,) = (one["source_modules"] for one in contracts if one["id"] == "pure")
    places = [Path(module.replace(".", "/")) for module in modules]
    return [f"{place}/*" if (tree.ROOT / place).is_dir() else f"{place}.py" for place in places]


def report(measured: dict[str, Any]) -> list[str]:
    """A line for each subject, from the coverage as JSON."""
    branches = dict.fromkeys(SUBJECTS, 0)
    covered = dict.fromkeys(SUBJECTS, 0)
    for path, found in measured["files"].items():
        subject = subject_of(path.removeprefix("agent/"))
        if subject is not None:
            branches[subject] += found["summary"]["num_branches"]
            covered[subject] += found["summary"]["covered_branches"]
    lines = [f"{'subject':<12}{'branches':>9}{'missed':>9}{'covered':>11}{'before':>11}"]
    for subject, count in branches.items():
        share = 100 * covered[subject] / max(count, 1)
        missed = count - covered[subject]
        before = f"{BEFORE[subject]:.1f} %" if subject in BEFORE else "-"
        lines.append(f"{subject:<12}{count:>9,}{missed:>9,}{share:>9.1f} %{before:>11}")
    return lines


if __name__ == "__main__":
    if sys.argv[1:] == ["pure"]:
        sys.stdout.write(",".join(pure_files()) + "\n")
    else:
        content = Path(sys.argv[1]).read_text(encoding="utf-8")
        sys.stdout.write("\n".join(report(json.loads(content))) + "\n")

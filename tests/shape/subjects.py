"""The coverage of branches by subject, for `make cover`; the pure files, of which all are covered.

A subject is a room of the house that the code moves to: until then its files stand in several
layers. `BEFORE` is what `make cover` printed last: who lowers a figure says why.
"""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

from tests.shape import tree

SUBJECTS = {
    "allocate": ("core/allocation/", "core/containers/", "services/allocation/"),
    "settle": ("core/reconcile/settlement.py", "services/outbox/"),
    "reconcile": ("core/reconcile/", "services/reconcile/"),
    "ledger": ("core/state/", "services/state.py", "codec/checkpoint.py", "codec/envelope.py"),
    "witness": ("host/podresources.py", "host/kubelet_records.py", "codec/kubelet_records.py"),
    "hookdirs": ("host/hook/",),
    "hami": (
        "core/cluster/annotations.py",
        "core/usage/region.py",
        *(
            f"codec/{form}.py"
            for form in (
                *("annotation_kinds", "gojson", "handshake", "meaning", "nodelock", "pod"),
                *("region", "register", "register_colon", "score"),
            )
        ),
    ),
    "health": ("core/health/", "services/health/"),
    "inventory": ("core/inventory/", "core/node/withholding.py", "services/inventory/"),
    "usage": ("core/usage/", "services/usage/"),
    "gpu": ("host/nvml/",),
    "kube": (
        *("core/cluster/", "services/cluster/", "host/kube/"),
        *(f"codec/{form}.py" for form in ("managed", "narrow", "objects", "quantity")),
    ),
    "report": ("core/report_settings.py", "codec/node_report.py", "services/report/"),
    "kubelet": ("plugin/", "host/kubelet.py"),
    "settings": (
        *("settings/", "app/settings.py", "core/node/drained.py", "host/textfile.py"),
        *("codec/last_good.py", "codec/places.py"),
    ),
    "web": ("web/", "app/webdoor.py", "app/series.py"),
    "cli": (
        *("cli/", "__main__.py", "core/node/", "codec/cluster.py"),
        *("host/inspection.py", "host/surroundings.py"),
        *(f"codec/{form}.py" for form in ("observed_status", "status_document")),
        *(
            f"app/{verb}.py"
            for verb in (
                *("checkup", "cluster_sight", "cordoning", "explaining", "observing", "preflight"),
                "uninstalling",
            )
        ),
    ),
    "kit": ("kit/", "core/errors.py", "core/ages.py", "core/ports.py", "host/worker.py"),
    "run": ("app/", "codec/journal.py", "host/", "services/journal.py"),
    "sandbox": ("sandbox/",),
}
"""The subjects with their files and folders, relative to agent/. The longest that fits counts."""

BEFORE: dict[str, float] = {}
"""Covered branches in per cent."""


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

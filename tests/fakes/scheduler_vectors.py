"""HAMi's own answers, and pods in the form that its vectors give them."""

import json
from pathlib import Path
from typing import Any

Case = dict[str, Any]
_FILE = Path(__file__).parents[1] / "vectors" / "hami-scheduler-vectors.json"


def load_cases(category: str) -> dict[str, Case]:
    """The vectors of one category, by id."""
    return {case["id"]: case for case in load_category(category)}


def load_category(category: str) -> Any:
    """The vectors of one category, in the form that they have in the file."""
    return json.loads(_FILE.read_text())[category]


def build_pod(given: Case, name: str = "p") -> Case:
    """A pod object from a vector's short form; its UID is its name."""
    spec: Case = {
        key: [_build_container(entry) for entry in given[key] or ()]
        for key in ("initContainers", "containers")
        if key in given
    }
    spec |= {key: given[key] for key in ("schedulerName", "nodeName") if key in given}
    metadata: Case = {"name": name, "namespace": "default", "uid": name}
    metadata["annotations"] = dict(given.get("annotations", {}))
    return {"metadata": metadata, "spec": spec, "status": {"phase": "Pending"}}


def _build_container(entry: Case) -> Case:
    container: Case = {"name": entry["name"], "resources": {}}
    if "limits" in entry:
        container["resources"] = {"limits": dict(entry["limits"])}
    if entry.get("privileged"):
        container["securityContext"] = {"privileged": True}
    return container

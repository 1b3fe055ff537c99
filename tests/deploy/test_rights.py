"""The agent's account is granted what the code asks of the API server, and nothing else.

tests/cli/test_node_verbs.py has what the Job after `helm uninstall` asks.
"""

import re
from pathlib import Path

import yaml

from tests.shape import tree

ADAPTER = Path("agent/kube")
"""The only door to the API server: import-linter keeps the library out of everything else."""
COMMANDS = ADAPTER / "reader.py"
"""What commands ask with the rights of the operator who runs them."""
EVERYBODYS = {("create", "selfsubjectaccessreviews")}
"""Kubernetes grants it to whoever has a token (ClusterRole system:basic-user)."""
OPTIONAL = {("patch", "nodes/status")}
"""The chart grants it only with `report.nodeCondition` (tests/chart/test_golden.py)."""
REQUEST = re.compile(r'\bApiRequest\(\s*"(\w+)",\s*"([\w/]+)"')
AGENTS = {path: tree.text(path) for path in tree.modules("agent")}


def test_every_request_is_granted_and_every_right_is_used():
    texts = [AGENTS[path] for path in AGENTS if path.parent == ADAPTER and path != COMMANDS]
    asked = [found for text in texts for found in REQUEST.findall(text)]
    documents = yaml.safe_load_all(tree.text("deploy/manifests/rbac.yaml"))
    (role,) = [one for one in documents if one["kind"] == "ClusterRole"]
    granted = [
        (verb, name)
        for rule in role["rules"]
        for name in rule["resources"]
        for verb in rule["verbs"]
    ]

    made = [found for text in texts for found in re.findall(r"(?<!class )\bApiRequest\(", text)]
    assert len(made) == len(asked), "verb and resource are written out where a request is made"
    assert set(asked) - EVERYBODYS - OPTIONAL == set(granted)
    assert len(set(granted)) == len(granted)
    # For all objects of the kind.
    assert all({"apiGroups", "resources", "verbs"} == set(rule) for rule in role["rules"])
    assert all([""] == rule["apiGroups"] for rule in role["rules"])


def test_requests_are_made_in_one_place_only_and_only_commands_run_something_in_a_pod():
    assert {ADAPTER} == {path.parent for path, text in AGENTS.items() if "ApiRequest" in text}
    assert {COMMANDS} == {path for path, text in AGENTS.items() if ".execute(" in text}

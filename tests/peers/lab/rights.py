"""What deploy/ grants the agent's account."""

from typing import Final

import yaml

from tests.peers.lab.agents import SOURCE

OPTIONAL: Final = frozenset({"patch nodes/status"})
"""The chart grants it with `report.nodeCondition` alone."""
EVERYBODYS: Final = frozenset({"create selfsubjectaccessreviews"})
"""Kubernetes grants it to whoever has a token (ClusterRole system:basic-user)."""


def granted() -> frozenset[str]:
    """Each `verb resource` of the ClusterRole, as the audit log counts requests."""
    documents = yaml.safe_load_all((SOURCE / "deploy/manifests/rbac.yaml").read_text())
    (role,) = [one for one in documents if one["kind"] == "ClusterRole"]
    return frozenset(
        f"{verb} {resource}"
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    )

"""What deploy/ grants the agent's account."""

from typing import Final

import yaml

from tests.peers.lab.agents import SOURCE
from tests.peers.lab.audit import AuditLog, counted
from tests.peers.lab.cluster import ACCOUNT
from tests.peers.lab.identities import NODE_USER

_OPTIONAL: Final = frozenset({"patch nodes/status"})
"""The chart grants it with `report.nodeCondition` alone."""
_EVERYBODYS: Final = frozenset({"create selfsubjectaccessreviews"})
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


def asked_beyond_rights(audit: AuditLog) -> set[str]:
    """What any agent has ever asked for and the account may not. Raises OSError."""
    asked = [one for user in (NODE_USER, ACCOUNT) for one in audit.since(0, user)]
    return counted(asked).keys() - granted() - _OPTIONAL - _EVERYBODYS

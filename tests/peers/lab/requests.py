"""What the agent asks of the API server, measured against what it may ask."""

from collections import Counter
from typing import Final

import yaml

from tests.peers.lab.agents import SOURCE
from tests.peers.lab.control import NODE_USER, READS, Asked, AuditLog, counted
from tests.peers.lab.grants import WithGrants
from tests.peers.lab.part import until, until_answer
from tests.peers.lab.running import ACCOUNT

_FORBIDDEN: Final = 403
_AT_REST: Final = ("report.written", "pods.listed")
"""What an agent has done with the start that asks the API server."""


def refused(requests: list[Asked]) -> list[Asked]:
    """The requests that the user has no right to."""
    return [one for one in requests if one.code == _FORBIDDEN]


def reads(requests: list[Asked]) -> Counter[str]:
    """What was read, but for one opening of each of the two watches, which may end at any time."""
    found = counted([one for one in requests if one.verb in READS])
    return found - Counter({"watch pods": 1, "watch nodes": 1})


def writes(requests: list[Asked]) -> Counter[str]:
    """What was written."""
    return counted([one for one in requests if one.is_write])


def of_pods(count: int, *, looks: int = 1) -> Counter[str]:
    """What so many pods cost: two writes, and a look before the answer.

    There are no looks where names were generated.
    """
    each = {"get pods": looks, "patch pods/status": 1, "patch nodes": 1}
    return +Counter({what: number * count for what, number in each.items()})


# What deploy/ grants the agent's account.

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


class WithRequests(WithGrants):
    """What the agent has asked of the API server."""

    async def mark_of_rest(self) -> int:
        """A mark in the audit log behind the agent's register annotation and its list of the pods.

        A watch shows a write before the log does; what the writer has an answer to is in both.
        """
        agent = self.agent
        await until(lambda: all(map(agent.events_since_start, _AT_REST)), 30.0, agent.part.tail)
        return self.plane.audit.mark()

    async def asked_since(self, mark: int, user: str, wanted: Counter[str]) -> list[Asked]:
        """What the agent has asked since a mark, once that includes what is wanted."""
        found: list[Asked] = []

        async def is_told() -> bool:
            found[:] = self.plane.audit.since(mark, user)
            return counted(found) >= wanted

        await until_answer(is_told, 10.0, lambda: f"{wanted} is not there: {found}")
        return found

"""Writes conditions of this Node at the API server."""

from agent.core.health.news import NodeCondition
from agent.host.kube.session import ApiRequest, KubeSession, path_of

STRATEGIC_PATCH = "application/strategic-merge-patch+json"
TIME = "%Y-%m-%dT%H:%M:%SZ"


class KubeNodeStatus:
    """The status of this Node (port NodeStatusApi)."""

    def __init__(self, session: KubeSession, node: str) -> None:
        self._session = session
        self._node = node

    async def set_condition(self, condition: NodeCondition) -> None:
        """Send one strategic merge patch, which merges conditions by their type."""
        since = condition.since.strftime(TIME)
        entry = {
            "type": condition.kind,
            "status": str(condition.status),
            "reason": condition.reason,
            "message": condition.message,
            "lastHeartbeatTime": since,
            "lastTransitionTime": since,
        }
        path = path_of("nodes", self._node, "status")
        await self._session.call(
            ApiRequest(
                "PATCH",
                "patch",
                "nodes/status",
                path,
                body={"status": {"conditions": [entry]}},
                content_type=STRATEGIC_PATCH,
            )
        )

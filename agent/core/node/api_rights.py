"""The permissions that the agent needs at the API server."""

import msgspec


class Right(msgspec.Struct, frozen=True):
    """One permission: a verb on a resource. `name`: the object; empty: any object."""

    verb: str
    resource: str
    name: str = ""
    namespace: str = ""
    selector: str = ""
    """The field selector of the request."""

    @property
    def words(self) -> str:
        """Verb and resource, as in a ClusterRole."""
        return f"{self.verb} {self.resource}"

    @property
    def reads(self) -> bool:
        """Whether the verb only reads."""
        return self.verb in {"get", "list", "watch"}


def rights(node: str, *, node_condition: bool = False) -> tuple[Right, ...]:
    """The permissions that the agent on `node` needs, except the GET of a pod (`right_to_get`).

    `node_condition`: the agent writes the Node condition GpuDegraded.
    """
    condition = (Right("patch", "nodes/status", name=node),) if node_condition else ()
    return (
        Right("get", "nodes", name=node),
        Right("watch", "nodes", name=node),
        Right("patch", "nodes", name=node),
        Right("list", "pods", selector=f"spec.nodeName={node}"),
        Right("watch", "pods", selector=f"spec.nodeName={node}"),
        Right("patch", "pods/status"),
        Right("create", "events"),
        Right("patch", "events"),
        *condition,
    )


def right_to_get(pod: tuple[str, str]) -> Right:
    """The permission to GET a pod (namespace, name) of this node.

    It needs the name, because a node's own identity may read only the pods of its node.
    """
    return Right("get", "pods", namespace=pod[0], name=pod[1])

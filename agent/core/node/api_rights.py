"""What the agent asks of the API server, right by right."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Right:
    """One thing that the agent asks of the API server. `name`: of one object, or of any."""

    verb: str
    resource: str
    name: str = ""
    namespace: str = ""
    selector: str = ""
    """The field selector that goes with it."""

    @property
    def words(self) -> str:
        """As a ClusterRole says it: verb and resource."""
        return f"{self.verb} {self.resource}"

    @property
    def reads(self) -> bool:
        """Whether it changes nothing."""
        return self.verb in {"get", "list", "watch"}


def rights(node: str, *, node_condition: bool = False) -> tuple[Right, ...]:
    """All that the agent asks of the API server, on the node `node`, but for the GET of a pod.

    That one a node's own identity may do for the pods of its node alone, so it needs a pod's name.
    `node_condition`: it keeps the Node's condition GpuDegraded.
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
    """The GET of a pod of this node, by namespace and name."""
    return Right("get", "pods", namespace=pod[0], name=pod[1])

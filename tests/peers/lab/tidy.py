"""The node as a test found it."""

from typing import Final

from agent import cluster as annotations
from tests.peers.lab.api import Object, RefusedError
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.identities import NODE
from tests.peers.lab.waiting import until_answer

NODE_PATH: Final = f"/api/v1/nodes/{NODE}"
_NOTED: Final = annotations.PREFIX
"""What HAMi's annotations begin with: its scheduler notes more than one vendor."""


async def remove(cluster: Cluster, path: str, grace: int | None = None) -> None:
    """Delete an object that may be gone, and leave a controller's pods to whoever tidies up."""
    try:
        await cluster.api.delete(path, grace=grace)
    except RefusedError as error:
        if error.code != 404:
            raise


async def remove_pods(cluster: Cluster) -> None:
    """Delete every pod, wait until the kubelet has forgotten all, and free the Node.

    Raises:
        TimeoutError: some stay.
    """
    # The watch may not have shown the newest yet.
    for pod in (await cluster.api.get("/api/v1/pods"))["items"]:
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        await remove(cluster, f"/api/v1/namespaces/{namespace}/pods/{name}", grace=0)
    await until_answer(lambda: _has_none(cluster), 30.0, lambda: "pods stay")
    await cluster.pods.until(lambda: not cluster.pods.objects, 30.0, "the watch shows pods")
    node = await cluster.api.get(NODE_PATH)
    notes = node["metadata"].get("annotations") or {}
    noted = dict.fromkeys(name for name in notes if name.startswith(_NOTED))
    if noted:
        node = await cluster.api.patch(NODE_PATH, {"metadata": {"annotations": noted}})
    # Not until nothing is noted: HAMi's scheduler asks for a handshake as soon as it sees none.
    await cluster.nodes.until(
        lambda: _version(cluster.nodes.objects[NODE]) >= _version(node),
        30.0,
        "the watch does not show the Node without notes",
    )


def _version(node: Object) -> int:
    return int(node["metadata"]["resourceVersion"])


async def _has_none(cluster: Cluster) -> bool:
    return not (await cluster.api.get("/api/v1/pods"))["items"]

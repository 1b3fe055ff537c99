"""The node as a test found it."""

from typing import Final

from agent.core import annotations
from tests.peers.lab.api import RefusedError
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.identities import NODE

NODE_PATH: Final = f"/api/v1/nodes/{NODE}"
_NOTED: Final = (annotations.MUTEX_LOCK, annotations.REGISTER, annotations.HANDSHAKE)


async def remove_pods(cluster: Cluster) -> None:
    """Delete every pod, wait until the kubelet has forgotten all, and free the Node.

    Raises:
        TimeoutError: some stay.
    """
    for key in list(cluster.pods.objects):
        namespace, _, name = key.partition("/")
        try:
            await cluster.api.delete(f"/api/v1/namespaces/{namespace}/pods/{name}", grace=0)
        except RefusedError as error:
            if error.code != 404:
                raise
    await cluster.pods.until(lambda: not cluster.pods.objects, 30.0, "pods stay")
    noted = dict.fromkeys(_NOTED)
    await cluster.api.patch(NODE_PATH, {"metadata": {"annotations": noted}})

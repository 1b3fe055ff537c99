"""What the agent has on disk, beside what the kubelet holds and what runs."""

from collections.abc import Mapping
from typing import Final

from agent.ledger import Row
from agent.state import decode_state
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.api import Object
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.grants import SeenGrant, grants
from tests.peers.lab.pods import lives

Container = tuple[str, str]
"""A pod's `namespace/name` and a container's name."""

ONLY_KUBELET: Final = "only the kubelet has it"
ONLY_LEDGER: Final = "only the ledger has it"


def rows(cluster: Cluster) -> dict[Container, Row]:
    """The rows of the ledger as they are on disk; of two pods of one name the later one's."""
    content = (cluster.space.view / "var/lib/hami-agent/state.json").read_bytes()
    return {
        (f"{row.namespace}/{row.pod}", row.key.container): row
        for row in decode_state(content).ledger.rows
    }


def lost(cluster: Cluster) -> list[str]:
    """What runs with GPUs and is not in the ledger as it was promised, or has no directory."""
    ledger = rows(cluster)
    return [
        words
        for key, pod in cluster.pods.objects.items()
        for container in lives(pod)
        if (words := _loss(cluster, pod, container, ledger.get((key, container))))
    ]


def _loss(cluster: Cluster, pod: Object, container: str, row: Row | None) -> str:
    name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
    if row is None or row.key.pod_uid != uid:
        return f"{name}: container {container} runs and has no row"
    booked = [SeenGrant(one.uuid, one.memory_mib, one.core_percent) for one in row.shares]
    if sorted(booked, key=str) != sorted(grants(pod)[container], key=str):
        return f"{name}: container {container} has {row.shares} in the ledger"
    if not (cluster.hook / "containers" / f"{uid}_{container}").is_dir():
        return f"{name}: container {container} runs and has no directory"
    return ""


async def disagreement(cluster: Cluster) -> Mapping[Container, str]:
    """Where the ledger and the kubelet differ; nothing: they agree."""
    held = await cluster.kubelet.held(RESOURCE)
    ledger = rows(cluster)
    found: dict[Container, str] = {}
    for container in held.keys() | ledger.keys():
        row, ids = ledger.get(container), held.get(container)
        if row is None or ids is None:
            found[container] = ONLY_KUBELET if row is None else ONLY_LEDGER
        elif frozenset(row.slice_ids) != ids or not row.confirmed:
            found[container] = f"confirmed {row.confirmed}, ids {row.slice_ids}, kubelet {ids}"
    return found

"""Placing a pod by hand, step by step, as HAMi's scheduler does: for tests that need the gaps."""

import datetime as dt
from collections.abc import Sequence
from typing import Final

from agent import cluster as annotations
from agent.hami.pod import encode_node_lock
from agent.model import Share
from agent.sandbox.scheduler.verbs import placement_patch
from tests.peers.lab.api import Object
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.identities import NODE
from tests.peers.lab.node_state import gpu_uuids
from tests.peers.lab.pods import PODS
from tests.peers.lab.tidy import NODE_PATH
from tests.peers.lab.workloads import NAMESPACE

MIB: Final = 3000
"""What a share has where nothing is said, as `a_container` asks for."""

_BY_HAND: Final = "by-hand"


def now() -> dt.datetime:
    """Wall time, as stamps need it."""
    return dt.datetime.now(dt.UTC)  # noqa: TID251 -- what is written is read by others


async def create_by_hand(cluster: Cluster, pod: Object) -> Object:
    """Create a pod that no scheduler takes; with its node already named it is the kubelet's."""
    if "nodeName" in pod["spec"]:
        return await cluster.api.create(PODS, pod)
    labels = {**pod["metadata"].get("labels", {}), "hami.io/webhook": "ignore"}
    metadata = {**pod["metadata"], "labels": labels}
    spec = {**pod["spec"], "schedulerName": _BY_HAND}
    return await cluster.api.create(PODS, {**pod, "metadata": metadata, "spec": spec})


def share(cluster: Cluster, index: int, memory: int = MIB, cores: int = 10) -> Share:
    """A share of the GPU with this index: MiB, and percent of its cores."""
    return Share(gpu_uuids(cluster)[index], memory, cores)


async def annotate(cluster: Cluster, name: str, groups: Sequence[Sequence[Share]]) -> None:
    """What the filter writes: which GPUs each container gets."""
    shares = tuple(tuple(group) for group in groups)
    patch = placement_patch(NODE, shares, int(now().timestamp()))
    await cluster.api.patch(f"{PODS}/{name}", patch)


async def lock(cluster: Cluster, name: str, *, age: float = 0.0) -> None:
    """Take the node's lock in the name of a pod, `age` seconds ago. Whoever had it loses it."""
    text = encode_node_lock(now() - dt.timedelta(seconds=age), NAMESPACE, name)
    marks = {annotations.MUTEX_LOCK: text}
    await cluster.api.patch(NODE_PATH, {"metadata": {"annotations": marks}})


async def bind(cluster: Cluster, name: str) -> None:
    """Mark the pod as allocating and bind it to the node; the kubelet admits it then."""
    marks = {
        annotations.BIND_PHASE: annotations.PHASE_ALLOCATING,
        annotations.BIND_TIME: str(int(now().timestamp())),
    }
    await cluster.api.patch(f"{PODS}/{name}", {"metadata": {"annotations": marks}})
    target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
    await cluster.api.create(f"{PODS}/{name}/binding", body)


async def place(cluster: Cluster, pod: Object, groups: Sequence[Sequence[Share]]) -> None:
    """All steps for one pod: create, annotate, lock, bind."""
    name = pod["metadata"]["name"]
    await create_by_hand(cluster, pod)
    await annotate(cluster, name, groups)
    await lock(cluster, name)
    await bind(cluster, name)

"""Placing a pod by hand, step by step, as HAMi's scheduler does: for tests that need the gaps."""

import datetime as dt
from collections.abc import Sequence
from typing import Final

from agent.codec.nodelock import encode_node_lock
from agent.codec.register import decode_register
from agent.core import annotations
from agent.core.gpu import GpuUuid
from agent.core.share import Share
from agent.sandbox.scheduler.bind import placement_patch
from tests.peers.lab.api import Object
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.identities import NODE
from tests.peers.lab.tidy import NODE_PATH
from tests.peers.lab.workloads import NAMESPACE

PODS: Final = f"/api/v1/namespaces/{NAMESPACE}/pods"
_BY_HAND: Final = "by-hand"


def now() -> dt.datetime:
    """Wall time, as stamps need it."""
    return dt.datetime.now(dt.UTC)  # noqa: TID251 -- what is written is read by others


async def create(cluster: Cluster, pod: Object) -> Object:
    """Create a pod that no scheduler takes; with its node already named it is the kubelet's."""
    if "nodeName" in pod["spec"]:
        return await cluster.api.create(PODS, pod)
    labels = {**pod["metadata"].get("labels", {}), "hami.io/webhook": "ignore"}
    metadata = {**pod["metadata"], "labels": labels}
    spec = {**pod["spec"], "schedulerName": _BY_HAND}
    return await cluster.api.create(PODS, {**pod, "metadata": metadata, "spec": spec})


def gpu_uuids(cluster: Cluster) -> list[GpuUuid]:
    """The GPUs of the Node by index, as the register annotation names them."""
    text = cluster.nodes.objects[NODE]["metadata"]["annotations"][annotations.REGISTER]
    return [gpu.uuid for gpu in decode_register(text)]


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
    await create(cluster, pod)
    await annotate(cluster, name, groups)
    await lock(cluster, name)
    await bind(cluster, name)


def lock_text(cluster: Cluster) -> str | None:
    """The node's lock as it is now."""
    noted = cluster.nodes.objects[NODE]["metadata"].get("annotations") or {}
    text: str | None = noted.get(annotations.MUTEX_LOCK)
    return text

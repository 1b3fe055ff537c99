"""Decodes what `explain` reads of a cluster; each object is cut to what a decision uses.

A field of another shape counts as absent: one malformed object must not hide the others.
"""

import datetime as dt
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from agent.codec.managed import entries
from agent.codec.narrow import Raw, inside, objects_in, read_object, read_pod
from agent.codec.nodelock import decode_stamp
from agent.codec.quantity import decode_quantity
from agent.core.cluster import annotations
from agent.core.cluster.snapshot import (
    AgentPod,
    ClusterNode,
    GpuHolder,
    JsonObject,
    PodEventView,
    RefusedPod,
    Taint,
)
from agent.core.errors import MalformedText

REFUSED: Final = "UnexpectedAdmissionError"
"""The reason of a pod that the kubelet failed because of its devices."""
SLICES: Final = "nvidia.com/gpu"
_NOTED: Final = (
    annotations.REGISTER,
    annotations.SCORE,
    annotations.HANDSHAKE,
    annotations.MUTEX_LOCK,
    annotations.CORDON,
)
_REPORT: Final = frozenset({annotations.REGISTER, annotations.CORDON, annotations.HANDSHAKE})
"""A removed cordon leaves no trace, but the scheduler writes the handshake when it reads on."""


def decode_target(body: Raw) -> JsonObject:
    """Decode the pod to explain: a whole object with metadata, spec and status.

    Raises:
        MalformedText: it is not an object.
    """
    pod = read_object(body)
    parts = ("metadata", "spec", "status")
    metadata, spec, status = (dict(inside(pod, part)) for part in parts)
    for part in ("annotations", "labels"):
        texts = inside(metadata, part)
        metadata[part] = {key: text for key, text in texts.items() if isinstance(text, str)}
    return {"metadata": metadata, "spec": spec, "status": status}


def decode_cluster_node(body: Raw, labels: frozenset[str]) -> ClusterNode:
    """Decode a Node; of its labels only those with these names are kept.

    Raises:
        MalformedText: it is not an object.
    """
    node = read_object(body)
    metadata, spec, status = (inside(node, part) for part in ("metadata", "spec", "status"))
    noted, labelled = inside(metadata, "annotations"), inside(metadata, "labels")
    ready = [entry for entry in objects_in(status, "conditions") if entry.get("type") == "Ready"]
    return ClusterNode(
        name=_text(metadata, "name"),
        annotations={key: _text(noted, key) for key in _NOTED if key in noted},
        labels={key: _text(labelled, key) for key in labels if key in labelled},
        taints=tuple(
            Taint(_text(taint, "key"), _text(taint, "value"), _text(taint, "effect"))
            for taint in objects_in(spec, "taints")
        ),
        is_closed=spec.get("unschedulable") is True,
        is_ready=not ready or ready[0].get("status") == "True",
        slices=decode_quantity(_text(inside(status, "allocatable"), SLICES)) or 0,
        reported=_reported(metadata),
    )


def decode_holder(body: Raw) -> GpuHolder | None:
    """Decode a pod; None if HAMi's scheduler has chosen no GPUs for it.

    Raises:
        MalformedText: it is not an object.
    """
    pod = read_pod(body)
    metadata, spec, status = (inside(pod, part) for part in ("metadata", "spec", "status"))
    noted = inside(metadata, "annotations")
    if annotations.VGPU_NODE not in noted:
        return None
    ended = [
        inside(inside(one, "state"), "terminated")
        for one in objects_in(status, "initContainerStatuses")
    ]
    return GpuHolder(
        uid=_text(metadata, "uid"),
        namespace=_text(metadata, "namespace"),
        name=_text(metadata, "name"),
        node=_text(noted, annotations.VGPU_NODE),
        shares=_text(noted, annotations.ALLOCATED),
        phase=_text(status, "phase"),
        inits=len(objects_in(spec, "initContainers")),
        has_passed_init=bool(ended) and all(end.get("exitCode") == 0 for end in ended),
        is_deleted=bool(metadata.get("deletionTimestamp")),
    )


def decode_quota(body: Raw) -> JsonObject:
    """Decode a ResourceQuota: its names and limits. Raises MalformedText: not an object."""
    quota = read_object(body)
    metadata = inside(quota, "metadata")
    hard = {
        key: value
        for key, value in inside(inside(quota, "spec"), "hard").items()
        if isinstance(value, str | int)
    }
    names: dict[str, Any] = {key: _text(metadata, key) for key in ("namespace", "name")}
    return {"metadata": names, "spec": {"hard": hard}}


def decode_pod_event(body: Raw) -> PodEventView:
    """Decode an Event. Raises MalformedText: it is not an object."""
    event = read_object(body)
    series = inside(event, "series")
    count = series.get("count") or event.get("count") or 1
    stamps = (
        _text(series, "lastObservedTime"),
        _text(event, "lastTimestamp"),
        _text(event, "eventTime"),
        _text(inside(event, "metadata"), "creationTimestamp"),
    )
    return PodEventView(
        kind=_text(event, "type"),
        reason=_text(event, "reason"),
        message=_text(event, "message"),
        writer=_text(inside(event, "source"), "component") or _text(event, "reportingComponent"),
        last=next((stamp for text in stamps if (stamp := decode_moment(text))), None),
        count=count if isinstance(count, int) else 1,
    )


def is_device_plugin(pod: Mapping[str, object]) -> bool:
    """Whether the pod mounts the kubelet's plugin directory of its host.

    Labels and owners are the words of a pod's author. A pod that may mount that directory may
    replace the device plugin of its node anyway.
    """
    volumes = objects_in(inside(pod, "spec"), "volumes")
    paths = (_text(inside(volume, "hostPath"), "path") for volume in volumes)
    return any(PurePosixPath(path).name == "device-plugins" for path in paths)


def decode_agent(body: Raw) -> AgentPod | None:
    """Decode a pod with the agent's label; None if it is no device plugin.

    Raises MalformedText: it is not an object.
    """
    pod = read_object(body)
    if not is_device_plugin(pod):
        return None
    metadata, spec, status = (inside(pod, part) for part in ("metadata", "spec", "status"))
    waits = (
        _text(inside(inside(one, "state"), "waiting"), "reason")
        for key in ("initContainerStatuses", "containerStatuses")
        for one in objects_in(status, key)
    )
    is_ready = any(
        entry.get("type") == "Ready" and entry.get("status") == "True"
        for entry in objects_in(status, "conditions")
    )
    phase = _text(status, "phase")
    not_ready = "Running, not ready" if phase == "Running" else phase
    return AgentPod(
        node=_text(spec, "nodeName"),
        name=f"{_text(metadata, 'namespace')}/{_text(metadata, 'name')}",
        state="Ready" if is_ready else next(filter(None, waits), not_ready),
    )


def decode_refused(body: Raw) -> RefusedPod | None:
    """Decode a pod; None if the kubelet did not refuse it for want of devices.

    Raises:
        MalformedText: it is not an object.
    """
    pod = read_pod(body)
    metadata, spec, status = (inside(pod, part) for part in ("metadata", "spec", "status"))
    if _text(status, "reason") != REFUSED:
        return None
    started = decode_moment(status.get("startTime"))
    return RefusedPod(
        namespace=_text(metadata, "namespace"),
        name=_text(metadata, "name"),
        node=_text(spec, "nodeName"),
        message=_text(status, "message"),
        at=started or decode_moment(metadata.get("creationTimestamp")),
    )


def decode_name(body: Raw) -> tuple[str, str]:
    """Namespace and name of an object. Raises MalformedText: it is not an object."""
    metadata = inside(read_pod(body), "metadata")
    return _text(metadata, "namespace"), _text(metadata, "name")


def decode_moment(text: object) -> dt.datetime | None:
    """A time of the API server; None for any other value."""
    try:
        return decode_stamp(text) if isinstance(text, str) and text else None
    except MalformedText:
        return None


def _reported(metadata: Mapping[str, object]) -> dt.datetime | None:
    stamps = (
        decode_moment(entry.time)
        for entry in entries(metadata)
        if not _REPORT.isdisjoint(entry.annotations)
    )
    return max((stamp for stamp in stamps if stamp is not None), default=None)


def _text(parent: Mapping[str, object], key: str) -> str:
    value = parent.get(key)
    return value if isinstance(value, str) else ""

"""Makes the status of a pod as the kubelet writes it."""

import hashlib
from collections.abc import Mapping
from typing import Final

from agent.sandbox.api_errors import Json
from agent.sandbox.kubelet.node import NodePod
from agent.sandbox.kubelet.pods import ContainerSpec

Health = Mapping[str, Mapping[str, bool]]
"""Resource → id → healthy."""

_OWNED: Final = frozenset({"reason", "message", "containerStatuses", "initContainerStatuses"})
_HEALTH_WORDS: Final = {True: "Healthy", False: "Unhealthy"}


def running_status(pod: NodePod, health: Mapping[str, Health], now: str) -> Json:
    """The status of an admitted pod; `health` is by container name."""
    containers = pod.spec.containers
    apps = [c for c in containers if c.kind == "app"]
    started = [c for c in apps if pod.starts.get(c.name)]
    status: Json = {
        "phase": "Running" if started else "Pending",
        "startTime": now,
        "conditions": _conditions(pod, is_ready=all(c.name in pod.running for c in apps)),
        "containerStatuses": [_container(pod, c, health.get(c.name, {}), now) for c in apps],
    }
    inits = [c for c in containers if c.kind != "app"]
    if inits:
        status["initContainerStatuses"] = [_container(pod, c, {}, now) for c in inits]
    return status


def ended_status(pod: NodePod, now: str) -> Json:
    """The status of a pod whose containers have all ended with exit code 0."""
    done = {"exitCode": 0, "reason": "Completed", "finishedAt": now}
    return {
        "phase": "Succeeded",
        "conditions": _conditions(pod, is_ready=False),
        "containerStatuses": [
            _identity(pod, c) | {"ready": False, "started": False, "state": {"terminated": done}}
            for c in pod.spec.containers
            if c.kind == "app"
        ],
    }


def rejected_status(reason: str, message: str, now: str) -> Json:
    """The status of a pod that the kubelet rejected."""
    return {"phase": "Failed", "reason": reason, "message": message, "startTime": now}


def merged(old: Json, new: Json) -> Json:
    """`new` merged into `old`: fields of other writers and transition times stay.

    The kubelet tells PodScheduled of each pod that it has admitted, whoever bound it; of a rejected
    pod it removes the condition.
    """
    kept = {key: value for key, value in old.items() if key not in _OWNED}
    whole = kept | new
    whole |= {"startTime": old["startTime"]} if "startTime" in old else {}
    held = {(c["type"], c["status"]): c for c in old.get("conditions") or ()}
    whole["conditions"] = [
        held.get((told["type"], told["status"]), told) for told in new.get("conditions") or ()
    ]
    for key in ("containerStatuses", "initContainerStatuses"):
        before = {entry["name"]: entry for entry in old.get(key) or ()}
        for entry in whole.get(key) or ():
            _keep_times(before.get(entry["name"], {}), entry)
    return whole


def _keep_times(before: Json, entry: Json) -> None:
    if before.get("containerID") != entry.get("containerID"):
        return
    for name, state in entry["state"].items():
        known = (before.get("state") or {}).get(name)
        if known is not None:
            state.update({key: known[key] for key in ("startedAt", "finishedAt") if key in known})


def _container(pod: NodePod, container: ContainerSpec, health: Health, now: str) -> Json:
    is_up = container.name in pod.running
    status = _identity(pod, container) | {
        "ready": is_up,
        "started": is_up,
        "state": _state(pod, container, now),
    }
    if health:
        status["allocatedResourcesStatus"] = [
            {
                "name": resource,
                "resources": [
                    {"resourceID": device_id, "health": _HEALTH_WORDS[ids[device_id]]}
                    for device_id in sorted(ids)
                ],
            }
            for resource, ids in sorted(health.items())
        ]
    return status


def _identity(pod: NodePod, container: ContainerSpec) -> Json:
    starts = pod.starts.get(container.name, 0)
    identity: Json = {"name": container.name, "restartCount": max(0, starts - 1)}
    if starts:
        text = f"{pod.spec.uid}/{container.name}/{starts}"
        identity["containerID"] = f"containerd://{hashlib.sha256(text.encode()).hexdigest()}"
    return identity


def _state(pod: NodePod, container: ContainerSpec, now: str) -> Json:
    name = container.name
    if name in pod.waiting:
        refusal = {"reason": "CreateContainerConfigError", "message": pod.waiting[name]}
        return {"waiting": refusal}
    if name in pod.running:
        return {"running": {"startedAt": now}}
    if pod.starts.get(name):
        exit_code = 0 if container.kind == "init" else 137
        reason = "Completed" if container.kind == "init" else "Error"
        return {"terminated": {"exitCode": exit_code, "reason": reason, "finishedAt": now}}
    early = container.kind == "app" and not pod.is_initialised
    return {"waiting": {"reason": "PodInitializing" if early else "ContainerCreating"}}


def _conditions(pod: NodePod, *, is_ready: bool) -> list[Json]:
    initialised = "True" if pod.is_initialised else "False"
    ready = "True" if is_ready else "False"
    return [
        {"type": "PodScheduled", "status": "True"},
        {"type": "Initialized", "status": initialised},
        {"type": "ContainersReady", "status": ready},
        {"type": "Ready", "status": ready},
    ]

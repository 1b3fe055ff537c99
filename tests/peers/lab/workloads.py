"""Pods to try things with: what they ask for, and what they tell of their inside."""

from pathlib import Path
from typing import Any, Final

from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.api import Object
from tests.peers.lab.identities import NODE
from tests.peers.lab.placing import HAMI_SCHEDULER
from tests.peers.lab.runtime import BUSYBOX

NAMESPACE: Final = "default"
_SLEEP: Final = "trap 'exit 0' TERM; while :; do sleep 3600 & wait; done"
_TELL: Final = (
    "env >/tell/{0}.env; cat /proc/self/mountinfo >/tell/{0}.mounts; touch /tell/{0}.done"
)


def a_container(
    name: str = "main",
    *,
    gpus: int = 1,
    memory: int | None = 3000,
    cores: int | None = 10,
    script: str = _SLEEP,
    **more: object,
) -> Object:
    """A container; `memory` in MiB and `cores` in percent of each GPU, `gpus` 0 asks for none."""
    limits = {RESOURCE: str(gpus)} if gpus else {}
    if gpus and memory is not None:
        limits["nvidia.com/gpumem"] = str(memory)
    if gpus and cores is not None:
        limits["nvidia.com/gpucores"] = str(cores)
    return {
        "name": name,
        "image": BUSYBOX,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", script],
        "resources": {"limits": limits},
        **more,
    }


def a_pod(name: str, *containers: Object, inits: tuple[Object, ...] = (), **spec: object) -> Object:
    """A pod for HAMi's scheduler; by default one container with one GPU."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "schedulerName": HAMI_SCHEDULER,
            "hostNetwork": True,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "containers": list(containers) or [a_container()],
            **({"initContainers": list(inits)} if inits else {}),
            **spec,
        },
    }


def as_if_generated(pod: Object) -> Object:
    """The same pod, as if its name were a controller's: no Allocate asks the API server for it."""
    return {**pod, "metadata": {**pod["metadata"], "generateName": "one-"}}


def stray(pod: Object) -> Object:
    """The same pod with its node named by the user: no scheduler and no webhook saw it."""
    return {
        **pod,
        "metadata": {**pod["metadata"], "labels": {"hami.io/webhook": "ignore"}},
        "spec": {**pod["spec"], "nodeName": NODE, "schedulerName": "default-scheduler"},
    }


def telling_to(directory: Path, pod: Object) -> Object:
    """The same pod, each of whose containers writes its environment and mounts to `directory`."""
    spec: dict[str, Any] = dict(pod["spec"])
    for kind in ("containers", "initContainers"):
        if kind in spec:
            spec[kind] = [_telling(pod["metadata"]["name"], one) for one in spec[kind]]
    volume = {"name": "tell", "hostPath": {"path": str(directory), "type": "DirectoryOrCreate"}}
    return {**pod, "spec": {**spec, "volumes": [*spec.get("volumes", ()), volume]}}


def _telling(pod: str, container: Object) -> Object:
    *start, script = container["command"]
    tell = _TELL.format(f"{pod}.{container['name']}")
    mounts = [*container.get("volumeMounts", ()), {"name": "tell", "mountPath": "/tell"}]
    return {**container, "command": [*start, f"{tell}; {script}"], "volumeMounts": mounts}

"""The parts of a pod that the kubelet reads: containers in admission order, with their limits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from agent.sandbox.api_errors import Json

ContainerKind = Literal["init", "sidecar", "app"]
"""`init` ends before the next one starts; a `sidecar` is an init container that keeps running."""

ContainerKey = tuple[str, str]
"""Pod UID and container name."""

_SUFFIXES: Final[Mapping[str, int]] = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
}


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """One container; `limits` holds its extended resources only."""

    name: str
    kind: ContainerKind
    limits: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PodSpec:
    """One pod; `containers` are the init containers in spec order, then the app containers."""

    uid: str
    namespace: str
    name: str
    created: str
    containers: tuple[ContainerSpec, ...]
    node_selector: Mapping[str, str]

    @property
    def full_name(self) -> tuple[str, str]:
        """Namespace and name, by which PodResources identifies a pod."""
        return self.namespace, self.name

    def container(self, name: str) -> ContainerSpec:
        """The container of that name.

        Raises:
            KeyError: the pod has none.
        """
        for container in self.containers:
            if container.name == name:
                return container
        raise KeyError(f"pod {self.namespace}/{self.name} has no container {name}")

    def request(self, resource: str) -> int:
        """The amount that the scheduler counts: max(peak of the init phase, sum of the others)."""
        staying, peak = 0, 0
        for container in self.containers:
            asked = container.limits.get(resource, 0)
            if container.kind == "init":
                peak = max(peak, staying + asked)
            else:
                staying += asked
        return max(peak, staying)


def read_pod(pod: Json) -> PodSpec:
    """Read a Pod object as the API server stores it.

    Raises:
        KeyError: no metadata.uid, name or containers.
        ValueError: a limit of an extended resource is no whole number.
    """
    metadata, spec = pod["metadata"], pod["spec"]
    first = [_read_container(c, is_init=True) for c in spec.get("initContainers") or ()]
    then = [_read_container(c, is_init=False) for c in spec["containers"]]
    return PodSpec(
        uid=metadata["uid"],
        namespace=metadata.get("namespace", "default"),
        name=metadata["name"],
        created=metadata.get("creationTimestamp", ""),
        containers=(*first, *then),
        node_selector=dict(spec.get("nodeSelector") or {}),
    )


def _read_container(container: Json, *, is_init: bool) -> ContainerSpec:
    kind: ContainerKind = "app"
    if is_init:
        kind = "sidecar" if container.get("restartPolicy") == "Always" else "init"
    limits = (container.get("resources") or {}).get("limits") or {}
    extended = {name: read_quantity(text) for name, text in limits.items() if "/" in name}
    return ContainerSpec(container["name"], kind, extended)


def read_quantity(text: object) -> int:
    """Parse the whole quantity of an extended resource: 2, "2", "1k", "1Ki".

    Raises:
        ValueError: anything else.
    """
    digits = str(text).rstrip("kKMGi")
    scale = _SUFFIXES.get(str(text)[len(digits) :])
    if scale is None or not digits.isdecimal():
        raise ValueError(f"quantity {text!r} is no whole number")
    return int(digits) * scale

"""Reads the state of the scenario from the API server, the kubelet and the disk.

An answer is checked against the scheduler's annotation by HAMi's rules, not the agent's code.
"""

import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent import cluster as annotations
from agent.errors import StateCorrupt
from agent.hami.annotations import RegisteredGpu, decode_pod_devices, decode_register
from agent.ledger import Ledger, State
from agent.model import Gpu, GpuUuid, Share
from agent.sandbox.kubelet import checkpoint
from agent.sandbox.lab.cluster import RESOURCE, Places, SandboxCluster
from agent.sandbox.store import Json, NotFoundError
from agent.state import decode_state
from agent.wire.v1beta1 import ContainerAllocateResponse, Mount

STATE_FILE = "state.json"
Answers = Mapping[tuple[str, str], bytes]
"""Pod UID and container → the serialized answer that the kubelet keeps."""
_LIMIT = "CUDA_DEVICE_MEMORY_LIMIT_"


@dataclass(frozen=True, slots=True)
class PodFacts:
    """One pod at the API server."""

    pod: Json

    @property
    def uid(self) -> str:
        """Its UID."""
        uid: str = self.pod["metadata"]["uid"]
        return uid

    @property
    def name(self) -> str:
        """Its name."""
        name: str = self.pod["metadata"]["name"]
        return name

    @property
    def phase(self) -> str:
        """Pending, Running, Succeeded or Failed."""
        phase: str = self.pod["status"].get("phase", "")
        return phase

    @property
    def is_running(self) -> bool:
        """Whether it is Running with every container ready."""
        statuses = self.pod["status"].get("containerStatuses") or []
        return self.phase == "Running" and all(status["ready"] for status in statuses)

    @property
    def notes(self) -> Mapping[str, str]:
        """Its annotations."""
        return self.pod["metadata"].get("annotations") or {}

    @property
    def reason(self) -> str:
        """Why it is not scheduled, or why it failed."""
        status = self.pod["status"]
        told = [
            c.get("message", "") for c in status.get("conditions") or () if c["status"] != "True"
        ]
        return status.get("message") or next(filter(None, told), "")

    def containers(self) -> Mapping[str, int]:
        """Container → requested GPUs, init containers first: the order of HAMi's groups."""
        spec = self.pod["spec"]
        found = [*(spec.get("initContainers") or ()), *spec["containers"]]
        limits = {one["name"]: (one.get("resources") or {}).get("limits") or {} for one in found}
        return {name: int(asked.get(RESOURCE, "0")) for name, asked in limits.items()}

    def shares(self) -> Mapping[str, tuple[Share, ...]]:
        """The scheduler's annotation: container → shares; empty without a GPU.

        HAMi writes one group for each container that requests GPUs, with possible empty ones
        between.
        """
        text = self.notes.get(annotations.ALLOCATED, "")
        groups = iter([group for group in decode_pod_devices(text) if group])
        return {
            name: next(groups, ()) if asked else () for name, asked in self.containers().items()
        }

    @property
    def is_settled(self) -> bool:
        """Whether the agent has marked the whole pod as served."""
        left = decode_pod_devices(self.notes.get(annotations.TO_ALLOCATE, ""))
        is_consumed = annotations.TO_ALLOCATE in self.notes and not any(left)
        return is_consumed and self.notes.get(annotations.BIND_PHASE) == annotations.PHASE_SUCCESS


def pod_facts(cluster: SandboxCluster, name: str) -> PodFacts:
    """The present pod. Raises NotFoundError."""
    return PodFacts(cluster.pod(name))


def is_running(cluster: SandboxCluster, name: str) -> bool:
    """Whether the pod exists and runs."""
    try:
        return pod_facts(cluster, name).is_running
    except NotFoundError:
        return False


def is_locked(cluster: SandboxCluster) -> bool:
    """Whether the Node carries HAMi's lock."""
    return annotations.MUTEX_LOCK in cluster.node_annotations()


def registered_gpus(cluster: SandboxCluster) -> tuple[RegisteredGpu, ...]:
    """The GPUs in the Node's register annotation; empty if there is none.

    Raises MalformedText: it cannot be read.
    """
    text = cluster.node_annotations().get(annotations.REGISTER)
    return decode_register(text) if text else ()


def answers(cluster: SandboxCluster) -> Answers:
    """Every answer in the kubelet's own checkpoint file."""
    content = checkpoint.load(cluster.places.plugins)
    return {
        (entry.pod_uid, entry.container): entry.response
        for entry in content.entries
        if entry.resource == RESOURCE
    }


def parsed(answer: bytes) -> ContainerAllocateResponse:
    """An answer from the kubelet's file."""
    return ContainerAllocateResponse.parse(answer)


def state_on_disk(cluster: SandboxCluster) -> State:
    """The content of the agent's state file. Raises OSError, StateCorrupt: it cannot be read."""
    path = cluster.places.state / STATE_FILE
    try:
        return decode_state(path.read_bytes())
    except StateCorrupt:
        # The second write after the open overwrites the opened file, which may happen now.
        return decode_state(path.read_bytes())


def ledger_on_disk(cluster: SandboxCluster) -> Ledger:
    """The rows in the agent's state file. Raises OSError, StateCorrupt."""
    return state_on_disk(cluster).ledger


def starts(cluster: SandboxCluster, names: Iterable[str]) -> Mapping[str, Mapping[str, int]]:
    """The number of starts of each container of these pods."""
    found: dict[str, Mapping[str, int]] = {}
    for name in names:
        pod = cluster.kubelet.pod(pod_facts(cluster, name).uid)
        found[name] = dict(pod.starts) if pod is not None else {}
    return found


def differences(
    pod: PodFacts,
    answers: Mapping[tuple[str, str], bytes],
    gpus: Mapping[GpuUuid, Gpu],
    places: Places,
) -> list[str]:
    """The differences between a pod's answers and its annotation, one sentence each."""
    found: list[str] = []
    asked = pod.containers()
    for container, shares in pod.shares().items():
        answer = answers.get((pod.uid, container))
        if len(shares) != asked[container]:
            found.append(f"{pod.name}/{container} requested {asked[container]} GPUs")
        elif not shares and answer is not None:
            found.append(f"{pod.name}/{container} has no GPU and got an answer")
        elif shares and answer is None:
            found.append(f"{pod.name}/{container} got no answer")
        elif answer is not None:
            name = f"{pod.uid}_{container}"
            wrong = (
                *_wrong_envs(parsed(answer), shares, gpus),
                *_wrong_mounts(parsed(answer), places, name),
            )
            found += [f"{pod.name}/{container}: {text}" for text in wrong]
    return found


def promised(answer: ContainerAllocateResponse) -> Mapping[GpuUuid, tuple[int, int]]:
    """The limits in an answer: GPU UUID → MiB and percent of its compute.

    Raises ValueError: a limit is not a number.
    """
    envs = answer.envs
    percent = int(envs.get("CUDA_DEVICE_SM_LIMIT", "0"))
    uuids = envs.get("NVIDIA_VISIBLE_DEVICES", "").split(",")
    return {
        GpuUuid(uuid): (int(envs.get(f"{_LIMIT}{index}", "0m").removesuffix("m")), percent)
        for index, uuid in enumerate(uuids)
    }


def _wrong_envs(
    answer: ContainerAllocateResponse, shares: Sequence[Share], gpus: Mapping[GpuUuid, Gpu]
) -> Iterator[str]:
    in_order = sorted(shares, key=lambda share: gpus[share.uuid].pci)
    expected = {
        "NVIDIA_VISIBLE_DEVICES": ",".join(share.uuid for share in in_order),
        "CUDA_DEVICE_SM_LIMIT": str(in_order[0].core_percent),
    }
    expected |= {f"{_LIMIT}{n}": f"{share.memory_mib}m" for n, share in enumerate(in_order)}
    limits = {name for name in answer.envs if name.startswith(_LIMIT)}
    for name in sorted(expected.keys() | limits):
        if answer.envs.get(name) != expected.get(name):
            yield f"{name} is {answer.envs.get(name)}, must be {expected.get(name)}"
    if not answer.envs.get("CUDA_DEVICE_MEMORY_SHARED_CACHE", "").endswith(".cache"):
        yield "no cache file is named"


def _wrong_mounts(answer: ContainerAllocateResponse, places: Places, name: str) -> Iterator[str]:
    home = places.hook / "vgpu"
    expected = {
        f"{home}/libvgpu.so": Mount(f"{home}/libvgpu.so", str(home / "libvgpu.so"), read_only=True),
        str(home): Mount(str(home), str(home / "containers" / name)),
        "/tmp/vgpulock": Mount("/tmp/vgpulock", str(home / "containers" / name)),  # noqa: S108 -- HAMi-core's
        "/etc/ld.so.preload": Mount(
            "/etc/ld.so.preload", str(home / "ld.so.preload"), read_only=True
        ),
    }
    found = {mount.container_path: mount for mount in answer.mounts}
    for path in sorted(expected.keys() | found.keys()):
        if found.get(path) != expected.get(path):
            yield f"the mount at {path} is {found.get(path)}, must be {expected.get(path)}"
    cache = answer.envs.get("CUDA_DEVICE_MEMORY_SHARED_CACHE", "")
    if not cache.startswith(f"{home}/"):
        yield f"the cache file {cache} is not below {home}"
    yield from _wrong_leaf(home / "containers" / name)


def _wrong_leaf(leaf: Path) -> Iterator[str]:
    if not leaf.is_dir():
        yield f"the directory {leaf} is not there"
    elif (mode := stat.S_IMODE(leaf.stat().st_mode)) != 0o777:
        yield f"{leaf} has mode {mode:o}, must be 777"

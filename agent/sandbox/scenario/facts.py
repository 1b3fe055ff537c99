"""Reads the state of the scenario from the API server, the kubelet and the disk.

An answer is checked against the scheduler's annotation by HAMi's rules, not the agent's code.
"""

import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from agent import cluster as annotations
from agent.hami.annotations import RegisteredGpu, decode_pod_devices, decode_register
from agent.ledger import Ledger
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


class PodFacts:
    """One pod at the API server.

    - `is_running`: it is Running with every container ready.
    - `reason`: why it is not scheduled, or why it failed.
    - `asked`: container → requested GPUs, init containers first: the order of HAMi's groups.
    """

    def __init__(self, pod: Json) -> None:
        metadata, spec, status = pod["metadata"], pod["spec"], pod["status"]
        self.uid: str = metadata["uid"]
        self.name: str = metadata["name"]
        self.notes: Mapping[str, str] = metadata.get("annotations") or {}
        self.phase: str = status.get("phase", "")
        ready = (one["ready"] for one in status.get("containerStatuses") or ())
        self.is_running = self.phase == "Running" and all(ready)
        failed = [one for one in status.get("conditions") or () if one["status"] != "True"]
        told = (status.get("message", ""), *(one.get("message", "") for one in failed))
        self.reason: str = next(filter(None, told), "")
        found = [*(spec.get("initContainers") or ()), *spec["containers"]]
        limits = {one["name"]: (one.get("resources") or {}).get("limits") or {} for one in found}
        self.asked = {name: int(limit.get(RESOURCE, "0")) for name, limit in limits.items()}

    def shares(self) -> Mapping[str, tuple[Share, ...]]:
        """The scheduler's annotation: container → shares; empty without a GPU.

        HAMi writes one group for each container that requests GPUs, with possible empty ones
        between.
        """
        text = self.notes.get(annotations.ALLOCATED, "")
        groups = iter([group for group in decode_pod_devices(text) if group])
        return {name: next(groups, ()) if asked else () for name, asked in self.asked.items()}

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
    """The GPUs in the Node's register annotation; empty if there is none. Raises MalformedText."""
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


def ledger_on_disk(cluster: SandboxCluster) -> Ledger:
    """The rows in the agent's state file. Raises OSError, StateCorrupt: it cannot be read."""
    return decode_state((cluster.places.state / STATE_FILE).read_bytes()).ledger


def starts(cluster: SandboxCluster, names: Iterable[str]) -> Mapping[str, Mapping[str, int]]:
    """The number of starts of each container of these pods."""
    pods = {name: cluster.kubelet.node.pods.get(pod_facts(cluster, name).uid) for name in names}
    return {name: dict(pod.starts) if pod else {} for name, pod in pods.items()}


def differences(
    pod: PodFacts,
    answers: Mapping[tuple[str, str], bytes],
    gpus: Mapping[GpuUuid, Gpu],
    places: Places,
) -> list[str]:
    """The differences between a pod's answers and its annotation, one sentence each."""
    found: list[str] = []
    for container, shares in pod.shares().items():
        answer, title = answers.get((pod.uid, container)), f"{pod.name}/{container}"
        if len(shares) != pod.asked[container]:
            found.append(f"{title} requested {pod.asked[container]} GPUs")
        elif (answer is not None) != bool(shares):
            found.append(f"{title} got {'no' if shares else 'an'} answer")
        elif answer is not None:
            leaf = places.hook / "vgpu/containers" / f"{pod.uid}_{container}"
            found += [f"{title}: {text}" for text in _wrong(parsed(answer), shares, gpus, leaf)]
    return found


def promised(answer: ContainerAllocateResponse) -> Mapping[GpuUuid, tuple[int, int]]:
    """The limits in an answer: GPU UUID → MiB and percent of its compute. Raises ValueError."""
    envs = answer.envs
    percent = int(envs.get("CUDA_DEVICE_SM_LIMIT", "0"))
    uuids = envs.get("NVIDIA_VISIBLE_DEVICES", "").split(",")
    return {
        GpuUuid(uuid): (int(envs.get(f"{_LIMIT}{index}", "0m").removesuffix("m")), percent)
        for index, uuid in enumerate(uuids)
    }


def _wrong(
    answer: ContainerAllocateResponse,
    shares: Sequence[Share],
    gpus: Mapping[GpuUuid, Gpu],
    leaf: Path,
) -> Iterator[str]:
    """What differs between an answer and the shares of its container, whose directory is `leaf`."""
    in_order = sorted(shares, key=lambda share: gpus[share.uuid].pci)
    home = str(leaf.parents[1])
    mounts = (
        Mount(f"{home}/libvgpu.so", f"{home}/libvgpu.so", read_only=True),
        Mount(home, str(leaf)),
        Mount("/tmp/vgpulock", str(leaf)),  # noqa: S108 -- HAMi-core's
        Mount("/etc/ld.so.preload", f"{home}/ld.so.preload", read_only=True),
    )
    expected: dict[str, str | Mount] = {
        "NVIDIA_VISIBLE_DEVICES": ",".join(share.uuid for share in in_order),
        "CUDA_DEVICE_SM_LIMIT": str(in_order[0].core_percent),
        **{f"{_LIMIT}{n}": f"{share.memory_mib}m" for n, share in enumerate(in_order)},
        **{f"the mount at {mount.container_path}": mount for mount in mounts},
    }
    found: dict[str, str | Mount] = {
        **{n: text for n, text in answer.envs.items() if n in expected or n.startswith(_LIMIT)},
        **{f"the mount at {mount.container_path}": mount for mount in answer.mounts},
    }
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            yield f"{name} is {found.get(name)}, must be {expected.get(name)}"
    cache = answer.envs.get("CUDA_DEVICE_MEMORY_SHARED_CACHE", "")
    if not (cache.startswith(f"{home}/") and cache.endswith(".cache")):
        yield f"the cache file {cache} is not one below {home}"
    if not leaf.is_dir():
        yield f"the directory {leaf} is not there"
    elif (mode := stat.S_IMODE(leaf.stat().st_mode)) != 0o777:
        yield f"{leaf} has mode {mode:o}, must be 777"

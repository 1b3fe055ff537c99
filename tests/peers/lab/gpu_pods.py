"""Pods with GPUs: brought to the node by the real scheduler, and looked at from both sides."""

import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.codec.pod import decode_pod_devices
from agent.core import annotations
from agent.core.share import Share
from tests.peers.lab.agents import Agent
from tests.peers.lab.api import Object
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.placement import PODS, gpu_uuids
from tests.peers.lab.space import CGROUPS
from tests.peers.lab.waiting import until
from tests.peers.lab.workloads import NAMESPACE, told_environment

RUNS_WITHIN: Final = 40.0
"""Seconds from a pod's creation to its containers running, on a machine that is busy."""

TOLD: Final = "told"
"""Where telling pods tell, below the cluster's root directory."""

_GPU_FACTS: Final = ("NVIDIA_VISIBLE_DEVICES", "CUDA_DEVICE_MEMORY_LIMIT_", "CUDA_DEVICE_SM_LIMIT")


@dataclass(frozen=True, slots=True)
class Life:
    """One container as the API shows it: a new id or count means that it was started again."""

    id: str
    restarts: int


def key_of_pod(name: str) -> str:
    """How the watch names a pod of the tests' namespace."""
    return f"{NAMESPACE}/{name}"


def phase(cluster: Cluster, name: str) -> str:
    """The pod's phase; empty while it is not there."""
    pod = cluster.pods.objects.get(key_of_pod(name))
    return str(pod["status"].get("phase", "")) if pod else ""


def lives(pod: Object) -> Mapping[str, Life]:
    """The containers of a pod that run, by name."""
    found = pod["status"].get("containerStatuses") or []
    return {
        one["name"]: Life(one["containerID"], one["restartCount"])
        for one in found
        if "running" in one["state"]
    }


def all_run(pod: Object) -> bool:
    """Whether each of the pod's containers runs."""
    return len(lives(pod)) == len(pod["spec"]["containers"])


def lives_of(cluster: Cluster, names: Iterable[str]) -> dict[str, Mapping[str, Life]]:
    """The running containers of those pods."""
    return {name: lives(cluster.pods.objects[key_of_pod(name)]) for name in names}


async def create(cluster: Cluster, *pods: Object) -> list[str]:
    """Create them for HAMi's scheduler; their names."""
    for pod in pods:
        await cluster.api.create(PODS, pod)
    return [pod["metadata"]["name"] for pod in pods]


async def run(cluster: Cluster, *pods: Object, within: float = RUNS_WITHIN) -> list[str]:
    """Create them for HAMi's scheduler, and wait until all their containers run; their names.

    Raises:
        TimeoutError: not all do.
    """
    names = await create(cluster, *pods)
    await until_running(cluster, names, within)
    return names


async def until_running(
    cluster: Cluster, names: Iterable[str], within: float = RUNS_WITHIN
) -> None:
    """Return when all containers of those pods run. Raises TimeoutError."""
    keys = [key_of_pod(name) for name in names]
    objects = cluster.pods.objects
    await cluster.pods.until(
        lambda: all(key in objects and all_run(objects[key]) for key in keys),
        within,
        f"not all containers run of {', '.join(keys)}",
    )


def forget_told(cluster: Cluster) -> None:
    """Remove what pods told before: a pod of the same name is another one."""
    shutil.rmtree(cluster.root / TOLD, ignore_errors=True)


async def until_told(told: Path, name: str, containers: Iterable[str] = ("main",)) -> None:
    """Return when those containers of a telling pod have told. Raises TimeoutError."""
    files = [told / f"{name}.{one}.done" for one in containers]
    await until(lambda: all(file.exists() for file in files), 10.0, lambda: f"{files} are missing")


def granted(pod: Object) -> dict[str, tuple[Share, ...]]:
    """What HAMi's scheduler wrote for each container, all of which ask for GPUs."""
    groups = decode_pod_devices(pod["metadata"]["annotations"][annotations.ALLOCATED])
    names = [one["name"] for one in pod["spec"]["containers"]]
    return dict(zip(names, filter(None, groups), strict=True))


def promised(cluster: Cluster, name: str) -> dict[str, dict[str, str]]:
    """The GPU environment that each container of a pod must see, by what the scheduler wrote."""
    order = gpu_uuids(cluster)
    shares = granted(cluster.pods.objects[key_of_pod(name)])
    return {
        container: _environment(sorted(group, key=lambda share: order.index(share.uuid)))
        for container, group in shares.items()
    }


def _environment(shares: list[Share]) -> dict[str, str]:
    limits = {
        f"CUDA_DEVICE_MEMORY_LIMIT_{place}": f"{share.memory_mib}m"
        for place, share in enumerate(shares)
    }
    return {
        **limits,
        "CUDA_DEVICE_SM_LIMIT": str(shares[0].core_percent),
        "NVIDIA_VISIBLE_DEVICES": ",".join(share.uuid for share in shares),
    }


def seen_inside(told: Path, name: str, containers: Iterable[str]) -> dict[str, dict[str, str]]:
    """The GPU environment that each container of a pod saw."""
    return {
        container: {
            key: value
            for key, value in told_environment(told, name, container).items()
            if key.startswith(_GPU_FACTS)
        }
        for container in containers
    }


async def has_its_limits(cluster: Cluster, name: str) -> bool:
    """Whether each container of a telling pod saw what the scheduler wrote for it.

    They tell to `told` in the cluster's root directory.

    Raises:
        TimeoutError: they do not tell.
    """
    wanted = promised(cluster, name)
    await until_told(cluster.root / TOLD, name, wanted)
    return wanted == seen_inside(cluster.root / TOLD, name, wanted)


def environment_of(cluster: Cluster, name: str, container: str = "main") -> list[bytes]:
    """All that a container saw as its environment; sorted, for the kubelet has it in a Go map."""
    return sorted((cluster.root / TOLD / f"{name}.{container}.env").read_bytes().splitlines())


def answers(agent: Agent) -> Counter[tuple[str, str]]:
    """How often each container was answered, by pod and container."""
    return Counter((one["pod"], one["ctr"]) for one in agent.events("alloc.answered"))


def oversold(cluster: Cluster, slices: int = 10, memory: int = 81559) -> dict[str, list[int]]:
    """The GPUs of which the pods on the node have more than there is: slices, MiB, percent."""
    sums: dict[str, list[int]] = {}
    for pod in cluster.pods.objects.values():
        noted = pod["metadata"].get("annotations") or {}
        if annotations.ALLOCATED not in noted or not lives(pod):
            continue
        for share in (share for group in granted(pod).values() for share in group):
            total = sums.setdefault(share.uuid, [0, 0, 0])
            for place, amount in enumerate((1, share.memory_mib, share.core_percent)):
                total[place] += amount
    limits = (slices, memory, 100)
    return {
        uuid: total
        for uuid, total in sums.items()
        if any(amount > limit for amount, limit in zip(total, limits, strict=True))
    }


def processes(cluster: Cluster, container_id: str) -> frozenset[int]:
    """The processes of a container of this cluster, as this process counts them."""
    wanted = container_id.rpartition("://")[2]
    found: set[int] = set()
    for tree in CGROUPS.glob(f"*/{cluster.root.name}/kubepods"):
        for file in tree.rglob(f"{wanted}/cgroup.procs"):
            found |= set(map(int, file.read_text().split()))
    return frozenset(found)


def kill_main(cluster: Cluster, container_id: str) -> None:
    """SIGKILL to the first process of a container; all others end with it.

    Raises:
        LookupError: it does not run.
    """
    for pid in processes(cluster, container_id):
        status = Path(f"/proc/{pid}/status").read_text()
        if re.search(r"^NSpid:.*\t1$", status, re.MULTILINE):
            os.kill(pid, signal.SIGKILL)
            return
    raise LookupError(f"{container_id} has no first process")

"""What a container must find inside, by its pod's annotation and nothing of ours; and what it saw.

Only telling pods say what they saw; see lab/pods.py.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.api import Object
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.node_state import gpu_uuids, notes_of
from tests.peers.lab.pods import as_seen, containers_of, lives, told_directory, until_told

ALLOCATED: Final = "hami.io/vgpu-devices-allocated"
WHOLE: Final = (81559, 100, 10)
"""What there is of an H100: MiB, percent and slots."""

_DISABLED: Final = "CUDA_DISABLE_CONTROL"
_OURS: Final = ("NVIDIA_", "CUDA_", "LIBCUDA_", "GPU_")
_HOOK: Final = "/usr/local/vgpu"
_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class SeenGrant:
    """A share of one GPU, as the scheduler wrote it: memory in MiB, cores in percent."""

    uuid: str
    mib: int
    percent: int


@dataclass(frozen=True, slots=True)
class Mounted:
    """What lies at a place inside; `source` is a path on the file system of /usr/local."""

    source: str
    read_only: bool


Inside = dict[str, tuple[dict[str, str], dict[str, Mounted]]]
"""By container, the variables and the mounts that a grant decides."""


def grants(pod: Object) -> dict[str, tuple[SeenGrant, ...]]:
    """The shares of each container of a pod, init containers first; without GPU it has none.

    Groups are those of the containers that ask, in this order: HAMi's scheduler drops the empty
    ones of others, or keeps them, from version to version.
    Source: HAMi v2.10 pkg/device/devices.go, EncodePodSingleDevice.

    Raises:
        ValueError: not as many groups as containers that ask.
    """
    text = notes_of(pod).get(ALLOCATED, "")
    groups = [_group(one) for one in text.split(";") if one]
    asking = [one["name"] for one in containers_of(pod) if _asks(one)]
    granted = dict(zip(asking, groups, strict=True))
    return {one["name"]: granted.get(one["name"], ()) for one in containers_of(pod)}


def _asks(container: Object) -> bool:
    return RESOURCE in container.get("resources", {}).get("limits", {})


def _group(text: str) -> tuple[SeenGrant, ...]:
    devices = (device.split(",") for device in text.split(":") if device)
    return tuple(SeenGrant(uuid, int(mib), int(percent)) for uuid, _, mib, percent in devices)


def expected_environment(given: Sequence[SeenGrant], gpus: Sequence[str]) -> dict[str, str]:
    """The variables for these shares; `gpus` are the node's UUIDs as CUDA counts them."""
    if not given:
        return {}
    ordered = sorted(given, key=lambda grant: gpus.index(grant.uuid))
    limits = {f"CUDA_DEVICE_MEMORY_LIMIT_{i}": f"{one.mib}m" for i, one in enumerate(ordered)}
    if len({one.uuid for one in ordered}) > 1:
        limits["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return limits | {
        "NVIDIA_VISIBLE_DEVICES": ",".join(one.uuid for one in ordered),
        "CUDA_DEVICE_SM_LIMIT": str(ordered[0].percent),
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": f"{_HOOK}/<uuid>.cache",
        "LIBCUDA_LOG_LEVEL": "1",
    }


def told_environment(cluster: Cluster, pod: str, container: str = "main") -> dict[str, str]:
    """What a container saw as its environment."""
    lines = environment_bytes(cluster, pod, container)
    return dict(line.decode().split("=", 1) for line in lines if b"=" in line)


def environment_bytes(cluster: Cluster, pod: str, container: str = "main") -> list[bytes]:
    """The same, byte by byte; sorted, for the kubelet has it in a Go map."""
    return sorted((told_directory(cluster) / f"{pod}.{container}.env").read_bytes().splitlines())


def _seen_environment(cluster: Cluster, pod: str, container: str) -> dict[str, str]:
    cache = "CUDA_DEVICE_MEMORY_SHARED_CACHE"
    return {
        name: _UUID.sub("<uuid>", value, count=1) if name == cache else value
        for name, value in told_environment(cluster, pod, container).items()
        if name.startswith(_OURS)
    }


def expected_mounts(uid: str, container: str, *, controlled: bool = True) -> dict[str, Mounted]:
    """The mounts of a container with a GPU; `controlled` False: it wants no HAMi-core."""
    own = Mounted(f"/vgpu/containers/{uid}_{container}", read_only=False)
    found = {
        _HOOK: own,
        f"{_HOOK}/libvgpu.so": Mounted("/vgpu/libvgpu.so", read_only=True),
        "/tmp/vgpulock": own,  # noqa: S108 -- libvgpu.so's
    }
    if controlled:
        found["/etc/ld.so.preload"] = Mounted("/vgpu/ld.so.preload", read_only=True)
    return found


def seen_mounts(cluster: Cluster, pod: str, container: str = "main") -> dict[str, Mounted]:
    """What a container saw mounted from the hook path or at one of HAMi's places."""
    lines = (told_directory(cluster) / f"{pod}.{container}.mounts").read_text().splitlines()
    fields = (line.split(" ") for line in lines)
    found = {one[4]: Mounted(one[3], "ro" in one[5].split(",")) for one in fields}
    places = expected_mounts("", "")
    return {
        place: mounted
        for place, mounted in found.items()
        if place in places or mounted.source.startswith("/vgpu")
    }


def expected_inside(cluster: Cluster, name: str) -> Inside:
    """What each container of a pod must find, by what the scheduler wrote for it.

    Raises:
        ValueError: the annotation fits another pod.
    """
    pod, gpus = as_seen(cluster, name), gpu_uuids(cluster)
    uid, given = pod["metadata"]["uid"], grants(pod)
    found: Inside = {}
    for container in containers_of(pod):
        own = {one["name"]: one["value"] for one in container.get("env", ()) if "value" in one}
        kept = {variable: own[variable] for variable in own if variable.startswith(_OURS)}
        who = container["name"]
        mounts = expected_mounts(uid, who, controlled=own.get(_DISABLED) != "true")
        environment = expected_environment(given[who], gpus) | kept
        found[who] = (environment, mounts if given[who] else {})
    return found


async def seen_inside(cluster: Cluster, name: str) -> Inside:
    """What each container of a telling pod found. Raises TimeoutError: they do not tell."""
    await until_told(cluster, name)
    return {
        who: (_seen_environment(cluster, name, who), seen_mounts(cluster, name, who))
        for who in (one["name"] for one in containers_of(as_seen(cluster, name)))
    }


def load_of(shares: Mapping[str, Sequence[SeenGrant]]) -> dict[str, tuple[int, int, int]]:
    """What containers take of each GPU together: MiB, percent and slots."""
    totals: dict[str, tuple[int, int, int]] = {}
    for grant in (one for given in shares.values() for one in given):
        mib, percent, slots = totals.get(grant.uuid, (0, 0, 0))
        totals[grant.uuid] = (mib + grant.mib, percent + grant.percent, slots + 1)
    return totals


def oversold(
    cluster: Cluster, whole: tuple[int, int, int] = WHOLE
) -> dict[str, tuple[int, int, int]]:
    """The load of the GPUs of which the pods that run have more than there is."""
    shares = {
        f"{key}/{container}": given
        for key, pod in cluster.pods.objects.items()
        if ALLOCATED in notes_of(pod) and lives(pod)
        for container, given in grants(pod).items()
    }
    return {
        uuid: load
        for uuid, load in load_of(shares).items()
        if any(one > most for one, most in zip(load, whole, strict=True))
    }

"""What a container must find inside, worked out from its pod's annotation and nothing of ours."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.api import Object
from tests.peers.lab.workloads import told_environment

ALLOCATED: Final = "hami.io/vgpu-devices-allocated"
_OURS: Final = ("NVIDIA_", "CUDA_", "LIBCUDA_", "GPU_")
_HOOK: Final = "/usr/local/vgpu"
_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class Grant:
    """A share of one GPU, as the scheduler wrote it: memory in MiB, cores in percent."""

    uuid: str
    mib: int
    percent: int


@dataclass(frozen=True, slots=True)
class Mounted:
    """What lies at a place inside; `source` is a path on the file system of /usr/local."""

    source: str
    read_only: bool


def grants(pod: Object) -> dict[str, tuple[Grant, ...]]:
    """The shares of each container of a pod, init containers first; without GPU it has none.

    Groups are those of the containers that ask, in this order: HAMi's scheduler drops the empty
    ones of others, or keeps them, from version to version.
    Source: HAMi v2.10 pkg/device/devices.go, EncodePodSingleDevice.

    Raises:
        ValueError: not as many groups as containers that ask.
    """
    text = pod["metadata"].get("annotations", {}).get(ALLOCATED, "")
    groups = [_group(one) for one in text.split(";") if one]
    asking = [one["name"] for one in _containers(pod) if _asks(one)]
    granted = dict(zip(asking, groups, strict=True))
    return {one["name"]: granted.get(one["name"], ()) for one in _containers(pod)}


def _containers(pod: Object) -> list[Object]:
    spec = pod["spec"]
    return [*spec.get("initContainers", ()), *spec["containers"]]


def _asks(container: Object) -> bool:
    return RESOURCE in container.get("resources", {}).get("limits", {})


def _group(text: str) -> tuple[Grant, ...]:
    devices = (device.split(",") for device in text.split(":") if device)
    return tuple(Grant(uuid, int(mib), int(percent)) for uuid, _, mib, percent in devices)


def expected_environment(given: Sequence[Grant], gpus: Sequence[str]) -> dict[str, str]:
    """The variables for these shares; `gpus` are the node's UUIDs as CUDA counts them."""
    if not given:
        return {}
    ordered = sorted(given, key=lambda grant: gpus.index(grant.uuid))
    limits = {f"CUDA_DEVICE_MEMORY_LIMIT_{i}": f"{one.mib}m" for i, one in enumerate(ordered)}
    return limits | {
        "NVIDIA_VISIBLE_DEVICES": ",".join(one.uuid for one in ordered),
        "CUDA_DEVICE_SM_LIMIT": str(ordered[0].percent),
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": f"{_HOOK}/<uuid>.cache",
        "LIBCUDA_LOG_LEVEL": "1",
    }


def seen_environment(directory: Path, pod: str, container: str = "main") -> dict[str, str]:
    """Of what a container saw, the variables that a grant decides; see `expected_environment`."""
    told = told_environment(directory, pod, container)
    cache = "CUDA_DEVICE_MEMORY_SHARED_CACHE"
    return {
        name: _UUID.sub("<uuid>", value, count=1) if name == cache else value
        for name, value in told.items()
        if name.startswith(_OURS)
    }


def expected_mounts(uid: str, container: str, *, controlled: bool = True) -> dict[str, Mounted]:
    """The mounts of a container with a GPU; `controlled` False: it wants no HAMi-core."""
    found = {
        _HOOK: Mounted(f"/vgpu/containers/{uid}_{container}", read_only=False),
        f"{_HOOK}/libvgpu.so": Mounted("/vgpu/libvgpu.so", read_only=True),
        "/tmp/vgpulock": Mounted("/vgpu/lock", read_only=False),  # noqa: S108 -- libvgpu.so's
    }
    if controlled:
        found["/etc/ld.so.preload"] = Mounted("/vgpu/ld.so.preload", read_only=True)
    return found


def seen_mounts(directory: Path, pod: str, container: str = "main") -> dict[str, Mounted]:
    """What a container saw mounted from the hook path or at one of HAMi's places."""
    lines = (directory / f"{pod}.{container}.mounts").read_text().splitlines()
    fields = (line.split(" ") for line in lines)
    found = {one[4]: Mounted(one[3], "ro" in one[5].split(",")) for one in fields}
    places = expected_mounts("", "")
    return {
        place: mounted
        for place, mounted in found.items()
        if place in places or mounted.source.startswith("/vgpu")
    }


def load_of(shares: Mapping[str, Sequence[Grant]]) -> dict[str, tuple[int, int, int]]:
    """What containers take of each GPU together: MiB, percent and slots."""
    totals: dict[str, tuple[int, int, int]] = {}
    for grant in (one for given in shares.values() for one in given):
        mib, percent, slots = totals.get(grant.uuid, (0, 0, 0))
        totals[grant.uuid] = (mib + grant.mib, percent + grant.percent, slots + 1)
    return totals


def grants_inside(directory: Path, pod: str, container: str = "main") -> tuple[Grant, ...]:
    """The shares that a container believes to have, by its environment."""
    told = told_environment(directory, pod, container)
    percent = int(told["CUDA_DEVICE_SM_LIMIT"])
    uuids = told["NVIDIA_VISIBLE_DEVICES"].split(",")
    limits = [told[f"CUDA_DEVICE_MEMORY_LIMIT_{number}"] for number in range(len(uuids))]
    pairs = zip(uuids, limits, strict=True)
    return tuple(Grant(uuid, int(limit.removesuffix("m")), percent) for uuid, limit in pairs)

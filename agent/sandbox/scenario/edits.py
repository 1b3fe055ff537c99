"""Checks an answer against the scheduler's annotation, by HAMi's rules, not the agent's code."""

import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from agent.core.inventory.gpu import Gpu, GpuUuid
from agent.core.inventory.share import Share
from agent.sandbox.lab.places import Places
from agent.sandbox.scenario.facts import PodFacts, parsed
from agent.wire.v1beta1 import ContainerAllocateResponse, Mount

_LIMIT = "CUDA_DEVICE_MEMORY_LIMIT_"


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

    Raises:
        ValueError: a limit is not a number.
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

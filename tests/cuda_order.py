"""Which limit each GPU of a container has, as CUDA and HAMi-core number the GPUs there."""

import re
from collections.abc import Callable, Mapping


def limits_in_force(
    envs: Mapping[str, str], bus_ids: Mapping[str, str], speed: Callable[[str], int]
) -> Mapping[str, int]:
    """MiB by UUID: HAMi-core limits CUDA's device i by CUDA_DEVICE_MEMORY_LIMIT_<i>.

    CUDA puts the fastest GPU first, unless it is told to number by bus id. `bus_ids`: by UUID.
    """
    cuda = sorted(envs["NVIDIA_VISIBLE_DEVICES"].split(","), key=lambda gpu: place(bus_ids[gpu]))
    if envs.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        cuda.sort(key=speed, reverse=True)
    limits = (envs[f"CUDA_DEVICE_MEMORY_LIMIT_{index}"] for index in range(len(cuda)))
    return {gpu: int(text.removesuffix("m")) for gpu, text in zip(cuda, limits, strict=True)}


def place(bus_id: str) -> list[int]:
    """Domain, bus, device and function."""
    return [int(part, 16) for part in re.split("[:.]", bus_id)]

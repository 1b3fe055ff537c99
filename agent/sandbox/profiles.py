"""Built-in GPU models, with the driver's values, and nodes that have some of one model."""

import enum
import uuid
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from agent.core.errors import SettingsError
from agent.core.inventory.gpu import Gpu, GpuUuid, Link, PciPath

DRIVER_VERSION: Final = "570.148.08"
UUID_NAMESPACE: Final = uuid.UUID("6f1d0a52-8d3c-5b0e-9a77-2f4b6c1e8d90")
"""The namespace of derived GPU UUIDs: the same description always gives the same UUIDs."""

MOST_GPUS: Final = 64
"""The most GPUs of a description. No node has more, so a larger count is a typing error."""


class Bridging(enum.Enum):
    """How NVLinks connect the GPUs of a node."""

    NONE = enum.auto()
    PAIRS = enum.auto()
    """A bridge between two neighbours."""
    SWITCHED = enum.auto()
    """Switches connect every GPU with every other."""


class GpuProfile(msgspec.Struct, frozen=True):
    """One GPU model. `name` and `memory_mib` are NVML's values; `nvlinks` counts per peer."""

    key: str
    name: str
    memory_mib: int
    nvlinks: int = 0
    bridging: Bridging = Bridging.NONE


PROFILES: Final[Mapping[str, GpuProfile]] = MappingProxyType(
    {
        profile.key: profile
        for profile in (
            GpuProfile("h100", "NVIDIA H100 80GB HBM3", 81559, 18, Bridging.SWITCHED),
            GpuProfile("a100", "NVIDIA A100-SXM4-80GB", 81920, 12, Bridging.SWITCHED),
            GpuProfile("t4", "Tesla T4", 15360),
            GpuProfile("rtx3090", "NVIDIA GeForce RTX 3090", 24576, 4, Bridging.PAIRS),
        )
    }
)


class Description(msgspec.Struct, frozen=True):
    """The hardware of one node at power-on. GPUs are sorted by index."""

    driver_version: str
    gpus: tuple[Gpu, ...]


def described(spec: str) -> Description:
    """The hardware that `PROFILE:COUNT` or `PROFILE` describes. Raises SettingsError."""
    key, colon, count = spec.partition(":")
    profile = PROFILES.get(key)
    if profile is None:
        names = ", ".join(PROFILES)
        raise SettingsError(f"--simulate {spec}: there is no profile `{key}`; use {names}")
    count = count if colon else "1"
    if not (count.isascii() and count.isdigit() and int(count) <= MOST_GPUS):
        raise SettingsError(f"--simulate {spec}: `{count}` is not a number up to {MOST_GPUS}")
    return Description(DRIVER_VERSION, gpus_of(profile, int(count)))


def derived_uuid(seed: str) -> GpuUuid:
    """The GPU UUID that belongs to `seed`, in the driver's form."""
    return GpuUuid(f"GPU-{uuid.uuid5(UUID_NAMESPACE, seed)}")


def pci_address(slot: int, numa: int) -> str:
    """A bus address as sysfs writes it: one bus per slot, the second socket from 0x80 on."""
    return f"0000:{0x80 * min(numa, 1) + 0x10 + slot % 0x70:02x}:00.0"


def gpus_of(profile: GpuProfile, count: int) -> tuple[Gpu, ...]:
    """`count` GPUs of one model, half of them on each socket, with the model's NVLinks."""
    sockets = [0 if 2 * index < count else 1 for index in range(count)]
    uuids = [derived_uuid(f"{profile.key}/{index}") for index in range(count)]
    return tuple(
        Gpu(
            uuid=uuids[index],
            index=index,
            name=profile.name,
            memory_mib=profile.memory_mib,
            pci=pci_address(index, sockets[index]),
            numa=sockets[index],
            minor=index,
            links=tuple(
                Link(uuids[peer], _path(index, peer, sockets), _nvlinks(profile, index, peer))
                for peer in range(count)
                if peer != index
            ),
        )
        for index in range(count)
    )


def _path(index: int, peer: int, sockets: list[int]) -> PciPath:
    return PciPath.SAME_CPU if sockets[index] == sockets[peer] else PciPath.CROSS_CPU


def _nvlinks(profile: GpuProfile, index: int, peer: int) -> int:
    match profile.bridging:
        case Bridging.SWITCHED:
            return profile.nvlinks
        case Bridging.PAIRS:
            return profile.nvlinks if index // 2 == peer // 2 else 0
        case Bridging.NONE:
            return 0

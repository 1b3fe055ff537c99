"""The register annotation of the Node's GPUs in the form for schedulers from 2.8 on.

A JSON array of GPUs: fixed key order, zero values absent.
Source: HAMi v2.10 pkg/device/devices.go, MarshalNodeDevices and UnMarshalNodeDevices.
"""

import collections
from collections.abc import Iterable

import msgspec

from agent.codec import gojson
from agent.codec.meaning import same
from agent.core.cluster.annotations import TEXT_LIMIT
from agent.core.errors import MalformedText
from agent.core.inventory.gpu import GpuUuid
from agent.core.inventory.inventory import Inventory, SharedGpu

NO_GPU = GpuUuid("")


class Placement(msgspec.Struct, frozen=True):
    """Where a MIG instance may be placed: its first memory slice and their number."""

    start: int = 0
    size: int = 0


class MigProfile(msgspec.Struct, frozen=True):
    """A MIG profile of the GPU."""

    name: str = ""
    memory_mib: int = 0
    core_percent: int = 0
    slice_count: int = 0
    placements: tuple[Placement, ...] = ()


class RegisteredGpu(msgspec.Struct, frozen=True):
    """One element of the annotation. Fields absent in the text have their default."""

    uuid: GpuUuid = NO_GPU
    index: int = 0
    split_count: int = 0
    registered_mib: int = 0
    core_percent: int = 0
    type_name: str = ""
    numa: int = 0
    mode: str = ""
    mig_profiles: tuple[MigProfile, ...] = ()
    healthy: bool = False


def told(inventory: Inventory) -> tuple[SharedGpu, ...]:
    """The GPUs that are reported to schedulers, sorted by index.

    A GPU that was not described since the agent started is omitted: its properties are unknown.
    """
    known = (shared for shared in inventory.gpus if shared.gpu.name)
    return tuple(sorted(known, key=lambda shared: (shared.gpu.index, shared.uuid)))


def registered(inventory: Inventory) -> tuple[RegisteredGpu, ...]:
    """The elements for the inventory, sorted by index.

    A GPU that serves no new container, also an absent one, stays, not healthy: a scheduler would
    keep a GPU that vanishes from the text. An unknown NUMA node is 0, as in HAMi.
    """
    return tuple(_registered(shared, inventory) for shared in told(inventory))


def _registered(shared: SharedGpu, inventory: Inventory) -> RegisteredGpu:
    return RegisteredGpu(
        uuid=shared.uuid,
        index=shared.gpu.index,
        split_count=shared.split_count,
        registered_mib=shared.registered_mib,
        core_percent=shared.core_percent,
        type_name=shared.type_name,
        numa=shared.gpu.numa or 0,
        mode=shared.mode,
        healthy=inventory.offers(shared),
    )


def encode_register(gpus: Iterable[RegisteredGpu]) -> str:
    """Encode the GPUs in the given order, byte for byte as HAMi v2.10."""
    return gojson.encode(
        [{key: value for key, value in _wire_fields(gpu).items() if value} for gpu in gpus]
    )


def _wire_fields(gpu: RegisteredGpu) -> dict[str, object]:
    return {
        "id": gpu.uuid,
        "index": gpu.index,
        "count": gpu.split_count,
        "devmem": gpu.registered_mib,
        "devcore": gpu.core_percent,
        "type": gpu.type_name,
        "numa": gpu.numa,
        "mode": gpu.mode,
        "migProfiles": [
            {
                "name": profile.name,
                "memoryMB": profile.memory_mib,
                "core": profile.core_percent,
                "sliceCount": profile.slice_count,
                "placements": [msgspec.structs.asdict(place) for place in profile.placements],
            }
            for profile in gpu.mig_profiles
        ],
        "health": gpu.healthy,
    }


def decode_register(text: str) -> tuple[RegisteredGpu, ...]:
    """Decode the GPUs in the text's order; keys that no version of HAMi has are ignored.

    Fields that a scheduler's decoder checks but does not use are checked too: one wrong type loses
    the whole node. Unlike HAMi, an error returns no GPU at all.

    Raises:
        MalformedText: not a JSON array of objects, a value of another type or range, or no GPU.
    """
    if len(text) > TEXT_LIMIT:
        raise MalformedText(f"register annotation is over {TEXT_LIMIT} characters")
    value = gojson.decode(text, "register annotation")
    if not isinstance(value, list) and value is not None:
        raise MalformedText("register annotation is JSON, but not an array")
    if not value:
        raise MalformedText("register annotation names no GPU")
    return tuple(
        _read(element, f"register annotation, GPU {place}") for place, element in enumerate(value)
    )


def _read(element: object, where: str) -> RegisteredGpu:
    gojson.fields(element, _UNREAD, where)
    return RegisteredGpu(**gojson.fields(element, _GPU, where))


def same_meaning(one: str | None, other: str | None) -> bool:
    """True when a scheduler reads the same GPUs from both texts; see agent.codec.meaning.same."""
    return same(one, other, lambda text: collections.Counter(decode_register(text)))


_PLACEMENT: gojson.Table = {
    "start": ("start", gojson.integer(gojson.UINT32)),
    "size": ("size", gojson.integer(gojson.UINT32)),
}
_PROFILE: gojson.Table = {
    "name": ("name", gojson.text),
    "memorymb": ("memory_mib", gojson.integer(gojson.INT32)),
    "core": ("core_percent", gojson.integer(gojson.INT32)),
    "slicecount": ("slice_count", gojson.integer(gojson.UINT32)),
    "placements": ("placements", gojson.array(gojson.record(Placement, _PLACEMENT))),
}
_GPU: gojson.Table = {
    "id": ("uuid", gojson.text),
    "index": ("index", gojson.integer(gojson.UINT64)),
    "count": ("split_count", gojson.integer(gojson.INT32)),
    "devmem": ("registered_mib", gojson.integer(gojson.INT32)),
    "devcore": ("core_percent", gojson.integer(gojson.INT32)),
    "type": ("type_name", gojson.text),
    "numa": ("numa", gojson.integer(gojson.INT64)),
    "mode": ("mode", gojson.text),
    "migprofiles": ("mig_profiles", gojson.array(gojson.record(MigProfile, _PROFILE))),
    "health": ("healthy", gojson.flag),
}
_TEMPLATE: gojson.Table = {
    "name": ("name", gojson.text),
    "core": ("core", gojson.integer(gojson.INT32)),
    "memory": ("memory", gojson.integer(gojson.INT32)),
    "count": ("count", gojson.integer(gojson.INT32)),
}
_PAIRS: gojson.Table = {
    "uuid": ("uuid", gojson.text),
    "score": ("score", gojson.mapping(gojson.integer(gojson.INT64))),
}
_UNREAD: gojson.Table = {
    "migtemplate": (
        "migtemplate",
        gojson.array(gojson.nullable(gojson.array(gojson.record(dict, _TEMPLATE)))),
    ),
    "devicevendor": ("devicevendor", gojson.text),
    "custominfo": ("custominfo", gojson.mapping(gojson.anything)),
    "devicepairscore": ("devicepairscore", gojson.record(dict, _PAIRS)),
}
"""Fields of HAMi's struct that the agent does not use; 2.10 does not decode the last one."""

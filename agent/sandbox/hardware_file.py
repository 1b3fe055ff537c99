"""Simulated hardware from a YAML file, read strictly.

driver_version: 570.148.08        # optional
gpus:
  - profile: h100                 # a built-in model: name, memory and links; optional
    count: 4                      # so many alike; then no uuid, index, pci, minor or links
  - uuid: GPU-8d2f…               # derived from file name and position when absent
    index: 6                      # the next free one when absent
    name: NVIDIA H100 80GB HBM3
    memory_mib: 81559             # null: the driver cannot tell
    pci: 0000:1b:00.0
    numa: 0                       # null: unknown
    minor: 6
    mig_enabled: false
    links:
      - {peer: GPU-…, path: single-switch, nvlinks: 18}
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from agent.codec.places import Place, read_yaml
from agent.core.errors import SettingsError
from agent.core.inventory.gpu import Gpu, GpuUuid, Link, PciPath
from agent.host.textfile import read_bounded
from agent.sandbox.profiles import (
    MOST_GPUS,
    PROFILES,
    GpuProfile,
    derived_uuid,
    gpus_of,
    pci_address,
)

DRIVER_VERSION: Final = "570.148.08"
MAX_BYTES: Final = 256 * 1024

_TOP: Final = frozenset({"driver_version", "gpus"})
_ONE: Final = frozenset({"uuid", "index", "pci", "minor", "links"})
_GPU: Final = _ONE | {"profile", "count", "name", "memory_mib", "numa", "mig_enabled"}
_LINK: Final = frozenset({"peer", "path", "nvlinks"})
_PATHS: Final = {path.name.lower().replace("_", "-"): path for path in PciPath}
_PCI: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-1][0-9a-f]\.[0-7]")
_UUID: Final = re.compile(r"GPU-[0-9a-zA-Z-]{4,60}")
_VERSION: Final = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6}){0,3}")
_LARGEST_MIB: Final = 16 * 1024 * 1024


class Description(msgspec.Struct, frozen=True):
    """The hardware of one node at power-on. GPUs are sorted by index."""

    driver_version: str
    gpus: tuple[Gpu, ...]


def described(spec: str) -> Description:
    """The hardware that `PROFILE:COUNT`, `PROFILE` or a YAML file describes. Raises SettingsError.

    `spec` is a file if it has a slash or a dot, or if it is no profile and has no count.
    """
    key, colon, count = spec.partition(":")
    if "/" in spec or "." in spec or (key not in PROFILES and not colon):
        return read_description(Path(spec))
    profile = PROFILES.get(key)
    if profile is None:
        names = ", ".join(PROFILES)
        raise SettingsError(f"--simulate {spec}: there is no profile `{key}`; use {names}")
    if not colon:
        return Description(DRIVER_VERSION, gpus_of(profile, 1))
    if not (count.isascii() and count.isdigit() and 0 <= int(count) <= MOST_GPUS):
        raise SettingsError(f"--simulate {spec}: `{count}` is not a number up to {MOST_GPUS}")
    return Description(DRIVER_VERSION, gpus_of(profile, int(count)))


def read_description(file: Path) -> Description:
    """The hardware that `file` describes. Raises SettingsError with file, line and field."""
    document = read_yaml(read_bounded(file, MAX_BYTES), str(file))
    if document is None:
        raise SettingsError(f"{file}: is empty")
    top = document.mapping(_TOP)
    if "gpus" not in top:
        raise document.fault("`gpus` is missing; for a node without GPUs write an empty list")
    version = DRIVER_VERSION
    if "driver_version" in top:
        version = _matched(top["driver_version"], _VERSION, "digits and dots")
    taken = _Taken()
    gpus: list[Gpu] = []
    for entry in top["gpus"].items():
        gpus.extend(_read_entry(entry, taken))
        if len(gpus) > MOST_GPUS:
            raise entry.fault(f"these are more than {MOST_GPUS} GPUs")
    taken.settle_links(gpus)
    return Description(version, tuple(sorted(gpus, key=lambda gpu: gpu.index)))


class _Taken:
    """The values that must be unique in a file, and the peers that must exist."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], Place] = {}
        self._peers: list[tuple[Place, GpuUuid]] = []

    def claim(self, place: Place, field: str, value: str) -> None:
        """Note `value`. Raises SettingsError if another GPU has it."""
        first = self._values.get((field, value))
        if first is not None:
            line = first.node.start_mark.line + 1
            raise place.fault(f"{field} {value} is already used in line {line}")
        self._values[field, value] = place

    def free_index(self) -> int:
        """The lowest index that no GPU has yet."""
        return next(n for n in range(MOST_GPUS * 2) if ("index", str(n)) not in self._values)

    def expect(self, place: Place, peer: GpuUuid) -> None:
        """Note that `peer` must be the UUID of a GPU of this file."""
        self._peers.append((place, peer))

    def settle_links(self, gpus: Iterable[Gpu]) -> None:
        """Raise SettingsError if a link leads to a GPU that is not in this file."""
        known = {gpu.uuid for gpu in gpus}
        for place, peer in self._peers:
            if peer not in known:
                raise place.fault(f"{peer} is the UUID of no GPU in this file")


def _read_entry(entry: Place, taken: _Taken) -> tuple[Gpu, ...]:
    fields = entry.mapping(_GPU)
    count = fields["count"].integer(1, MOST_GPUS) if "count" in fields else 1
    for key in sorted(_ONE & fields.keys()) if count > 1 else ():
        raise fields[key].fault(f"{count} GPUs cannot share it; leave it out or drop `count`")
    profile = _profile(fields.get("profile"))
    if profile is None and "name" not in fields:
        raise entry.fault("`name` or `profile` is needed")
    plain = gpus_of(profile or GpuProfile("gpu", "", 0), count)
    indexes: list[int] = []
    for _ in plain:
        index = fields["index"].integer(0, 255) if "index" in fields else taken.free_index()
        taken.claim(fields.get("index", entry), "index", str(index))
        indexes.append(index)
    uuids = [_uuid(fields.get("uuid"), entry, index) for index in indexes]
    return tuple(
        _gpu(entry, fields, taken, _moved(gpu, index, dict(zip(_ids(plain), uuids, strict=True))))
        for gpu, index in zip(plain, indexes, strict=True)
    )


def _ids(gpus: Iterable[Gpu]) -> list[GpuUuid]:
    return [gpu.uuid for gpu in gpus]


def _moved(gpu: Gpu, index: int, uuids: Mapping[GpuUuid, GpuUuid]) -> Gpu:
    """The profile's GPU at its place in this node, links included."""
    return msgspec.structs.replace(
        gpu,
        uuid=uuids[gpu.uuid],
        index=index,
        minor=index,
        pci=pci_address(index, gpu.numa or 0),
        links=tuple(msgspec.structs.replace(link, peer=uuids[link.peer]) for link in gpu.links),
    )


def _gpu(entry: Place, fields: Mapping[str, Place], taken: _Taken, base: Gpu) -> Gpu:
    """`base` with the fields of the entry."""
    gpu = msgspec.structs.replace(
        base,
        name=fields["name"].text() if "name" in fields else base.name,
        memory_mib=_number(fields.get("memory_mib"), base.memory_mib, 1, _LARGEST_MIB),
        numa=_number(fields.get("numa"), base.numa, 0, 255),
        minor=_number(fields.get("minor"), base.minor, 0, 255),
        mig_enabled="mig_enabled" in fields and fields["mig_enabled"].boolean(),
    )
    if "pci" in fields:
        address = _matched(fields["pci"], _PCI, "a PCI address like 0000:1b:00.0")
        gpu = msgspec.structs.replace(gpu, pci=address)
    if "links" in fields:
        links = tuple(_link(place, taken) for place in fields["links"].items())
        gpu = msgspec.structs.replace(gpu, links=links)
    if gpu.memory_mib == 0:
        raise entry.fault("`memory_mib` is needed (null: the driver cannot tell)")
    for field, value in (("uuid", gpu.uuid), ("pci", gpu.pci), ("minor", gpu.minor)):
        if value is not None:
            taken.claim(fields.get(field, entry), field, str(value))
    return gpu


def _number(place: Place | None, otherwise: int | None, low: int, high: int) -> int | None:
    """The number at `place`; None if it is null."""
    if place is None:
        return otherwise
    return None if place.null else place.integer(low, high)


def _profile(place: Place | None) -> GpuProfile | None:
    if place is None:
        return None
    profile = PROFILES.get(place.text())
    if profile is None:
        raise place.fault(f"there is no profile `{place.text()}`; use {', '.join(PROFILES)}")
    return profile


def _uuid(place: Place | None, entry: Place, index: int) -> GpuUuid:
    if place is None:
        return derived_uuid(f"{Path(entry.file).name}/{index}")
    return GpuUuid(_matched(place, _UUID, "a GPU UUID like GPU-8d2f…"))


def _link(place: Place, taken: _Taken) -> Link:
    fields = place.mapping(_LINK)
    if "peer" not in fields:
        raise place.fault("`peer` is needed: the UUID of the other GPU")
    peer = GpuUuid(_matched(fields["peer"], _UUID, "a GPU UUID like GPU-8d2f…"))
    taken.expect(fields["peer"], peer)
    nvlinks = fields["nvlinks"].integer(0, 36) if "nvlinks" in fields else 0
    path = fields.get("path")
    if path is not None and path.text() not in _PATHS:
        raise path.fault(f"`{path.text()}` is no PCI path; there are {', '.join(_PATHS)}")
    return Link(peer, None if path is None else _PATHS[path.text()], nvlinks)


def _matched(place: Place, pattern: re.Pattern[str], meaning: str) -> str:
    text = place.raw()
    if not pattern.fullmatch(text):
        raise place.fault(f"`{text[:64]}` is not {meaning}")
    return text

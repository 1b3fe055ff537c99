"""Which GPU has which index, and the driver's handle of each. Nothing else opens a GPU.

The library opens a GPU with its first handle; for a handle by UUID it may open others too. A GPU
stays open until all sessions end. Until then nobody can reset it, change its MIG mode or unload the
driver.
"""

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

import msgspec

from agent.errors import GpuError
from agent.gpu.nvml import Handle, NvmlLibrary
from agent.health.attribution import doubtful
from agent.model import Gpu, GpuFault, GpuUuid


class Indexes:
    """Names the GPU at an index that does not answer with its UUID.

    It outlives sessions: a GPU that is slow at the start of one is the same as before. After the
    indexes changed, an index names a GPU only once that GPU answered there. Until then an unseen
    GPU may be at any index that does not answer, and a fault there is assigned to none for certain.
    """

    def __init__(self) -> None:
        self._uuids: dict[int, GpuUuid] = {}
        self._count: int | None = None
        self._unseen: set[GpuUuid] = set()
        """Known before the indexes changed, and not seen since."""

    def name(self, index: int) -> str:
        """The UUID at `index` if it is known, else `index N`."""
        return self._uuids.get(index, f"index {index}")

    def find(self, name: str) -> int | None:
        """The index with that name, or None."""
        return next((n for n in range(self._count or 0) if self.name(n) == name), None)

    def counted(self, count: int) -> bool:
        """Note how many GPUs the driver lists. False when the number, so any index, changed."""
        fits = self._count in {None, count}
        self._count = count
        if not fits:
            self._forget()
        return fits

    def seen(self, uuids: Mapping[int, GpuUuid]) -> bool:
        """Note the UUIDs that GPUs answered with. False when one was known at another index."""
        together = {**self._uuids, **uuids}
        fits = all(self._uuids.get(index, uuid) == uuid for index, uuid in uuids.items())
        fits = fits and len(set(together.values())) == len(together)
        if not fits:
            self._forget()
        self._uuids.update(uuids)
        self._unseen.difference_update(self._uuids.values())
        return fits

    def named(self, faults: Mapping[int, GpuFault]) -> tuple[GpuFault, ...]:
        """Name the faults, and add one for each GPU that may be at an index without a name.

        An added fault never says that the GPU is lost: at most one of them is.
        """
        named = {n: msgspec.structs.replace(faults[n], gpu=self.name(n)) for n in sorted(faults)}
        nameless = {n: fault for n, fault in named.items() if n not in self._uuids}
        if not nameless:
            self._unseen.clear()
            return tuple(named.values())
        text = "; ".join(f"it may be {fault.gpu}: {fault.text}" for fault in nameless.values())
        explained = len(nameless) <= len(self._unseen)
        return (
            *(f for n, f in named.items() if f.lost or n in self._uuids or not explained),
            *(GpuFault(uuid, text, doubtful(nameless.values())) for uuid in sorted(self._unseen)),
        )

    def _forget(self) -> None:
        self._unseen.update(self._uuids.values())
        self._uuids.clear()


RELEASED = "it is released: hami-agent recheck takes it back"
UNPLACED = "it is searched for when all GPUs are taken back"
RECHECK_ALL = f"{UNPLACED}: hami-agent recheck all"


class Handles:
    """Knows which GPUs may be opened. While one is released, only PCI addresses find the others.

    Indexes change when a GPU goes, and a GPU that was never seen may be the released one.
    """

    def __init__(self, library: NvmlLibrary) -> None:
        self._library = library
        # The threads of the GPUs read these: they are only replaced, never changed.
        self._known: Mapping[GpuUuid, Gpu] = MappingProxyType({})
        self.released: frozenset[GpuUuid] = frozenset()
        """The GPUs that must not be opened."""
        self.unplaced: frozenset[GpuUuid] = frozenset()
        """The GPUs taken back while others stay released that were never described.

        Their address is unknown: only a scan of all GPUs finds them.
        """
        self._others: frozenset[GpuUuid] = frozenset()
        """The GPUs that are released only because all were."""

    @property
    def all_released(self) -> bool:
        """True when every known GPU is released: then no session may be open."""
        return bool(self.released) and self._known.keys() <= self.released

    @property
    def known(self) -> tuple[Gpu, ...]:
        """The GPUs as the last scan described them."""
        return tuple(self._known.values())

    def seen(self, gpus: Iterable[Gpu], faults: Iterable[GpuFault]) -> None:
        """Take the result of a scan of all GPUs; a faulty one keeps its last description.

        While a GPU is released, no scan is of all GPUs.
        """
        if not self.released:
            names = {fault.gpu for fault in faults}
            kept = {uuid: gpu for uuid, gpu in self._known.items() if uuid in names}
            self._known = MappingProxyType(kept | {gpu.uuid: gpu for gpu in gpus})

    def release(self, uuids: Collection[GpuUuid], *, everything: bool = False) -> None:
        """Let no thread open these GPUs from now on.

        With `everything`, no other GPU either, until any GPU is taken back.

        Raises GpuError for a GPU that was never seen, unless all seen ones are released with it:
        then no session can hold it.
        """
        if everything:
            self._others |= self._known.keys() - self.released - set(uuids)
            uuids = {*uuids, *self._others}
        are_all = bool(self._known) and self._known.keys() <= {*uuids, *self.released}
        for uuid in uuids:
            if uuid not in self._known and not are_all:
                text = "the driver has not described it; only `hami-agent release all` releases it"
                raise GpuError(uuid, text)
        self.released |= set(uuids)
        self.unplaced -= set(uuids)

    def take_back(self, uuid: GpuUuid) -> None:
        """Let this GPU, and those released by `everything`, be opened again."""
        if uuid in self.released and uuid not in self._known:
            self.unplaced |= {uuid}
        self.released -= {uuid, *self._others}
        self._others = frozenset()
        if not self.released:
            self.unplaced = frozenset()

    def open_to(self, count: int) -> list[int]:
        """The indexes that may be opened; the driver lists `count`."""
        if not self.released:
            return list(range(count))
        return [gpu.index for gpu in self.known if gpu.uuid not in self.released]

    # On the threads of the GPUs.

    def of_index(self, index: int) -> Handle:
        """Get the handle of GPU `index`. Raises NVMLError, GpuError when it is released."""
        if not self.released:
            return self._library.nvmlDeviceGetHandleByIndex(index)
        return self._of(next((gpu for gpu in self.known if gpu.index == index), None), str(index))

    def of_uuid(self, uuid: GpuUuid) -> Handle:
        """Get the handle of a GPU. Raises NVMLError, GpuError when it is released."""
        if not self.released:
            return self._library.nvmlDeviceGetHandleByUUID(uuid)
        return self._of(self._known.get(uuid), uuid)

    def _of(self, gpu: Gpu | None, name: str) -> Handle:
        if name in self.released or (gpu is not None and gpu.uuid in self.released):
            raise GpuError(name, RELEASED)
        if gpu is None:
            raise GpuError(name, RECHECK_ALL)
        # sysfs writes four digits of the domain, the library eight.
        domain, _, rest = gpu.pci.partition(":")
        return self._library.nvmlDeviceGetHandleByPciBusId(f"{domain:0>8}:{rest}".upper())

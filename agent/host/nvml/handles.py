"""Gets the driver's handles of GPUs, except of released ones. Nothing else opens a GPU.

The library opens a GPU with its first handle; for a handle by UUID it may open others too. A GPU
stays open until all sessions end. Until then nobody can reset it, change its MIG mode or unload the
driver.
"""

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from agent.core.errors import GpuError
from agent.core.inventory.gpu import Gpu, GpuFault, GpuUuid
from agent.host.nvml.library import Handle, NvmlLibrary

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
        self._released: frozenset[GpuUuid] = frozenset()
        self._unplaced: frozenset[GpuUuid] = frozenset()
        self._others: frozenset[GpuUuid] = frozenset()

    @property
    def released(self) -> frozenset[GpuUuid]:
        """The GPUs that must not be opened."""
        return self._released

    @property
    def unplaced(self) -> frozenset[GpuUuid]:
        """The GPUs taken back while others stay released that were never described.

        Their address is unknown: only a scan of all GPUs finds them.
        """
        return self._unplaced

    @property
    def all_released(self) -> bool:
        """True when every known GPU is released: then no session may be open."""
        return bool(self._released) and self._known.keys() <= self._released

    @property
    def known(self) -> tuple[Gpu, ...]:
        """The GPUs as the last scan described them."""
        return tuple(self._known.values())

    def seen(self, gpus: Iterable[Gpu], faults: Iterable[GpuFault]) -> None:
        """Take the result of a scan of all GPUs; a faulty one keeps its last description.

        While a GPU is released, no scan is of all GPUs.
        """
        if not self._released:
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
            self._others |= self._known.keys() - self._released - set(uuids)
            uuids = {*uuids, *self._others}
        are_all = bool(self._known) and self._known.keys() <= {*uuids, *self._released}
        for uuid in uuids:
            if uuid not in self._known and not are_all:
                text = "the driver has not described it; only `hami-agent release all` releases it"
                raise GpuError(uuid, text)
        self._released |= set(uuids)
        self._unplaced -= set(uuids)

    def take_back(self, uuid: GpuUuid) -> None:
        """Let this GPU, and those released by `everything`, be opened again."""
        if uuid in self._released and uuid not in self._known:
            self._unplaced |= {uuid}
        self._released -= {uuid, *self._others}
        self._others = frozenset()
        if not self._released:
            self._unplaced = frozenset()

    def open_to(self, count: int) -> list[int]:
        """The indexes that may be opened; the driver lists `count`."""
        if not self._released:
            return list(range(count))
        return [gpu.index for gpu in self.known if gpu.uuid not in self._released]

    # On the threads of the GPUs.

    def of_index(self, index: int) -> Handle:
        """Get the handle of GPU `index`. Raises NVMLError, GpuError when it is released."""
        if not self._released:
            return self._library.nvmlDeviceGetHandleByIndex(index)
        return self._of(next((gpu for gpu in self.known if gpu.index == index), None), str(index))

    def of_uuid(self, uuid: GpuUuid) -> Handle:
        """Get the handle of a GPU. Raises NVMLError, GpuError when it is released."""
        if not self._released:
            return self._library.nvmlDeviceGetHandleByUUID(uuid)
        return self._of(self._known.get(uuid), uuid)

    def _of(self, gpu: Gpu | None, name: str) -> Handle:
        if name in self._released or (gpu is not None and gpu.uuid in self._released):
            raise GpuError(name, RELEASED)
        if gpu is None:
            raise GpuError(name, RECHECK_ALL)
        return self._library.nvmlDeviceGetHandleByPciBusId(_full(gpu.pci))


def _full(bus: str) -> str:
    """Convert a bus id of sysfs to the library's form: eight digits of the domain."""
    domain, _, rest = bus.partition(":")
    return f"{domain:0>8}:{rest}".upper()

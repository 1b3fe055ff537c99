"""How GPUs are taken hold of, and who is let go of: the only place where the driver opens one.

The library opens a GPU with its first handle, and for a handle by UUID it may open others on its
way. What a session has opened stays open until all sessions end: nobody can reset the GPU, change
its MIG mode or unload the driver meanwhile.
"""

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from agent.core.errors import GpuError
from agent.core.inventory.gpu import Gpu, GpuFault, GpuUuid
from agent.host.nvml.library import Handle, NvmlLibrary

RELEASED = "it is released: hami-agent recheck takes it back"
UNPLACED = "it is looked for when all GPUs are taken back"
RECHECK_ALL = f"{UNPLACED}: hami-agent recheck all"


class Handles:
    """Who may be opened. While a GPU is released, the others are found by their PCI address alone.

    Indexes move when a GPU goes, and one that was never seen may be the released one.
    """

    def __init__(self, library: NvmlLibrary) -> None:
        self._library = library
        # Both are read on the threads of the GPUs: they are replaced as a whole.
        self._known: Mapping[GpuUuid, Gpu] = MappingProxyType({})
        self._released: frozenset[GpuUuid] = frozenset()
        self._unplaced: frozenset[GpuUuid] = frozenset()
        self._others: frozenset[GpuUuid] = frozenset()

    @property
    def released(self) -> frozenset[GpuUuid]:
        """Those that nobody may touch."""
        return self._released

    @property
    def unplaced(self) -> frozenset[GpuUuid]:
        """Those that were taken back while others stay released, and were never described.

        Their address is not known: only a look at all GPUs finds them.
        """
        return self._unplaced

    @property
    def all_released(self) -> bool:
        """No GPU is left to ask: then the driver may not be held either."""
        return bool(self._released) and self._known.keys() <= self._released

    @property
    def known(self) -> tuple[Gpu, ...]:
        """The GPUs of the last look, as they were described."""
        return tuple(self._known.values())

    def seen(self, gpus: Iterable[Gpu], faults: Iterable[GpuFault]) -> None:
        """A look at all has found these, and could not describe those, of which the last is kept.

        While a GPU is released, no look is at all of them.
        """
        if not self._released:
            names = {fault.gpu for fault in faults}
            kept = {uuid: gpu for uuid, gpu in self._known.items() if uuid in names}
            self._known = MappingProxyType(kept | {gpu.uuid: gpu for gpu in gpus})

    def release(self, uuids: Collection[GpuUuid], *, everything: bool = False) -> None:
        """Nobody touches these from now on.

        `everything`: nor any other. Of these nobody speaks, so that whoever takes a GPU back takes
        them back as well.

        Raises GpuError for one that was never seen, unless all that were seen go with it: then
        there is no session that could hold it.
        """
        if everything:
            self._others |= self._known.keys() - self._released - set(uuids)
            uuids = {*uuids, *self._others}
        are_all = bool(self._known) and self._known.keys() <= {*uuids, *self._released}
        for uuid in uuids:
            if uuid not in self._known and not are_all:
                text = (
                    "the driver has not described it; only `hami-agent release all` lets go of it"
                )
                raise GpuError(uuid, text)
        self._released |= set(uuids)
        self._unplaced -= set(uuids)

    def take_back(self, uuid: GpuUuid) -> None:
        """It may be touched again."""
        if uuid in self._released and uuid not in self._known:
            self._unplaced |= {uuid}
        self._released -= {uuid, *self._others}
        self._others = frozenset()
        if not self._released:
            self._unplaced = frozenset()

    def open_to(self, count: int) -> list[int]:
        """The indexes that may be asked about, of so many."""
        if not self._released:
            return list(range(count))
        return [gpu.index for gpu in self.known if gpu.uuid not in self._released]

    # On the threads of the GPUs.

    def of_index(self, index: int) -> Handle:
        """Raises NVMLError, GpuError for one that is released."""
        if not self._released:
            return self._library.nvmlDeviceGetHandleByIndex(index)
        return self._of(next((gpu for gpu in self.known if gpu.index == index), None), str(index))

    def of_uuid(self, uuid: GpuUuid) -> Handle:
        """Raises NVMLError, GpuError for one that is released."""
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
    """A bus id of sysfs as the library writes it: eight digits of the domain."""
    domain, _, rest = bus.partition(":")
    return f"{domain:0>8}:{rest}".upper()

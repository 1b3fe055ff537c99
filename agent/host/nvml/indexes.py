"""Remembers which GPU has which index, until an answer of the driver contradicts it."""

from collections.abc import Mapping

import msgspec

from agent.core.health.nameless import doubtful
from agent.core.inventory.gpu import GpuFault, GpuUuid


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

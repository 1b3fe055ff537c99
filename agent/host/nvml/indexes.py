"""Whose index is whose: known by what the GPUs said, for as long as nothing contradicts it."""

import dataclasses
from collections.abc import Mapping

from agent.core.health.nameless import doubtful
from agent.core.inventory.gpu import GpuFault, GpuUuid


class Indexes:
    """Which GPU is meant by an index that cannot tell its UUID just now.

    It outlives sessions: a GPU that is slow when one begins is the same as before. Once GPUs came,
    went or moved, an index names only whom it was seen to be; the others may be behind any index
    that does not tell, and no fault is taken for a certain one's.
    """

    def __init__(self) -> None:
        self._uuids: dict[int, GpuUuid] = {}
        self._count: int | None = None
        self._unseen: set[GpuUuid] = set()
        """Known before the indexes moved, and not seen since."""

    def name(self, index: int) -> str:
        """Its UUID where that is known, else `index N`."""
        return self._uuids.get(index, f"index {index}")

    def find(self, name: str) -> int | None:
        """The index of that name, or None."""
        return next((n for n in range(self._count or 0) if self.name(n) == name), None)

    def counted(self, count: int) -> bool:
        """The driver lists so many. False when these are others than before: all may have moved."""
        fits = self._count in {None, count}
        self._count = count
        if not fits:
            self._forget()
        return fits

    def seen(self, uuids: Mapping[int, GpuUuid]) -> bool:
        """These have said who they are. False when one was known to be elsewhere."""
        together = {**self._uuids, **uuids}
        fits = all(self._uuids.get(index, uuid) == uuid for index, uuid in uuids.items())
        fits = fits and len(set(together.values())) == len(together)
        if not fits:
            self._forget()
        self._uuids.update(uuids)
        self._unseen.difference_update(self._uuids.values())
        return fits

    def named(self, faults: Mapping[int, GpuFault]) -> tuple[GpuFault, ...]:
        """The faults by name, and one of each GPU that may be behind an index without a name.

        The latter are not lost, whatever the former is: only one of them is.
        """
        named = {n: dataclasses.replace(faults[n], gpu=self.name(n)) for n in sorted(faults)}
        nameless = {n: fault for n, fault in named.items() if n not in self._uuids}
        if not nameless:
            self._unseen.clear()
            return tuple(named.values())
        text = "; ".join(f"it may be {fault.gpu}: {fault.text}" for fault in nameless.values())
        explained = len(nameless) <= len(self._unseen)
        return (
            *(one for n, one in named.items() if one.lost or n in self._uuids or not explained),
            *(GpuFault(uuid, text, doubtful(nameless.values())) for uuid in sorted(self._unseen)),
        )

    def _forget(self) -> None:
        self._unseen.update(self._uuids.values())
        self._uuids.clear()

"""What HAMi's scheduler has read of the Node, as far as it lets others see that.

Before 2.8 it looks every 15 s, and reads only where the handshake is none of its own; it answers
with `Requesting_`, and after a minute without an answer with `Deleted_`. Later ones look as often,
but do not always show that they have read: tests wait for their pods alone, unless other GPUs were
read than the Node has now.
Source: HAMi v2.7.1 and v2.10 pkg/scheduler/scheduler.go, RegisterFromNodeAnnotations.
"""

import asyncio
from typing import Final

from agent import cluster as annotations
from agent.hami.register import read_register
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.api import Object, Watched
from tests.peers.lab.identities import NODE
from tests.peers.lab.part import Part
from tests.peers.lab.releases import Release

WITHIN: Final = 75.0
"""Seconds for a sign of life (every 30 s), a look (every 15 s), and some."""

_LOOK: Final = 16.0
"""Seconds in which it has looked at the Node (every 15 s)."""
_READS_CHANGES: Final = (2, 10)
"""From this release on it reads a changed text though nobody answers its handshake."""


class Reading:
    """Follows the handshake in the watch of the nodes. `forget` before the watch forgets."""

    def __init__(self, release: Release, nodes: Watched, scheduler: Part) -> None:
        self._release = release
        self._nodes = nodes
        self._scheduler = scheduler
        self._seen = 0
        self._handshake = ""
        self._offer: tuple[str | None, str] = None, "0"
        self._offered = 0.0
        """Since when the Node says so, by the loop's clock."""
        self._read: tuple[int, str | None] | None = None
        """Which process has read what."""

    async def until_current(self) -> None:
        """Return once the scheduler knows what the Node says now, or nobody is there to tell.

        Raises:
            TimeoutError: it does not read.
        """
        is_known = self._is_current if self._release.is_old else self._knows_the_gpus
        await self._nodes.until(is_known, WITHIN, "HAMi's scheduler does not read")

    def forget(self) -> None:
        """What was seen until now is known; the watch may forget it."""
        self._look()
        self._seen = 0

    def _is_current(self) -> bool:
        self._look()
        text = self._notes().get(annotations.REGISTER)
        is_there = self._scheduler.is_alive and text is not None
        return not is_there or self._read == (self._scheduler.pid, text)

    def _knows_the_gpus(self) -> bool:
        """Whether it would not place a pod on GPUs that an earlier agent had."""
        self._look()
        if self._read is None or not self._scheduler.is_alive:
            return True
        pid, text = self._read
        now = _uuids(self._notes().get(annotations.REGISTER))
        return pid != self._scheduler.pid or not now or _uuids(text) == now or self._has_looked()

    def _has_looked(self) -> bool:
        """Whether it has looked at the Node as it is, and not said so: HAMi's plugin says nothing.

        A Node with slices alone is read.
        """
        _, slices = self._offer
        reads = self._release.number >= _READS_CHANGES and slices != "0"
        return reads and asyncio.get_running_loop().time() - self._offered > _LOOK

    def _notes(self) -> dict[str, str]:
        node = self._nodes.objects.get(NODE)
        return (node["metadata"].get("annotations") or {}) if node else {}

    def _look(self) -> None:
        history = self._nodes.history.get(NODE, [])
        for one in history[self._seen :]:
            notes = one.object["metadata"].get("annotations") or {}
            if (offer := _offer(one.object)) != self._offer:
                self._offer, self._offered = offer, one.at
            handshake = notes.get(annotations.HANDSHAKE, "")
            if handshake == self._handshake:
                continue
            self._handshake = handshake
            if handshake.startswith("Requesting"):
                self._read = self._scheduler.pid, notes.get(annotations.REGISTER)
            elif handshake.startswith("Deleted"):
                self._read = None
        self._seen = len(history)


def _offer(node: Object) -> tuple[str | None, str]:
    """What the scheduler compares: the register annotation, and the slices of the kubelet."""
    slices = node.get("status", {}).get("allocatable", {}).get(RESOURCE, "0")
    return (node["metadata"].get("annotations") or {}).get(annotations.REGISTER), slices


def _uuids(text: str | None) -> set[str]:
    """The GPUs of a register annotation; empty if there is none."""
    return {gpu.uuid for gpu in read_register(text)}

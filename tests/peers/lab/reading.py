"""What HAMi's scheduler has read of the Node, as far as it lets others see that.

Before 2.8 it looks every 15 s, and reads only where the handshake is none of its own; it answers
with `Requesting_`, and after a minute without an answer with `Deleted_`. Later ones look as often,
but do not always show that they have read: tests wait for their pods alone, unless other GPUs were
read than the Node has now.
Source: HAMi v2.7.1 and v2.10 pkg/scheduler/scheduler.go, RegisterFromNodeAnnotations.
"""

from typing import Final

from agent.codec.node_report import read_register
from agent.core.cluster import annotations
from tests.peers.lab.api import Watched
from tests.peers.lab.identities import NODE
from tests.peers.lab.part import Part
from tests.peers.lab.releases import Release

WITHIN: Final = 75.0
"""Seconds for a sign of life (every 30 s), a look (every 15 s), and some."""


class Reading:
    """Follows the handshake in the watch of the nodes. `forget` before the watch forgets."""

    def __init__(self, release: Release, nodes: Watched, scheduler: Part) -> None:
        self._release = release
        self._nodes = nodes
        self._scheduler = scheduler
        self._seen = 0
        self._handshake = ""
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
        return pid != self._scheduler.pid or not now or _uuids(text) == now

    def _notes(self) -> dict[str, str]:
        node = self._nodes.objects.get(NODE)
        return (node["metadata"].get("annotations") or {}) if node else {}

    def _look(self) -> None:
        history = self._nodes.history.get(NODE, [])
        for one in history[self._seen :]:
            notes = one.object["metadata"].get("annotations") or {}
            handshake = notes.get(annotations.HANDSHAKE, "")
            if handshake == self._handshake:
                continue
            self._handshake = handshake
            if handshake.startswith("Requesting"):
                self._read = self._scheduler.pid, notes.get(annotations.REGISTER)
            elif handshake.startswith("Deleted"):
                self._read = None
        self._seen = len(history)


def _uuids(text: str | None) -> set[str]:
    """The GPUs of a register annotation; empty if there is none."""
    return {gpu.uuid for gpu in read_register(text)}

"""Watches the kubelet's directory and publishes the present kubelet instance."""

from collections.abc import Callable

from agent.core.errors import KubeletError
from agent.core.ports import SocketWatch
from agent.core.state.holdings import KubeletEpoch
from agent.kit.cell import Cell


class KubeletWatch:
    """Sole writer of `epoch`: the present kubelet instance; None: there is no kubelet socket.

    `heard` is called with the name of each file that was created or removed; empty: any file.
    """

    def __init__(self, watch: SocketWatch, heard: Callable[[str], None] = lambda _: None) -> None:
        self._watch = watch
        self._heard = heard
        self.epoch: Cell[KubeletEpoch | None] = Cell(None)

    async def run(self) -> None:
        """Follow the kubelet's directory for ever. Raises KubeletError when the watch ends."""
        async for name in self._watch.changes():
            self._heard(name)
            self.epoch.set(self._watch.epoch())
        raise KubeletError("the watch of the kubelet's directory ended")

    def now(self) -> KubeletEpoch | None:
        """The kubelet instance, read from its socket at this moment."""
        try:
            return self._watch.epoch()
        except KubeletError:
            return self.epoch.value

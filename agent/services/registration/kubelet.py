"""The one watch of the kubelet's directory, and which kubelet is there.

Sole writer of its epoch, which changes when its socket is re-created.
"""

from collections.abc import Callable

from agent.core.errors import KubeletError
from agent.core.ports import SocketWatch
from agent.core.state.holdings import KubeletEpoch
from agent.kit.cell import Cell


class KubeletWatch:
    """Publishes the life of the kubelet that is there now, None while there is none.

    `heard` is told which name came or went, and the empty one where any may have.
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
        raise KubeletError("the watch of the kubelet's directory came to an end")

    def now(self) -> KubeletEpoch | None:
        """The kubelet's socket looked at now: what an answer is stamped with."""
        try:
            return self._watch.epoch()
        except KubeletError:
            return self.epoch.value

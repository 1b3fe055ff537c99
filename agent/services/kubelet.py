"""Which kubelet is there: sole writer of its epoch, which changes when its socket is re-created."""

from agent.core.errors import KubeletError
from agent.core.holdings import KubeletEpoch
from agent.core.ports import SocketWatch
from agent.kit.cell import Cell


class KubeletWatch:
    """Publishes the life of the kubelet that is there now, None while there is none."""

    def __init__(self, watch: SocketWatch) -> None:
        self._watch = watch
        self.epoch: Cell[KubeletEpoch | None] = Cell(None)

    async def run(self) -> None:
        """Follow the kubelet's directory for ever. Raises KubeletError when the watch ends."""
        async for _ in self._watch.changes():
            self.epoch.set(self._watch.epoch())
        raise KubeletError("the watch of the kubelet's directory came to an end")

    def now(self) -> KubeletEpoch | None:
        """The kubelet's socket looked at now: what an answer is stamped with."""
        try:
            return self._watch.epoch()
        except KubeletError:
            return self.epoch.value

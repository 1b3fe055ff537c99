"""The kubelet's rounds through the dead containers of a pod whose records it has lost.

It starts them in the order of the spec, and goes on when one is refused. A refused one it leaves
alone for a while, each for another while: so who is next is certain only right after a refusal
whose container is known, or while nothing was refused at all.
"""

import asyncio
import dataclasses
import datetime as dt
from collections.abc import Container, Iterable, Mapping

from agent.core.candidates import has_changed
from agent.core.holdings import KubeletEpoch
from agent.core.ledger import Ledger, Row
from agent.core.pods import PodTable, PodUid

ROUND = 5.0
"""Seconds within which the kubelet has asked for the others: it takes milliseconds, and it comes
back to a refused container after 8 s at the earliest."""

FIRST_ADMISSION = dt.timedelta(seconds=1)
"""A kubelet asks for nothing before that, after its socket appeared."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Refused:
    """The container of a pod that was refused last, on the loop's clock."""

    container: str
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Late:
    """Pods in doubt where the kubelet may have been refused before this process was there.

    `known`: those in doubt whatever their state; `certain`: those of which it asks just now.
    """

    ledger: Ledger
    table: PodTable
    since: dt.datetime
    known: frozenset[PodUid]
    certain: frozenset[PodUid]

    def __contains__(self, uid: object) -> bool:
        if uid in self.known:
            return True
        if uid in self.certain or not any(row.key.pod_uid == uid for row in self.ledger.rows):
            return False
        pod = self.table.pods.get(PodUid(str(uid)))
        return pod is None or any(has_changed(one, self.since) for one in pod.containers)


class Rounds:
    """What is known of them, for the kubelet that is there now. `started`: this process."""

    def __init__(self, started: dt.datetime) -> None:
        self._started = started
        self._epoch = KubeletEpoch()
        self._refused: dict[PodUid, _Refused] = {}
        self._doubted: set[PodUid] = set()

    def refused(self, row: Row, epoch: KubeletEpoch) -> None:
        """A container that had been answered before was refused."""
        self._meet(epoch)
        now = asyncio.get_running_loop().time()
        self._refused[row.key.pod_uid] = _Refused(row.key.container, now)

    def doubt(self, pods: Iterable[PodUid], epoch: KubeletEpoch) -> None:
        """A dead container of one of these was refused; nobody knows of which, and which one."""
        self._meet(epoch)
        self._doubted.update(pods)

    def asked_last(self, epoch: KubeletEpoch) -> Mapping[PodUid, str]:
        """By pod, the container behind which the kubelet goes on just now."""
        self._meet(epoch)
        return {pod: last.container for pod, last in self._refused.items() if self._is_now(last)}

    def in_doubt(self, epoch: KubeletEpoch, ledger: Ledger, table: PodTable) -> Container[PodUid]:
        """Pods of whose dead containers nobody knows which is next.

        Each Allocate asks for them, and hardly ever for one of them: the rows are not gone through.
        """
        self._meet(epoch)
        self._forget_all_that_went(ledger, table)
        past = {pod for pod, last in self._refused.items() if not self._is_now(last)}
        known = frozenset(self._doubted | past)
        if not self._came_late(epoch):
            return known
        return _Late(ledger, table, epoch.since, known, frozenset(self.asked_last(epoch)))

    def _forget_all_that_went(self, ledger: Ledger, table: PodTable) -> None:
        """A pod in doubt may have no row: it was started without being asked for."""
        marked = self._doubted | self._refused.keys()
        if marked:
            left = {row.key.pod_uid for row in ledger.rows if row.key.pod_uid in marked}
            self._doubted &= left | table.pods.keys()
            self._refused = {pod: last for pod, last in self._refused.items() if pod in left}

    def _meet(self, epoch: KubeletEpoch) -> None:
        """Of a new kubelet's rounds nothing is known."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._refused.clear()
            self._doubted.clear()

    def _came_late(self, epoch: KubeletEpoch) -> bool:
        """Whether the kubelet may have been refused before this process was there."""
        return self._started - epoch.since > FIRST_ADMISSION

    def _is_now(self, last: _Refused) -> bool:
        return asyncio.get_running_loop().time() - last.at < ROUND

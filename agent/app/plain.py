"""The half that loads behind the registration in plain mode: answers, and no API server at all."""

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from agent.app.adapters import Adapters
from agent.app.front import Front
from agent.core.allocation.plain import PlainSettings
from agent.core.cluster.pods import PodUid
from agent.core.node.readiness import Check
from agent.core.ports import KubeletHolds, Witness
from agent.host.kubelet_records import KubeletRecordsFile
from agent.host.podresources import PodResourcesWitness
from agent.services.allocation.plain import PlainAllocation, PlainViews
from agent.services.allocation.storage import Storage
from agent.services.reconcile.plain import PlainBooks, PlainPeers, PlainReconcile
from agent.services.report.announce import NoticeLog
from agent.settings.sections import Settings


@dataclasses.dataclass(frozen=True, slots=True)
class PlainBack:
    """Answers, and the ledger's agreement with the kubelet."""

    allocation: PlainAllocation
    reconcile: PlainReconcile
    announcer: NoticeLog

    @property
    def runs(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """Its standing activities by the names of their tasks."""
        return {"plain": self.reconcile.run, "announcer": self.announcer.run}

    @property
    def clients(self) -> tuple[()]:
        """What has to be loaded before the first answer: nothing."""
        return ()

    def checks(self) -> tuple[Check, ...]:
        """What readiness is made of, beyond what the first half knows."""
        return ()


@contextlib.asynccontextmanager
async def open_plain(
    settings: Settings, plain: PlainSettings, adapters: Adapters, front: Front
) -> AsyncIterator[PlainBack]:
    """Open its adapters and join its services; close them at the end."""
    witness = PodResourcesWitness(settings.paths.pod_resources_socket)
    records = KubeletRecordsFile(settings.paths.plugins, adapters.worker)
    taken: set[PodUid] = set()
    facts = front.facts
    views = PlainViews(
        inventory=facts.inventory,
        ledger=front.state.ledger,
        edits=facts.edits,
        taken=taken,
        epoch=front.knowing.kubelet.now,
        recorded=records.held,
    )
    allocation = PlainAllocation(
        views=views,
        storage=Storage(front.state.commit, adapters.hooks),
        settings=plain,
        clock=adapters.clock,
        chance=adapters.random,
    )
    with contextlib.closing(witness):
        yield PlainBack(
            allocation=allocation,
            reconcile=plain_reconcile(settings, adapters, front, (witness, records), taken),
            announcer=NoticeLog(front.notices),
        )


def plain_reconcile(
    settings: Settings,
    adapters: Adapters,
    front: Front,
    kubelet: tuple[Witness, KubeletHolds],
    taken: set[PodUid],
) -> PlainReconcile:
    """The reconcile of plain mode; in hami mode it looks after what plain mode has left."""
    witness, holds = kubelet
    return PlainReconcile(
        books=PlainBooks(
            ledger=front.state.ledger,
            epoch=front.knowing.kubelet.epoch,
            resource=front.facts.resource,
            alone=settings.plain is not None,
        ),
        peers=PlainPeers(
            witness=witness,
            holds=holds,
            hooks=adapters.hooks,
            clock=adapters.clock,
            calls=front.allocator.calls,
            chance=adapters.random,
        ),
        commit=front.state.commit,
        taken=taken,
    )

"""The back half in plain mode, which loads after Register: answers without an API server."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import msgspec

from agent.app.adapters import Adapters
from agent.app.front import Front
from agent.app.usage import UsageServices, join_usage
from agent.core.allocation.plain import PlainSettings
from agent.core.cluster.pods import PodTable
from agent.core.node.readiness import Check
from agent.core.reconcile.by_kubelet import judge_by_kubelet
from agent.host.kubelet_records import KubeletRecordsFile
from agent.host.podresources import PodResourcesWitness
from agent.kit.cell import Cell
from agent.services.allocation.by_kubelet import KubeletPeers, KubeletShares, KubeletViews
from agent.services.allocation.service import Allocation
from agent.services.allocation.storage import Storage
from agent.services.reconcile.changes import unread
from agent.services.reconcile.service import (
    Reconcile,
    ReconcilePeers,
    ReconcileRule,
    ReconcileViews,
)
from agent.services.report.announce import NoticeLog
from agent.settings.sections import Settings


class PlainBack(msgspec.Struct, frozen=True):
    """The services of plain mode: answers, and the reconcile with the kubelet."""

    allocation: Allocation
    reconcile: Reconcile
    announcer: NoticeLog
    usage: UsageServices

    @property
    def runs(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """Its standing activities by task name."""
        return {
            "reconcile": self.reconcile.run,
            "announcer": self.announcer.run,
            **self.usage.runs,
        }

    @property
    def clients(self) -> tuple[()]:
        """The clients to load before the first answer: none."""
        return ()

    def checks(self) -> tuple[Check, ...]:
        """The readiness checks of the back half: none."""
        return ()


@contextlib.asynccontextmanager
async def open_plain(
    settings: Settings, plain: PlainSettings, adapters: Adapters, front: Front
) -> AsyncIterator[PlainBack]:
    """Open the adapters of plain mode and join its services; close them at the end."""
    witness = PodResourcesWitness(settings.paths.pod_resources_socket)
    records = KubeletRecordsFile(settings.paths.plugins, adapters.worker)
    facts = front.facts
    source = KubeletShares(
        KubeletViews(facts.inventory, front.state.ledger, facts.edits, front.knowing.kubelet.now),
        KubeletPeers(records, adapters.hooks, adapters.clock, adapters.random, front.allocator.lag),
        plain,
    )
    storage = Storage(front.state.commit, adapters.hooks)
    reconcile = Reconcile(
        views=ReconcileViews(
            Cell(PodTable(synced=True)),
            front.state.ledger,
            front.knowing.kubelet.epoch,
            source.calls.taken,
            front.endpoint.rivals.gone,
        ),
        peers=ReconcilePeers(
            witness, records, adapters.hooks, adapters.clock, front.allocator.calls
        ),
        rule=ReconcileRule(
            judge_by_kubelet,
            resource=lambda: facts.resource.value,
            adopt=unread,
            within=None,
            sweeps=False,
        ),
        commit=front.state.commit,
    )
    with contextlib.closing(witness):
        yield PlainBack(
            Allocation(source, storage, front.notices.say, front.refused),
            reconcile,
            NoticeLog(front.notices),
            join_usage(settings, adapters, front),
        )

"""Makes the ledger rows of answered containers. A row's edits are made once and kept in it."""

import asyncio
from collections.abc import Callable

import msgspec
import structlog

from agent.core.allocation.container_order import pair_groups
from agent.core.allocation.evidence import Grant
from agent.core.containers.container_edits import EditRequest, container_edits, cuda_order
from agent.core.containers.edits import EditSettings, GrantedShare, HookFacts
from agent.core.errors import AgentError, Refusal, RefusalReason
from agent.core.inventory.inventory import Inventory
from agent.core.inventory.share import Share
from agent.core.inventory.slices import SliceId
from agent.core.ports import Clock, HookDirs
from agent.core.reconcile.findings import Adoption
from agent.core.reconcile.pace import DEADLINE
from agent.core.state.holdings import KubeletEpoch
from agent.core.state.ledger import ContainerKey, Holder, Row
from agent.kit.cell import Cell

log = structlog.get_logger(__name__)


class Rows:
    """Makes rows. `edits` also has the resource name; `epoch`: the present kubelet instance."""

    def __init__(
        self,
        *,
        inventory: Cell[Inventory],
        edits: Cell[EditSettings],
        hooks: HookDirs,
        epoch: Callable[[], KubeletEpoch],
        clock: Clock,
    ) -> None:
        self._inventory = inventory
        self._edits = edits
        self._hooks = hooks
        self._epoch = epoch
        self._clock = clock

    def granted(
        self, grant: Grant, ids: tuple[SliceId, ...], facts: HookFacts, *, offered: bool
    ) -> Row:
        """The row of a grant. A replay keeps its answer and gets the ids of this call."""
        if grant.replay is not None:
            return msgspec.structs.replace(
                grant.replay,
                slice_ids=tuple(sorted(ids)),
                answered_at=self._clock.now(),
                epoch=self._epoch(),
                confirmed=False,
                offered=offered,
            )
        found = Adoption(grant.candidate.pod, grant.candidate.container, ids)
        row = self._first(found, (grant.group, grant.shares), facts)
        return msgspec.structs.replace(row, offered=offered, lock=grant.lock)

    async def adopted(self, found: Adoption) -> Row | None:
        """The row of a container that was answered and that the ledger does not know.

        Another agent answered it, or the ledger was lost. The scheduler's annotation says what it
        holds. If the kubelet has no ids for it, the kubelet lost its checkpoint and may ask again.
        None: the annotation cannot be read, or names a GPU that is not on this node.
        """
        try:
            async with asyncio.timeout(DEADLINE):
                facts = await self._hooks.facts()
            paired = pair_groups(found.pod.groups or (), found.pod.asking(found.container.resource))
            for pair in paired:
                if pair.container == found.container.name:
                    group = (pair.group_index, pair.shares)
                    row = self._first(found, group, facts)
                    epoch = row.epoch if found.ids else KubeletEpoch()
                    return msgspec.structs.replace(row, confirmed=bool(found.ids), epoch=epoch)
        except (AgentError, TimeoutError) as error:
            why = str(error) or "out of time"
            log.warning("ledger.not_adopted", pod=found.pod.name, err=why)
        return None

    def _first(
        self,
        found: Adoption,
        group: tuple[int, tuple[Share, ...]],
        facts: HookFacts,
    ) -> Row:
        """A new row, with its edits. `group`: its position in `…-allocated`, and its shares."""
        pod, container = found.pod, found.container
        number, shares = group
        granted = cuda_order(map(self._share, shares))
        request = EditRequest(
            pod_uid=pod.uid,
            container=container.name,
            control_disabled=container.control_disabled,
            shares=granted,
        )
        return Row(
            key=ContainerKey(pod.uid, container.name),
            holder=Holder(pod.namespace, pod.name, container.name),
            role=container.role,
            group=number,
            shares=tuple(grant.share for grant in granted),
            slice_ids=tuple(sorted(found.ids)),
            edits=container_edits(request, self._edits.value, facts),
            answered_at=self._clock.now(),
            epoch=self._epoch(),
            resource=container.resource,
            priority=container.priority,
        )

    def _share(self, share: Share) -> GrantedShare:
        gpu = self._inventory.value.find(share.uuid)
        if gpu is None:  # the inventory changed between the decision and here
            raise Refusal(
                RefusalReason.UNKNOWN_GPU,
                f"GPU {share.uuid} was removed during this call; create the pod again.",
                transient=True,
            )
        return GrantedShare(share, gpu.gpu.pci, gpu.registered_mib, gpu.gpu.minor, gpu.gpu.index)

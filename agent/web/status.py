"""Renders the facts of the agent as the documents of `/api/v1`."""

import datetime as dt
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from agent.allocate.room import promised, takes_room
from agent.cluster import CORDON, NodeView, PodTable
from agent.hami.region import RegionState
from agent.ledger import ContainerKey, JournalEntry, Ledger, Row
from agent.model import MIB, NO_INDEX, GpuUuid, Inventory, Sampled, SharedGpu, SliceList
from agent.node.devices import read_cordon
from agent.node.findings import Check, is_ready
from agent.status import (
    AllocationStatus,
    CheckStatus,
    ContainerHistory,
    Entry,
    GpuStatus,
    NodeStatus,
    SettingStatus,
    ShareStatus,
    StatusDocument,
    UseHistory,
    lock_status,
)
from agent.usage import ContainerUse

PERIOD: Final = 30
"""Seconds of one value of the history."""
PERIODS: Final = 30


class StatusFacts(msgspec.Struct, frozen=True):
    """What the documents, the page and the metrics are made of, read at one moment.

    `about`: what does not come from the other values. `node`: the Node as the watch last showed
    it; None: not seen. `gone`: the GPUs that left the inventory, the last first. `newest` and
    `history`: samples of a GPU. `used` and `past`: what a container uses. `settings`: those in
    force. `pods` tells which containers have ended. A standby knows only `about` and `checks`.
    """

    now: dt.datetime
    about: NodeStatus
    checks: Sequence[Check] = ()
    node: NodeView | None = None
    inventory: Inventory = msgspec.field(default_factory=Inventory)
    gone: Sequence[SharedGpu] = ()
    slices: SliceList = msgspec.field(default_factory=SliceList)
    ledger: Ledger = msgspec.field(default_factory=Ledger)
    newest: Callable[[GpuUuid], Sampled | None] = lambda _: None
    history: Callable[[GpuUuid], Sequence[Sampled]] = lambda _: ()
    used: Callable[[ContainerKey], ContainerUse | None] = lambda _: None
    past: Callable[[ContainerKey], Mapping[GpuUuid, Sequence[Sampled]]] = lambda _: {}
    changes: Sequence[JournalEntry] = ()
    refusals: Sequence[JournalEntry] = ()
    journal_since: dt.datetime | None = None
    settings: Callable[[], tuple[SettingStatus, ...]] = tuple
    pods: PodTable = msgspec.field(default_factory=PodTable)


def status_of(facts: StatusFacts) -> StatusDocument:
    """All of the node."""
    return StatusDocument(
        node=node_of(facts),
        gpus=gpus_of(facts),
        allocations=allocations_of(facts),
        refusals=entries_of(facts.refusals),
        changes=entries_of(facts.changes),
        journal_since=facts.journal_since,
    )


def node_of(facts: StatusFacts) -> NodeStatus:
    """The node, the state of its agent, and HAMi's lock."""
    checks = tuple(
        CheckStatus(
            name=check.name,
            ok=check.ok,
            required=check.required,
            text="" if check.ok else check.text,
        )
        for check in facts.checks
    )
    annotations = facts.node.annotations if facts.node else {}
    return msgspec.structs.replace(
        facts.about,
        ready=is_ready(facts.checks),
        driver=facts.inventory.driver_version,
        lock=lock_status(annotations),
        checks=checks,
    )


def gpus_of(facts: StatusFacts) -> tuple[GpuStatus, ...]:
    """All GPUs of the inventory, in its order."""
    annotations = facts.node.annotations if facts.node else {}
    closed = read_cordon(annotations.get(CORDON))
    held = facts.ledger.living(facts.pods).held_ids()
    listed = {group.uuid: len(group.ids) for group in facts.slices.groups}

    def one(shared: SharedGpu) -> GpuStatus:
        gpu, health = shared.gpu, shared.health
        use = promised(facts.ledger, facts.pods, shared)
        newest = facts.newest(gpu.uuid)
        return GpuStatus(
            uuid=gpu.uuid,
            index=None if gpu.index == NO_INDEX else gpu.index,
            model=gpu.name,
            pci=gpu.pci,
            numa=gpu.numa,
            mode=shared.mode,
            condition=health.condition.value,
            serving=facts.inventory.offers(shared),
            cordoned=gpu.uuid in closed,
            since=health.since,
            cause=health.cause,
            action=health.action,
            runbook=health.runbook,
            text=health.text,
            obstacles=facts.inventory.obstacles(shared),
            slices=listed.get(gpu.uuid, 0),
            slices_held=len(held.get(gpu.uuid, ())),
            memory_mib=gpu.memory_mib,
            sellable_mib=shared.registered_mib,
            promised_mib=use.memory_mib,
            sellable_cores=shared.core_percent,
            promised_cores=use.core_percent,
            used_mib=newest.sample.used_mib if newest else None,
            gpu_percent=newest.sample.gpu_percent if newest else None,
            history=history_of(facts.history(gpu.uuid), facts.now),
        )

    return tuple(map(one, facts.inventory.gpus))


def allocations_of(facts: StatusFacts) -> tuple[AllocationStatus, ...]:
    """What each container holds, by namespace, pod and container."""
    labels = gpu_labels(facts.inventory)
    rows = (row for row in facts.ledger.rows if not row.adopted or row.holder)
    found = [_allocation(row, labels, facts) for row in rows]
    return tuple(sorted(found, key=lambda one: (one.namespace, one.pod, one.container)))


def container_histories_of(facts: StatusFacts) -> tuple[ContainerHistory, ...]:
    """What each container used of each of its GPUs in the last 15 minutes, as far as known."""
    labels = gpu_labels(facts.inventory)
    return tuple(
        ContainerHistory(
            namespace=row.namespace,
            pod=row.pod,
            container=row.holder.container if row.holder else "",
            gpu=labels.get(uuid, str(uuid)),
            uuid=uuid,
            history=history,
        )
        for row in facts.ledger.rows
        for uuid, samples in facts.past(row.key).items()
        if (history := history_of(samples, facts.now)) is not None
    )


def entries_of(entries: Iterable[JournalEntry]) -> tuple[Entry, ...]:
    """Changes or refusals."""
    return tuple(msgspec.convert(entry, Entry, from_attributes=True) for entry in entries)


def history_of(samples: Sequence[Sampled], now: dt.datetime) -> UseHistory | None:
    """The means of the last PERIODS periods, in steps of the clock; None without a sample."""
    if not samples:
        return None
    until = dt.datetime.fromtimestamp((now.timestamp() // PERIOD + 1) * PERIOD, dt.UTC)
    gpu: list[list[int]] = [[] for _ in range(PERIODS)]
    used: list[list[int]] = [[] for _ in range(PERIODS)]
    for sampled in samples:
        age = int((until - sampled.at).total_seconds()) // PERIOD
        if 0 <= age < PERIODS:
            place = PERIODS - 1 - age
            if sampled.sample.gpu_percent is not None:
                gpu[place].append(sampled.sample.gpu_percent)
            if sampled.sample.used_mib is not None:
                used[place].append(sampled.sample.used_mib)
    return UseHistory(
        period_seconds=PERIOD,
        until=until,
        gpu_percent=tuple(map(_mean, gpu)),
        used_mib=tuple(map(_mean, used)),
    )


def _mean(values: Sequence[int]) -> int | None:
    return round(statistics.fmean(values)) if values else None


def _allocation(row: Row, labels: Mapping[GpuUuid, str], facts: StatusFacts) -> AllocationStatus:
    ended = not takes_room(row, facts.pods)
    pod = facts.pods.pods.get(row.key.pod_uid)
    use = None if ended else facts.used(row.key)
    used = {gpu.uuid: gpu for gpu in use.gpus} if use else {}

    def share(uuid: GpuUuid, memory_mib: int | None, cores: int | None) -> ShareStatus:
        of = used.get(uuid)
        return ShareStatus(
            gpu=labels.get(uuid, str(uuid)),
            uuid=uuid,
            memory_mib=memory_mib,
            cores=cores,
            used_mib=of.memory.total // MIB if of else None,
            gpu_percent=of.sm_percent if of else None,
        )

    if row.shares:
        shares = tuple(share(one.uuid, one.memory_mib, one.core_percent) for one in row.limits)
    else:
        shares = tuple(share(uuid, None, None) for uuid in row.gpus)
    is_read = use is not None and use.state is RegionState.READABLE
    return AllocationStatus(
        namespace=row.namespace,
        pod=row.pod,
        container=row.holder.container if row.holder else "",
        shares=shares,
        slices=row.slice_ids,
        since=row.answered_at,
        confirmed=row.confirmed,
        mismatched=row.mismatched,
        ended=ended,
        decided_by=row.decided_by.value,
        last_kernel=use.last_kernel if use else None,
        processes=use.processes if use and is_read else None,
        unread=use.reason if use else "",
        unkept=pod.unkept(row.key.container) if pod and row.limits and not ended else "",
    )


def gpu_labels(inventory: Inventory, gone: Iterable[SharedGpu] = ()) -> Mapping[GpuUuid, str]:
    """The value of the label `gpu` for each GPU, also for those that are `gone`.

    It is the index, also after the GPU is gone; the UUID if it has none or another GPU has it now.
    """
    taken: set[int] = set()
    named: dict[GpuUuid, str] = {}
    for gpu in (*sorted(inventory.gpus, key=lambda gpu: not gpu.present), *gone):
        named[gpu.uuid] = str(gpu.uuid) if gpu.gpu.index in taken else gpu.gpu.label
        taken.add(gpu.gpu.index)
    return named


def labelled(inventory: Inventory) -> list[tuple[str, SharedGpu]]:
    """The GPUs in their order, each with its label."""
    labels = gpu_labels(inventory)
    return [(labels[gpu.uuid], gpu) for gpu in inventory.gpus]

"""The document of a node's status, as the agent serves it and as its objects show it."""

import datetime as dt
import operator
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec

from agent.allocate.match import pair_groups
from agent.allocate.room import promised, takes_room
from agent.cluster import CORDON, MUTEX_LOCK, REGISTER, NodeView, PodTable, PodView, Role
from agent.errors import MalformedText, Refusal, cap
from agent.hami.annotations import RegisteredGpu, decode_either, decode_node_lock
from agent.hami.region import RegionState
from agent.ledger import (
    ContainerEdits,
    ContainerKey,
    Decider,
    Holder,
    JournalEntry,
    KubeletEpoch,
    Ledger,
    Row,
)
from agent.model import (
    MIB,
    NO_INDEX,
    Cause,
    Condition,
    Gpu,
    GpuSample,
    GpuUuid,
    Health,
    Inventory,
    Sampled,
    SharedGpu,
    SliceList,
)
from agent.node import Check, is_ready, read_cordon
from agent.settle import REJECTED
from agent.usage import ContainerUse

# The documents of `/api/v1` as JSON, for the agent that writes them and the commands that read.
#
# Keys are in camelCase. A reader ignores unknown keys and fills in missing ones, so that an agent
# and a command of neighbouring versions understand each other.

API_VERSION: Final = "hami-agent/v1"
RELEASED: Final = "released"
FIRST_YEAR: Final = 1970
"""An answer of a time before it is of no agent: ages by it would be nonsense."""

Moment: TypeAlias = Annotated[dt.datetime, msgspec.Meta(tz=True)]
"""A time with its offset: one without cannot be compared with others."""

Mib: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
"""MiB; a larger number in a document of others overflows where a reader makes GiB of it."""


class Document(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """The base of all documents."""


class LockStatus(Document, frozen=True):
    """HAMi's lock on the Node. `holder`: `namespace/pod`, empty if the lock names none.

    `since`: None if the lock cannot be read; `holder` is its text then.
    """

    since: Moment | None
    holder: str = ""


class NodeStatus(Document, frozen=True):
    """The node and its agent. `version` and `started_at` are absent where no agent answered.

    - `scheduler`: `hami`, or `none` if the kubelet decides alone.
    - `checks`: all readiness checks, with a text if they fail; `ready`: no required one fails.
    - `kubelet`: the state of the registration as a phrase. `kubelet_since`: when its socket
      appeared; None: not known.
    """

    name: str
    version: str = ""
    started_at: Moment | None = None
    ready: bool | None = None
    scheduler: str = "hami"
    resource: str = ""
    driver: str = ""
    kubelet: str = ""
    kubelet_since: Moment | None = None
    observe: bool = False
    profiles: tuple[str, ...] = ()
    split_count: int | None = None
    memory_scaling: float | None = None
    core_scaling: float | None = None
    lock: LockStatus | None = None
    checks: tuple[Check, ...] = ()


class UseHistory(Document, frozen=True):
    """Means of equal periods, the oldest first. None: nothing was sampled in that period."""

    period_seconds: int
    until: Moment
    gpu_percent: tuple[int | None, ...] = ()
    used_mib: tuple[int | None, ...] = ()


class GpuStatus(Document, frozen=True):
    """One GPU.

    - `index`: None if it is not known. `condition`: ok, watch, bad, lost or unmonitored.
    - `serving`: new containers may get it. `obstacles`: why not, besides its health.
    - `offered_until`: when that ends for a GPU that does not answer, unless it does; else None.
    - `slices_held`: by containers that work on it. The kubelet may have booked another GPU's.
    - `memory_mib`: physical; `sellable_mib`: after scaling; `promised_mib`: to pods.
    - `used_mib`, `gpu_percent`: measured now; None if the driver does not say.
    """

    uuid: str
    index: int | None = None
    model: str = ""
    pci: str = ""
    numa: int | None = None
    mode: str = ""
    condition: str = ""
    serving: bool = True
    cordoned: bool = False
    since: Moment | None = None
    cause: str = ""
    action: str = ""
    runbook: str = ""
    text: str = ""
    obstacles: tuple[str, ...] = ()
    offered_until: Moment | None = None
    slices: int = 0
    slices_held: int = 0
    memory_mib: Mib | None = None
    sellable_mib: Mib = 0
    promised_mib: Mib = 0
    sellable_cores: int = 0
    promised_cores: int = 0
    used_mib: Mib | None = None
    gpu_percent: int | None = None
    history: UseHistory | None = None

    @property
    def name(self) -> str:
        """The index; the UUID if that is not known."""
        return self.uuid if self.index is None else str(self.index)

    @property
    def health(self) -> str:
        """The condition in one word, which says of a released GPU that a person released it."""
        return RELEASED if self.cause == Cause.RELEASED else self.condition

    @property
    def free_mib(self) -> int:
        """MiB that a new pod can get here: none without a slice or a share of compute left."""
        is_full = self.slices_held >= self.slices or 0 < self.sellable_cores <= self.promised_cores
        if is_full or self.cordoned or not self.serving:
            return 0

        return max(0, self.sellable_mib - self.promised_mib)


class ShareStatus(Document, frozen=True):
    """A part of one GPU. `memory_mib` 0: all of its memory; None: not limited.

    `used_mib`: memory that the container uses of it. `gpu_percent`: the share of the whole GPU's
    time in which its kernels ran; the sum over processes may exceed 100. None: not known.
    """

    gpu: str
    uuid: str
    memory_mib: Mib | None = None
    cores: int | None = None
    used_mib: Mib | None = None
    gpu_percent: int | None = None


class AllocationStatus(Document, frozen=True):
    """What one container holds.

    - `pod` and `namespace` are empty while the holder is not known.
    - `confirmed`: the present kubelet has recorded the answer; None: not known.
    - `mismatched`: the kubelet recorded slices of other GPUs.
    - `ended`: it runs no more, and its share counts no more in what is promised.
    - `last_kernel`: when a process or a kernel of the container last started on a GPU.
    - `processes`: how many of its processes use a GPU. `last_kernel` and `processes` are None if
      they are not known; `unread`: why, if a person should know.
    - `unkept`: why nothing keeps its limits; empty: HAMi-core does, or its pod is not known.
    """

    namespace: str
    pod: str
    container: str
    shares: tuple[ShareStatus, ...]
    slices: tuple[str, ...] = ()
    since: Moment | None = None
    confirmed: bool | None = None
    mismatched: bool = False
    ended: bool = False
    decided_by: str = "scheduler"
    last_kernel: Moment | None = None
    processes: int | None = None
    unread: str = ""
    unkept: str = ""


class SettingStatus(Document, frozen=True):
    """A setting in force. `pending`: it takes effect only at the next start."""

    key: str
    value: object
    origin: str
    pending: bool = False


class StatusDocument(Document, frozen=True):
    """All of a node. `journal_since`: refusals and changes before that time are not known.

    `standing`: the refusals whose pod is still there. None instead of `allocations`, `refusals`,
    `changes` or `standing`: the source does not know them.
    """

    node: NodeStatus
    gpus: tuple[GpuStatus, ...]
    allocations: tuple[AllocationStatus, ...] | None = None
    refusals: tuple[JournalEntry, ...] | None = None
    changes: tuple[JournalEntry, ...] | None = None
    journal_since: Moment | None = None
    standing: tuple[JournalEntry, ...] | None = None


class Envelope(Document, frozen=True):
    """An answer. `generated_at`: the time of the values in it."""

    api_version: str
    kind: str
    generated_at: Moment
    data: msgspec.Raw


D = TypeVar("D")


def names_of(gpu: GpuStatus) -> frozenset[str]:
    """The words that name a GPU: its UUID, and its index if that is known."""
    return frozenset({gpu.uuid} if gpu.index is None else {gpu.uuid, str(gpu.index)})


def envelope(kind: str, data: object, at: dt.datetime) -> bytes:
    """The answer with this data as JSON; `data` may be encoded already, as `msgspec.Raw`."""
    raw = data if isinstance(data, msgspec.Raw) else msgspec.Raw(msgspec.json.encode(data))
    return msgspec.json.encode(
        Envelope(api_version=API_VERSION, kind=kind, generated_at=at, data=raw)
    )


def open_envelope(content: bytes, kind: str, form: type[D]) -> tuple[D, dt.datetime]:
    """The data of an answer of that kind, and when it was made. Raises MalformedText."""
    try:
        found = msgspec.json.decode(content, type=Envelope)
        if found.api_version != API_VERSION or found.kind != kind:
            raise MalformedText(
                f"the answer is a {found.kind} of {found.api_version}; "
                f"expected a {kind} of {API_VERSION}"
            )

        if found.generated_at.year < FIRST_YEAR:
            raise MalformedText(f"the answer is of the year {found.generated_at.year}")

        return msgspec.json.decode(found.data, type=form), found.generated_at.astimezone(dt.UTC)
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise MalformedText(f"the answer is no {kind} of {API_VERSION}: {error}") from error


# Renders the facts of the agent as the documents of `/api/v1`.

PERIOD: Final = 30
"""Seconds of one value of the history."""

PERIODS: Final = 30
"""Values of a history: 15 minutes."""

COMPARED: Final = 200
"""Characters of a refusal that are looked for in a pod's status, of which only a part is kept."""


class StatusFacts(msgspec.Struct, frozen=True):
    """What the documents, the page and the metrics are made of, read at one moment.

    A standby knows only `about` and `checks`.
    """

    now: dt.datetime

    about: NodeStatus
    """What does not come from the other values."""

    checks: Sequence[Check] = ()

    node: NodeView | None = None
    """The Node as the watch last showed it; None: not seen."""

    inventory: Inventory = msgspec.field(default_factory=Inventory)

    gone: Sequence[SharedGpu] = ()
    """The GPUs that left the inventory, the last first."""

    slices: SliceList = msgspec.field(default_factory=SliceList)
    ledger: Ledger = msgspec.field(default_factory=Ledger)

    newest: Callable[[GpuUuid], Sampled | None] = lambda _: None
    history: Callable[[GpuUuid], Sequence[Sampled]] = lambda _: ()
    """Samples of a GPU."""

    used: Callable[[ContainerKey], ContainerUse | None] = lambda _: None
    """What a container uses."""

    changes: Sequence[JournalEntry] = ()
    refusals: Sequence[JournalEntry] = ()
    journal_since: dt.datetime | None = None
    """Those before that time are not known."""

    settings: Callable[[], tuple[SettingStatus, ...]] = tuple
    """Those in force."""

    pods: PodTable = msgspec.field(default_factory=PodTable)
    """Tells which containers have ended."""

    kubelet: KubeletEpoch | None = None
    """The present one; None: there is none, or it is not known."""

    driver_hang: float = 0.0
    """Seconds for which a GPU that does not answer is offered."""


def status_of(facts: StatusFacts) -> StatusDocument:
    """All of the node."""
    return StatusDocument(
        node=node_of(facts),
        gpus=gpus_of(facts),
        allocations=allocations_of(facts),
        refusals=tuple(facts.refusals),
        changes=tuple(facts.changes),
        journal_since=facts.journal_since,
        standing=standing_of(facts) if facts.pods.synced else None,
    )


def standing_of(facts: StatusFacts) -> tuple[JournalEntry, ...]:
    """The refusals whose pod is still there, the newest first: its status repeats the sentence."""
    messages = [pod.message for pod in facts.pods.pods.values() if pod.reason == REJECTED]
    found: dict[str, JournalEntry] = {}

    for entry in facts.refusals:
        if any(entry.text[:COMPARED] in message for message in messages):
            found.setdefault(entry.text, entry)  # a pod that is refused again is one

    return tuple(found.values())


def node_of(facts: StatusFacts) -> NodeStatus:
    """The node, the state of its agent, and HAMi's lock."""
    annotations = facts.node.annotations if facts.node else {}

    return msgspec.structs.replace(
        facts.about,
        ready=is_ready(facts.checks),
        driver=facts.inventory.driver_version,
        kubelet_since=facts.kubelet.since if facts.kubelet else None,
        lock=lock_status(annotations),
        checks=facts.checks,
    )


def _is_placed(row: Row) -> bool:
    """Whether the scheduler chose the GPUs, so that the kubelet's ids do not name them."""
    return row.decided_by is Decider.SCHEDULER and bool(row.shares)


def gpus_of(facts: StatusFacts) -> tuple[GpuStatus, ...]:
    """All GPUs of the inventory, in its order."""
    annotations = facts.node.annotations if facts.node else {}
    closed = read_cordon(annotations.get(CORDON))
    living = [row for row in facts.ledger.rows if takes_room(row, facts.pods)]
    held = Counter(share.uuid for row in living if _is_placed(row) for share in row.shares)
    # All others work on what the kubelet booked. Several rows may have the same ids, which count
    # once: of an init container, or of an answer that was not booked.
    booked = Ledger(tuple(row for row in living if not _is_placed(row))).held_ids
    held.update({uuid: len(ids) for uuid, ids in booked.items()})
    listed = {group.uuid: len(group.ids) for group in facts.slices.groups}

    hang = dt.timedelta(seconds=facts.driver_hang)
    found = []

    for shared in facts.inventory.gpus:
        gpu, health = shared.gpu, shared.health
        use = promised(facts.ledger, facts.pods, shared)
        newest = facts.newest(gpu.uuid)
        one = GpuStatus(
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
            offered_until=health.since + hang if health.silent and health.serving else None,
            slices=listed.get(gpu.uuid, 0),
            slices_held=held[gpu.uuid],
            memory_mib=gpu.memory_mib,
            sellable_mib=shared.registered_mib,
            promised_mib=use.memory_mib,
            sellable_cores=shared.core_percent,
            promised_cores=use.core_percent,
            used_mib=newest.sample.used_mib if newest else None,
            gpu_percent=newest.sample.gpu_percent if newest else None,
            history=history_of(facts.history(gpu.uuid), facts.now),
        )
        found.append(one)

    return tuple(found)


def allocations_of(facts: StatusFacts) -> tuple[AllocationStatus, ...]:
    """What each container holds, by namespace, pod and container."""
    labels = gpu_labels(facts.inventory)
    rows = (row for row in facts.ledger.rows if not row.adopted or row.holder)
    return tuple(
        sorted(
            (_allocation(row, labels, facts) for row in rows),
            key=operator.attrgetter("namespace", "pod", "container"),
        )
    )


def history_of(samples: Sequence[Sampled], now: dt.datetime) -> UseHistory | None:
    """The means of the last PERIODS periods, in steps of the clock; None without a sample."""
    if not samples:
        return None

    # Periods of the clock and not back from now: else each reader would see other means.
    until = dt.datetime.fromtimestamp((now.timestamp() // PERIOD + 1) * PERIOD, dt.UTC)

    periods: list[list[GpuSample]] = [[] for _ in range(PERIODS)]
    for sampled in samples:
        place = PERIODS - 1 - int((until - sampled.at).total_seconds()) // PERIOD
        if 0 <= place < PERIODS:
            periods[place].append(sampled.sample)

    def means(read: Callable[[GpuSample], int | None]) -> tuple[int | None, ...]:
        known = ([value for value in map(read, one) if value is not None] for one in periods)
        return tuple(round(statistics.fmean(one)) if one else None for one in known)

    return UseHistory(
        period_seconds=PERIOD,
        until=until,
        gpu_percent=means(lambda sample: sample.gpu_percent),
        used_mib=means(lambda sample: sample.used_mib),
    )


def _allocation(row: Row, labels: Mapping[GpuUuid, str], facts: StatusFacts) -> AllocationStatus:
    """What one container holds and uses. What an ended one used last is not said."""
    ended = not takes_room(row, facts.pods)
    pod = facts.pods.pods.get(row.key.pod_uid)
    use = None if ended else facts.used(row.key)
    used = {gpu.uuid: gpu for gpu in use.gpus} if use else {}

    limits: list[tuple[GpuUuid, int | None, int | None]] = [
        (one.uuid, one.memory_mib, one.core_percent) for one in row.limits
    ]
    shares = []

    for uuid, mib, cores in limits or [(uuid, None, None) for uuid in row.gpus]:
        of = used.get(uuid)
        share = ShareStatus(
            gpu=labels.get(uuid, str(uuid)),
            uuid=uuid,
            memory_mib=mib,
            cores=cores,
            used_mib=of.memory.total // MIB if of else None,
            gpu_percent=of.sm_percent if of else None,
        )
        shares.append(share)

    is_read = use is not None and use.state is RegionState.READABLE
    return AllocationStatus(
        namespace=row.namespace,
        pod=row.pod,
        container=row.holder.container if row.holder else "",
        shares=tuple(shares),
        slices=row.slice_ids,
        since=row.answered_at,
        confirmed=row.is_booked_by(facts.kubelet) if facts.kubelet else None,
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


def lock_status(annotations: Mapping[str, str]) -> LockStatus | None:
    """HAMi's lock on the Node; None if it is free."""
    text = annotations.get(MUTEX_LOCK)
    if text is None:
        return None

    try:
        lock = decode_node_lock(text)
    except MalformedText:
        return LockStatus(since=None, holder=cap(text))

    return LockStatus(since=lock.stamp, holder="/".join(lock.owner) if lock.owner else "")


# The status of a node as its objects at the API server show it, where no agent answers.

UNTOLD: Final = (
    "the Node's register annotation says that it is unhealthy; no condition GpuDegraded and no "
    "Event of the last hour that was read says why: read the log of its device plugin"
)

_CONDITIONS: Final = {
    "H-RELEASED": (Condition.UNMONITORED, Cause.RELEASED),
    "H-SILENT": (Condition.UNMONITORED, Cause.DRIVER),
    "H-LOST": (Condition.LOST, Cause.LOST),
}
"""What a GPU is that is not served, by the id of the reason; with each other one it is bad."""


def observed_status(
    node: NodeView,
    pods: Iterable[PodView],
    resource: str,
    now: dt.datetime,
    reasons: Sequence[str] = (),
) -> StatusDocument:
    """The node by its annotations, and its pods by theirs. What is used is not known.

    `reasons`: sentences about GPUs that are not well, the last first: of its condition GpuDegraded
    and of Events.

    Raises:
        MalformedText: the register annotation cannot be read.
    """
    text = node.annotations.get(REGISTER)
    registered = decode_either(text) if text else ()
    holding = [pod for pod in pods if pod.groups and not pod.terminal]
    facts = StatusFacts(
        now,
        NodeStatus(name=node.name, resource=resource, lock=lock_status(node.annotations)),
        node=node,
        inventory=Inventory(gpus=tuple(_observed_gpu(gpu, now, reasons) for gpu in registered)),
        ledger=Ledger(tuple(row for pod in holding for row in _observed_rows(pod, now))),
        pods=PodTable({pod.uid: pod for pod in holding}, synced=True),
    )

    # Since when, only an agent can say.
    changed = msgspec.structs.replace
    return StatusDocument(
        node=facts.about,
        gpus=tuple(
            changed(gpu, since=None, slices=one.split_count)
            for gpu, one in zip(gpus_of(facts), registered, strict=True)
        ),
        allocations=tuple(changed(one, since=None) for one in allocations_of(facts)),
    )


def _observed_gpu(gpu: RegisteredGpu, now: dt.datetime, reasons: Iterable[str]) -> SharedGpu:
    """The GPU as its Node reports it; its own memory and place on the bus are not reported."""
    health = Health(Condition.OK, now)
    if not gpu.healthy:
        # As `Gpu.title` and gpus_in_words() of agent.report name it.
        name = rf"(?:\({re.escape(gpu.uuid)}\)|\bGPUs (?:\d+, )*{gpu.index}\b)[^:]*"
        found = (re.search(rf"{name}: (.*?)(?=; GPU |$)", text) for text in reasons)
        text = next((one[1] for one in found if one), UNTOLD)
        runbook = text.rpartition("[")[2].rstrip("]")
        condition, cause = _CONDITIONS.get(runbook, (Condition.BAD, Cause.NONE))
        health = Health(condition, now, cause, text, serving=False)

    name = gpu.type_name.removeprefix("NVIDIA-")
    return SharedGpu(
        Gpu(gpu.uuid, gpu.index, name, None, "", gpu.numa),
        health,
        gpu.split_count,
        gpu.registered_mib,
        gpu.core_percent,
        gpu.type_name,
        gpu.mode,
    )


def _observed_rows(pod: PodView, now: dt.datetime) -> Iterator[Row]:
    """The rows that an agent has of a pod with this devices annotation."""
    groups = pod.groups or ()
    try:
        pairs = pair_groups(groups, pod.containers).items()
        named = [(name, shares) for name, (_, shares) in pairs]
    except Refusal:
        # Groups and containers do not fit together: the shares are held all the same.
        named = [("", group) for group in groups if group]

    roles = {container.name: container.role for container in pod.containers}

    for place, (name, shares) in enumerate(named):
        yield Row(
            ContainerKey(pod.uid, name or str(place)),
            Holder(pod.namespace, pod.name, name),
            shares,
            slice_ids=(),
            edits=ContainerEdits(),
            answered_at=now,
            epoch=KubeletEpoch(),
            role=roles.get(name, Role.APP),
            group=place,
        )

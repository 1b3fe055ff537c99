"""The status of a node: its document, how the facts of the agent become it, and its words."""

import datetime as dt
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec

from agent.allocate.room import promised
from agent.cluster import CORDON, MUTEX_LOCK, NodeView, PodTable
from agent.errors import MalformedText, cap
from agent.hami.annotations import decode_node_lock
from agent.health.judge import HealthSettings, cooled_at
from agent.kit.units import UNKNOWN, Column, age, gib, percent, some
from agent.ledger import ContainerKey, Decider, JournalEntry, KubeletEpoch, Ledger, Row
from agent.model import MIB, NO_INDEX, Cause, Condition, GpuSample, GpuUuid, Inventory, SliceList
from agent.node import Check, is_ready, read_cordon
from agent.settle import REJECTED
from agent.usage import ContainerUse

# The documents of `/api/v1` as JSON. A reader ignores unknown keys and fills in missing ones, so
# that an agent and a command of neighbouring versions understand each other.

API_VERSION: Final = "hami-agent/v1"
FIRST_YEAR: Final = 1970
"""An answer of a time before it is of no agent: ages by it would be nonsense."""
Moment: TypeAlias = Annotated[dt.datetime, msgspec.Meta(tz=True)]
"""A time with its offset."""
Mib: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
"""MiB; a larger number in a document of others overflows where a reader makes GiB of it."""


class Document(msgspec.Struct, frozen=True, rename="camel"):
    """The base of all documents; their keys are in camelCase."""


class LockStatus(Document, frozen=True):
    """HAMi's lock on the Node. `since`: None if it cannot be read; `holder` is its text then.

    `holder`: `namespace/pod`; empty if the lock names none.
    """

    since: Moment | None
    holder: str = ""


class NodeStatus(Document, frozen=True):
    """The node and its agent. `version` and `started_at` are absent where no agent answered.

    `scheduler`: `hami`, or `none` if the kubelet decides alone. `ready`: no required check fails.
    `kubelet`: the state of the registration as a phrase.
    """

    name: str
    version: str = ""
    started_at: Moment | None = None
    ready: bool | None = None
    scheduler: str = "hami"
    resource: str = ""
    driver: str = ""
    kubelet: str = ""
    observe: bool = False
    profiles: tuple[str, ...] = ()
    split_count: int | None = None
    memory_scaling: float | None = None
    core_scaling: float | None = None
    lock: LockStatus | None = None
    checks: tuple[Check, ...] = ()


class GpuStatus(Document, frozen=True):
    """One GPU. `condition`: ok, watch, bad, lost or unmonitored. None: it is not known.

    - `serving`: new containers may get it. `obstacles`: why not, besides its health.
    - `cooled_at`: when its cool-down ends, if it has one and no further bad report comes.
    - `slices_held`: by containers that work on it. The kubelet may have booked another GPU's.
    - `memory_mib`: physical; `sellable_mib`: after scaling; `promised_mib`: to pods.
    """

    uuid: str
    index: int | None = None
    model: str = ""
    pci: str = ""
    numa: int | None = None
    condition: str = ""
    serving: bool = True
    cordoned: bool = False
    since: Moment | None = None
    cooled_at: Moment | None = None
    cause: str = ""
    action: str = ""
    text: str = ""
    obstacles: tuple[str, ...] = ()
    slices: int = 0
    slices_held: int = 0
    memory_mib: Mib | None = None
    sellable_mib: Mib = 0
    promised_mib: Mib = 0
    sellable_cores: int = 0
    promised_cores: int = 0
    used_mib: Mib | None = None
    gpu_percent: int | None = None

    @property
    def name(self) -> str:
        """The index; the UUID if that is not known."""
        return self.uuid if self.index is None else str(self.index)

    @property
    def health(self) -> str:
        """The condition in one word, which says of a released GPU that a person released it."""
        return self.cause if self.cause == Cause.RELEASED else self.condition

    @property
    def free_mib(self) -> int:
        """MiB that a new pod can get here: none without a slice or a share of compute left."""
        is_full = self.slices_held >= self.slices or 0 < self.sellable_cores <= self.promised_cores
        if is_full or self.cordoned or not self.serving:
            return 0

        return max(0, self.sellable_mib - self.promised_mib)


class ShareStatus(Document, frozen=True):
    """A part of one GPU. `memory_mib` 0: all of its memory; None: not limited.

    `used_mib`, `gpu_percent`: of the GPU's memory and time; the sum of processes may exceed 100.
    """

    gpu: str
    uuid: str
    memory_mib: Mib | None = None
    cores: int | None = None
    used_mib: Mib | None = None
    gpu_percent: int | None = None


class AllocationStatus(Document, frozen=True):
    """What one container holds. `pod` and `namespace` are empty while they are not known.

    - `confirmed`: the present kubelet has recorded the answer; `mismatched`: with other GPUs.
    - `ended`: it runs no more, and its share counts no more in what is promised.
    - `last_kernel`: when a process or a kernel of it last started on a GPU; None: none was seen.
      `unread`: why its use is not known. `unkept`: why nothing keeps its limits.
    """

    namespace: str
    pod: str
    container: str
    shares: tuple[ShareStatus, ...]
    since: Moment | None = None
    confirmed: bool | None = None
    mismatched: bool = False
    ended: bool = False
    decided_by: str = "scheduler"
    last_kernel: Moment | None = None
    unread: str = ""
    unkept: str = ""


class SettingStatus(Document, frozen=True):
    """A setting in force. `pending`: it takes effect only at the next start."""

    key: str
    value: object
    origin: str
    pending: bool = False


class StatusDocument(Document, frozen=True):
    """All of a node. What is None, the source does not know.

    `journal_since`: refusals and changes before that time are not known. `standing`: the refusals
    whose pod is still there.
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


def envelope(kind: str, data: object, at: dt.datetime) -> bytes:
    """The answer with this data as JSON; `data` may be encoded already, as `msgspec.Raw`."""
    raw = data if isinstance(data, msgspec.Raw) else msgspec.Raw(msgspec.json.encode(data))
    return msgspec.json.encode(Envelope(API_VERSION, kind, at, raw))


def open_envelope(content: bytes, kind: str, form: type[D]) -> tuple[D, dt.datetime]:
    """The data of an answer of that kind, and when it was made. Raises MalformedText."""
    try:
        found = msgspec.json.decode(content, type=Envelope)
        was, at = f"{found.kind} of {found.api_version}", found.generated_at.astimezone(dt.UTC)
        if was != f"{kind} of {API_VERSION}" or at.year < FIRST_YEAR:
            raise MalformedText(f"the answer is a {was} of {at.year}; expected a {kind}")

        return msgspec.json.decode(found.data, type=form), at
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise MalformedText(f"the answer is no {kind} of {API_VERSION}: {error}") from error


# Renders the facts of the agent as the documents of `/api/v1`.

READ_AGAIN: Final = dt.timedelta(seconds=90)
"""Until then the agent may not have read what a new kubelet has on record: it does each minute."""
COMPARED: Final = 200
"""Characters of a refusal that are looked for in a pod's status, of which only a part is kept."""


class StatusFacts(msgspec.Struct, frozen=True):
    """What documents, page and metrics are made of; a standby knows only `about` and `checks`.

    `about`: what does not come from the other values. `newest`: the newest sample of a GPU. `used`:
    what a container uses. `kubelet`: the present instance.
    """

    now: dt.datetime
    about: NodeStatus
    checks: Sequence[Check] = ()
    node: NodeView | None = None
    inventory: Inventory = msgspec.field(default_factory=Inventory)
    slices: SliceList = msgspec.field(default_factory=SliceList)
    ledger: Ledger = msgspec.field(default_factory=Ledger)
    newest: Callable[[GpuUuid], GpuSample | None] = lambda _: None
    used: Callable[[ContainerKey], ContainerUse | None] = lambda _: None
    changes: Callable[[], tuple[JournalEntry, ...]] = tuple
    refusals: Callable[[], tuple[JournalEntry, ...]] = tuple
    journal_since: Callable[[], dt.datetime | None] = lambda: None
    settings: Callable[[], tuple[SettingStatus, ...]] = tuple
    pods: PodTable = msgspec.field(default_factory=PodTable)
    kubelet: KubeletEpoch | None = None
    health: HealthSettings | None = None


def status_of(facts: StatusFacts) -> StatusDocument:
    """All of the node."""
    # The refusals whose pod is still there, the newest first: its status repeats the sentence.
    messages = [pod.message for pod in facts.pods.pods.values() if pod.reason == REJECTED]
    standing, refusals = dict[str, JournalEntry](), facts.refusals()
    for entry in refusals:
        if any(entry.text[:COMPARED] in message for message in messages):
            standing.setdefault(entry.text, entry)  # a pod that is refused again is one

    node = msgspec.structs.replace(
        facts.about,
        ready=is_ready(facts.checks),
        driver=facts.inventory.driver_version,
        lock=lock_status(facts.node.annotations) if facts.node else None,
        checks=facts.checks,
    )
    return StatusDocument(
        node=node,
        gpus=gpus_of(facts),
        allocations=allocations_of(facts),
        refusals=refusals,
        changes=facts.changes(),
        journal_since=facts.journal_since(),
        standing=tuple(standing.values()) if facts.pods.synced else None,
    )


def gpus_of(facts: StatusFacts) -> tuple[GpuStatus, ...]:
    """All GPUs of the inventory, in its order."""
    closed = read_cordon(facts.node.annotations.get(CORDON) if facts.node else None)
    living = [row for row in facts.ledger.rows if row.takes_room(facts.pods)]
    # Where the scheduler chose the GPUs, the kubelet's ids do not name them. All others work on
    # what the kubelet booked; ids that several rows have count once.
    placed = [row for row in living if row.decided_by is Decider.SCHEDULER and row.shares]
    held = Counter(share.uuid for row in placed for share in row.shares)
    booked = Ledger(tuple(row for row in living if row not in placed)).held_ids
    held.update({uuid: len(ids) for uuid, ids in booked.items()})
    listed = {group.uuid: len(group.ids) for group in facts.slices.groups}

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
            condition=health.condition.value,
            serving=facts.inventory.offers(shared),
            cordoned=gpu.uuid in closed,
            since=health.since,
            cooled_at=cooled_at(health, facts.health) if facts.health else None,
            cause=health.cause,
            action=health.action,
            text=health.text,
            obstacles=facts.inventory.obstacles(shared),
            slices=listed.get(gpu.uuid, 0),
            slices_held=held[gpu.uuid],
            memory_mib=gpu.memory_mib,
            sellable_mib=shared.registered_mib,
            promised_mib=use.memory_mib,
            sellable_cores=shared.core_percent,
            promised_cores=use.core_percent,
            used_mib=newest.used_mib if newest else None,
            gpu_percent=newest.gpu_percent if newest else None,
        )
        found.append(one)

    return tuple(found)


def allocations_of(facts: StatusFacts) -> tuple[AllocationStatus, ...]:
    """What each container holds, by namespace, pod and container."""
    labels = gpu_labels(facts.inventory)
    rows = (row for row in facts.ledger.rows if not row.adopted or row.holder)
    found = (_allocation(row, labels, facts) for row in rows)
    return tuple(sorted(found, key=operator.attrgetter("namespace", "pod", "container")))


def _allocation(row: Row, labels: Mapping[GpuUuid, str], facts: StatusFacts) -> AllocationStatus:
    """What one container holds and uses. What one used that runs no more is not said."""
    ended = not row.takes_room(facts.pods)
    pod, kubelet = facts.pods.pods.get(row.key.pod_uid), facts.kubelet
    confirmed = row.is_booked_by(kubelet) if kubelet else None
    if kubelet and row.answered_at < kubelet.since and facts.now - kubelet.since < READ_AGAIN:
        confirmed = confirmed or None

    # An init container may have ended while its share still counts, because another one runs.
    own = pod.containers if pod else ()
    is_over = ended or any(one.ended_at for one in own if one.name == row.key.container)
    use = None if is_over else facts.used(row.key)
    # HAMi-core's region keeps the last figures of a GPU that is lost.
    lost = {one.uuid for one in facts.inventory.gpus if one.health.condition is Condition.LOST}
    of_gpus = [one for one in use.gpus if one.uuid not in lost] if use else []
    used = {one.uuid: (one.memory.total // MIB, one.sm_percent) for one in of_gpus}
    limits: list[tuple[GpuUuid, int | None, int | None]]
    limits = [(one.uuid, one.memory_mib, one.core_percent) for one in row.limits]
    return AllocationStatus(
        row.namespace,
        row.pod,
        row.holder.container if row.holder else "",
        tuple(
            ShareStatus(labels.get(uuid, uuid), uuid, *limit, *used.get(uuid, (None, None)))
            for uuid, *limit in limits or [(uuid, None, None) for uuid in row.gpus]
        ),
        since=row.answered_at,
        confirmed=confirmed,
        mismatched=row.mismatched,
        ended=ended,
        decided_by=row.decided_by.value,
        last_kernel=use.last_kernel if use else None,
        unread=use.reason if use else "",
        unkept=pod.unkept(row.key.container) if pod and row.limits and not ended else "",
    )


def gpu_labels(inventory: Inventory) -> Mapping[GpuUuid, str]:
    """The label `gpu` of each GPU: its index; the UUID if it has none or another GPU has it now."""
    taken: set[int] = set()
    named: dict[GpuUuid, str] = {}

    for gpu in sorted(inventory.gpus, key=lambda gpu: not gpu.present):
        named[gpu.uuid] = str(gpu.uuid) if gpu.gpu.index in taken else gpu.gpu.label
        taken.add(gpu.gpu.index)

    return named


def lock_status(annotations: Mapping[str, str]) -> LockStatus | None:
    """HAMi's lock on the Node; None if it is free."""
    if (text := annotations.get(MUTEX_LOCK)) is None:
        return None

    try:
        lock = decode_node_lock(text)
        return LockStatus(lock.stamp, "/".join(lock.owner or ()))
    except MalformedText:
        return LockStatus(None, cap(text))


# What `status`, `top` and the page show, in the same words.
#
# A text of the cluster is cut and freed of control characters here. A notice has a grade, `bad`,
# `watch` or none, which each face shows in its own way.

OF_GPUS: Final = frozenset({"gpu_health", "cdi"})
"""The checks that repeat what the notices about GPUs say."""
SEVERE: Final = frozenset({Condition.BAD, Condition.LOST})
"""The conditions in capitals, of grade `bad`."""
GPU_NAME: Final = re.compile(r"\bGPU (?:[0-9]+(?: \([^)]+\))?|GPU-[0-9a-f-]+)")
"""A GPU in a sentence."""
ALSO: Final = 5
"""Names beside the first one of equal entries."""

GPU_COLUMNS: Final = (
    Column("GPU"),
    Column("MODEL", rank=4, least=10),
    Column("HEALTH"),
    Column("SLICES", right=True),
    Column("ALLOCATED", right=True),
    Column("FREE", right=True),
    Column("CORES", rank=5, right=True),
    Column("USED", rank=3, right=True),
    Column("UTIL", rank=3, right=True),
    Column("PHYSICAL", rank=5, right=True),
    Column("PCI", rank=6),
    Column("NUMA", rank=6),
    Column("UUID", rank=7),
)
"""The columns of gpu_cells()."""

POD_COLUMNS: Final = (
    Column("NAMESPACE", least=9),
    Column("POD", least=24),
    Column("CONTAINER", rank=1, least=9),
    Column("GPU"),
    Column("MEMORY", right=True),
    Column("USED", rank=3, right=True),
    Column("CORES", rank=4, right=True),
    Column("UTIL", rank=4, right=True),
    Column("IDLE", rank=5, right=True),
    Column("SINCE", rank=2, right=True),
    Column("KUBELET", rank=6),
)
"""The columns of pod_rows()."""

Notice: TypeAlias = tuple[str, str]
"""A sentence, and its grade."""


def heads(node: NodeStatus, now: dt.datetime) -> list[list[str]]:
    """The node and its agent, the settings in force, and the lock if it is held: lines in parts."""
    ready = {True: "READY", False: "NOT READY", None: "by its objects"}[node.ready]
    up = f" up {age(node.started_at, now)}" if node.started_at else ""
    about = [
        f"{cap(node.name)}  {ready}",
        node.version and f"agent {cap(node.version)}{up}",
        node.driver and f"driver {cap(node.driver)}",
        node.kubelet and f"kubelet: {cap(node.kubelet)}",
        "observes only" if node.observe else "",
    ]
    memory, cores = node.memory_scaling, node.core_scaling
    settings = [
        f"settings  {node.split_count} slices for each GPU",
        "" if memory is None else f"memory x{memory:g}",
        "" if cores is None else f"cores x{cores:g}",
        f"scheduler {cap(node.scheduler)}",
        cap(node.resource),
        "profiles " + cap(", ".join(node.profiles)) if node.profiles else "",
    ]
    lines = [about] if node.split_count is None else [about, settings]

    if node.lock is not None:
        held = f" for {age(node.lock.since, now)}" if node.lock.since else ""
        lines.append([f"lock  held by {cap(node.lock.holder) or 'nobody named'}{held}"])

    return [[part for part in line if part] for line in lines]


def summary(found: StatusDocument) -> str:
    """How many slices are in use, and how many GPUs are not offered."""
    held, slices = sum(g.slices_held for g in found.gpus), sum(g.slices for g in found.gpus)
    parts = [f"{held} of {slices} slices in use"]
    if unserved := sum(not gpu.serving for gpu in found.gpus):
        parts.append(f"{unserved} of {len(found.gpus)} GPUs not offered")

    unbooked = (a for a in found.allocations or () if a.confirmed is False and not a.ended)
    late = sum(len(one.shares) for one in unbooked)
    return ", ".join([*parts, f"{late} not recorded by the kubelet"] if late else parts)


def gpu_cells(gpu: GpuStatus) -> list[str]:
    """The cells of one GPU."""
    word = cap(gpu.health.upper() if gpu.health in SEVERE else gpu.health, 16)
    return [
        UNKNOWN if gpu.index is None else str(gpu.index),
        cap(gpu.model.removeprefix("NVIDIA "), 64) or UNKNOWN,
        f"{word},cordoned" if gpu.cordoned else word or UNKNOWN,
        f"{gpu.slices_held}/{gpu.slices}",
        # 0: it was lost before this start, so its size is not known.
        f"{gib(gpu.promised_mib, '')}/{gib(gpu.sellable_mib or None)}",
        gib(gpu.free_mib),
        f"{gpu.promised_cores}/{percent(gpu.sellable_cores)}",
        gib(gpu.used_mib),
        percent(gpu.gpu_percent),
        gib(gpu.memory_mib),
        cap(gpu.pci, 32) or UNKNOWN,
        UNKNOWN if gpu.numa is None else str(gpu.numa),
        cap(gpu.uuid, 64),
    ]


def gpu_grade(gpu: GpuStatus) -> str:
    """The grade of the GPU's health."""
    if gpu.condition in SEVERE:
        return "bad"
    return "watch" if gpu.condition not in {"", Condition.OK} else ""


def pod_rows(found: StatusDocument, now: dt.datetime) -> list[list[str]]:
    """The cells of each container and GPU; what uses the most memory comes first.

    One that ended, or whose pod is deleted, holds nothing, though its row stays for a minute.
    """
    held = (one for one in found.allocations or () if not one.ended)
    every = ((one, share) for one in held for share in one.shares)
    pairs = sorted(every, key=lambda pair: -(pair[1].used_mib or 0))
    booked = {True: "recorded", False: "not recorded", None: UNKNOWN}
    return [
        [
            cap(one.namespace, 64) or UNKNOWN,
            cap(one.pod, 64) or UNKNOWN,
            cap(one.container, 64) or UNKNOWN,
            cap(share.gpu, 64),
            "all" if share.memory_mib == 0 else gib(share.memory_mib),
            gib(share.used_mib),
            "any" if share.cores == 0 else percent(share.cores),
            percent(share.gpu_percent),
            _idle(one, now),
            age(one.since, now),
            "other GPUs" if one.mismatched else booked[one.confirmed],
        ]
        for one, share in pairs
    ]


def _idle(one: AllocationStatus, now: dt.datetime) -> str:
    """How long a container has started nothing on a GPU."""
    # HAMi-core misses some kernels, as of CUDA graphs: a container that computes is not idle.
    if any(share.gpu_percent for share in one.shares):
        return "busy"

    # Of a lost GPU nothing is known. Of HAMi-core's oldest layout, which has no times, no more.
    used = {share.used_mib for share in one.shares}
    if None in used:
        return UNKNOWN
    return "no use seen" if used == {0} and not one.last_kernel else age(one.last_kernel, now)


def notices(found: StatusDocument, now: dt.datetime, *, refused: bool = True) -> Iterator[Notice]:
    """What needs a person: GPUs that are not well, and checks that fail.

    `refused`: also the last refusal of a pod that is still there.
    """
    yield from _gpu_notices(found, now)

    failing = [check for check in found.node.checks if not check.ok and check.name not in OF_GPUS]
    said = {check.text for check in failing if check.text}
    for check in failing:
        if check.text.partition(": ")[2] not in said:  # `offer` repeats why the disk fails
            word, grade = ("not ready", "bad") if check.required else ("degraded", "watch")
            yield f"{word}: {check.name}: {cap(check.text, 1024)}", grade

    # Nothing can be done for a pod that is gone: --since tells of it. An older agent tells of all.
    refusals = found.refusals if found.standing is None else found.standing
    if refused and refusals:
        last = refusals[0]
        text = f"refused: {len(refusals)} in 24 h, the last {age(last.at, now)} ago"
        yield f"{text}: {cap(last.text, 1024)} [{cap(last.reason)}]", "watch"


def _gpu_notices(found: StatusDocument, now: dt.datetime) -> Iterator[Notice]:
    """What is not well about GPUs. Equal words about several GPUs are one sentence."""
    told: dict[Notice, list[str]] = {}
    of_node = {check.text for check in found.node.checks if not check.ok}

    for gpu in found.gpus:
        which, said = cap(gpu.name), []
        if grade := gpu_grade(gpu):
            since = f" for {age(gpu.since, now)}" if gpu.since else ""
            act = f"; action: {cap(gpu.action)}" if gpu.action not in {"", "none"} else ""
            why = f"{cap(gpu.health)}{since}: {cap(gpu.text or gpu.cause, 1024)}{act}"
            if (end := gpu.cooled_at) and now < end:
                why += f"; its cool-down ends at {end:%H:%M %Z}, in {age(now, end)}"
            said.append((why, grade))

        own = [text for text in gpu.obstacles if text not in of_node]
        said += [(f"not offered: {cap(text, 1024)}", "watch") for text in own]
        if gpu.cordoned:
            act = f"`hami-agent uncordon {which} --node {cap(found.node.name)}` ends it"
            said.append((f"cordoned: the scheduler places no new pod; {act}", ""))

        for notice in said:
            told.setdefault(notice, []).append(which)

    for (text, grade), gpus in told.items():
        yield f"GPUs {', '.join(gpus)}, each {text}" if gpus[1:] else f"GPU {gpus[0]} {text}", grade


def pod_notices(found: StatusDocument) -> Iterator[Notice]:
    """What a person should know of containers, beside their cells."""
    for one in found.allocations or ():
        name = "/".join(cap(part, 64) for part in (one.namespace, one.pod, one.container))
        if one.unkept:
            yield f"nothing keeps the limits of {name}: {cap(one.unkept)}", ""

        if one.unread:
            yield f"the use of {name} is not known: {cap(one.unread)}", ""


def entry_lines(entries: Iterable[JournalEntry], now: dt.datetime) -> Iterator[Notice]:
    """Refusals or changes with their grade; equal ones, except for pod or GPU, are one sentence.

    It is the newest, with the number of the others and what they are about.
    """
    groups: dict[tuple[str, str], list[JournalEntry]] = {}
    for entry in entries:
        groups.setdefault((entry.reason, GPU_NAME.sub("", entry.text, 1)), []).append(entry)

    for newest, *older in groups.values():
        about = _about(newest)
        of = f" {about}" if newest.pod else ""
        text = f"{age(newest.at, now)} ago  {cap(newest.reason)}{of}: {cap(newest.text, 1024)}"
        if older:
            others = {*map(_about, older)} - {about}
            text += f" ({len(older) + 1} times{'; also ' if others else ''}{some(others, ALSO)})"

        yield text, "watch" if newest.warning else ""


def _about(entry: JournalEntry) -> str:
    """The pod or container, or the GPU that the sentence names."""
    gpu = GPU_NAME.search(entry.text)
    parts = (entry.namespace, entry.pod, entry.container)
    return cap("/".join(filter(None, parts))) or (gpu[0] if gpu else "")

"""The ledger: which container holds what. Rows and the outbox of effects that may follow.

Transitions are methods that return a new ledger; the old one stays as it was. A row counts once
it is on disk (`committed`); effects are rows too, so that a crash after the answer loses none.
"""

import dataclasses
import datetime as dt
import enum
from collections.abc import Iterable

from agent.core.cluster.pods import PodUid, Role
from agent.core.containers.edits import ContainerEdits
from agent.core.inventory.gpu import GpuUuid
from agent.core.inventory.share import Share
from agent.core.inventory.slices import Held, SliceId, split_slice_id
from agent.core.state.holdings import KubeletEpoch

PLAIN = "plain"
"""Stands where a container's name stands in the identity of a row of which no pod is known."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class ContainerKey:
    """The identity of a row."""

    pod_uid: PodUid
    container: str


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Holder:
    """A container as PodResources names it; it has no UID there."""

    namespace: str
    pod: str
    container: str


class Decider(enum.StrEnum):
    """Who decides what a container gets: HAMi's scheduler, or the kubelet by the ids it names."""

    SCHEDULER = "scheduler"
    KUBELET = "kubelet"


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One container's hold.

    `key` names its directory. Where the kubelet decides, nobody says which pod asks: the UID is
    drawn for each answer, and `holder` is None until PodResources names one. `shares` in the order
    of the answer, none where it sets no limits; `slice_ids` the kubelet's ids of the last answer
    (drift is allowed: only their number counts in hami mode). `epoch` is the kubelet that was
    answered, or that was seen to have booked the answer since; `confirmed` says that one was.
    `adopted`: somebody else answered, and the row only keeps the ids listed. `resource` is the name
    that was asked by; empty in files from before it was kept.

    Where the scheduler decides, `group` is the container's position in `…-allocated`; `offered`:
    before its last answer the kubelet was offered free ids of the answer's GPUs; `told`: that it
    took other GPUs all the same has been said once; `lock`: the exact text of the node lock under
    which the first answer was given, the only one that is ever removed for it; empty where there
    was none.
    """

    key: ContainerKey
    holder: Holder | None
    shares: tuple[Share, ...]
    slice_ids: tuple[SliceId, ...]
    edits: ContainerEdits
    answered_at: dt.datetime
    epoch: KubeletEpoch
    decided_by: Decider = Decider.SCHEDULER
    role: Role = Role.APP
    group: int = 0
    confirmed: bool = False
    adopted: bool = False
    offered: bool = False
    told: bool = False
    resource: str = ""
    lock: str = ""

    @property
    def namespace(self) -> str:
        """The holder's; empty while it is not known."""
        return self.holder.namespace if self.holder else ""

    @property
    def pod(self) -> str:
        """The name of the holder's pod; empty while it is not known."""
        return self.holder.pod if self.holder else ""

    @property
    def pod_uid(self) -> PodUid:
        """The UID of the holder's pod; empty where only its name can be known."""
        return self.key.pod_uid if self.decided_by is Decider.SCHEDULER else PodUid("")

    @property
    def has_directory(self) -> bool:
        """Whether the answer mounts a directory of its own: only limits need one."""
        return self.decided_by is Decider.SCHEDULER or bool(self.shares)

    @property
    def gpus(self) -> tuple[GpuUuid, ...]:
        """The GPUs that the container was given."""
        if self.decided_by is Decider.SCHEDULER:
            return tuple(share.uuid for share in self.shares)
        return tuple(pair[0] for text in self.slice_ids if (pair := split_slice_id(text)))

    def is_booked_by(self, epoch: KubeletEpoch) -> bool:
        """Whether this kubelet was seen to have booked the answer."""
        return self.confirmed and self.epoch == epoch

    @property
    def astray(self) -> bool:
        """Whether its ids are of other GPUs than its shares: the answer holds, the ids do not."""
        pairs = (split_slice_id(text) for text in self.slice_ids)
        held = sorted(pair[0] if pair else GpuUuid("") for pair in pairs)
        return held != sorted(share.uuid for share in self.shares)

    @property
    def mismatched(self) -> bool:
        """Whether the kubelet took other GPUs although the right ones were offered."""
        return self.offered and self.astray


class EffectKind(enum.StrEnum):
    """Effects that may follow an answer."""

    SETTLE_POD = "settle-pod"
    RELEASE_LOCK = "release-lock"
    POST_EVENT = "post-event"


@dataclasses.dataclass(frozen=True, slots=True)
class Effect:
    """One row of the outbox, retried until done, also after a crash.

    settle-pod: `phase` is success or failed, `groups` the consumed positions; `due` is when it may
    run (more containers may still come); `value` is the exact text of a lock that goes right after,
    for a pod that is over. release-lock: `value` is the lock's exact text. post-event: `reason` and
    `value` (its text). Equal (kind, pod_uid, value, reason): one effect.
    """

    kind: EffectKind
    pod_uid: PodUid
    namespace: str
    pod: str
    due: dt.datetime
    phase: str = ""
    groups: tuple[int, ...] = ()
    value: str = ""
    reason: str = ""

    @property
    def frees_lock(self) -> bool:
        """Whether the scheduler waits for it."""
        return self.kind is EffectKind.RELEASE_LOCK or (
            self.kind is EffectKind.SETTLE_POD and bool(self.value)
        )

    @property
    def identity(self) -> tuple[EffectKind, PodUid, str, str]:
        """What makes two effects the same one."""
        return self.kind, self.pod_uid, self.value, self.reason


@dataclasses.dataclass(frozen=True, slots=True)
class Ledger:
    """Rows by container, in order of answering, and the outbox in order of arrival."""

    rows: tuple[Row, ...] = ()
    outbox: tuple[Effect, ...] = ()
    _by_pod: dict[PodUid, tuple[Row, ...]] | None = dataclasses.field(
        default=None, init=False, repr=False, compare=False
    )
    """The rows of each pod, made when they are asked for; a new ledger begins without."""

    def find(self, key: ContainerKey) -> Row | None:
        """The row of that container, or None."""
        return next((row for row in self.rows_of(key.pod_uid) if row.key == key), None)

    def rows_of(self, uid: PodUid) -> tuple[Row, ...]:
        """The rows of one pod. A decision asks for many pods, and graves: only the first counts."""
        if self._by_pod is None:
            found: dict[PodUid, tuple[Row, ...]] = {}
            for row in self.rows:
                found[row.key.pod_uid] = (*found.get(row.key.pod_uid, ()), row)
            object.__setattr__(self, "_by_pod", found)
            return found.get(uid, ())
        return self._by_pod.get(uid, ())

    def rows_by(self, decider: Decider) -> tuple[Row, ...]:
        """The rows that one decided. In hami mode the kubelet's keep ids of strangers listed."""
        return tuple(row for row in self.rows if row.decided_by is decider)

    def put(self, row: Row) -> "Ledger":
        """With `row` in the place of the one of the same container, or at the end."""
        if all(old.key != row.key for old in self.rows):
            return dataclasses.replace(self, rows=(*self.rows, row))
        rows = tuple(row if old.key == row.key else old for old in self.rows)
        return dataclasses.replace(self, rows=rows)

    def drop(self, keys: Iterable[ContainerKey]) -> "Ledger":
        """Without the rows of those containers."""
        gone = frozenset(keys)
        rows = tuple(row for row in self.rows if row.key not in gone)
        return dataclasses.replace(self, rows=rows)

    def owe(self, effect: Effect) -> "Ledger":
        """With `effect` in the outbox; one of the same identity is replaced in its place."""
        if any(old.identity == effect.identity for old in self.outbox):
            outbox = tuple(
                effect if old.identity == effect.identity else old for old in self.outbox
            )
            return dataclasses.replace(self, outbox=outbox)
        return dataclasses.replace(self, outbox=(*self.outbox, effect))

    def done(self, *effects: Effect) -> "Ledger":
        """Without these effects; a newer one of the same identity stays."""
        outbox = tuple(old for old in self.outbox if old not in effects)
        return dataclasses.replace(self, outbox=outbox)

    def without_settlements(self, uid: PodUid) -> "Ledger":
        """Without what is owed to the pod for its answers so far: the next one owes all of it."""
        settle = EffectKind.SETTLE_POD
        old = [one for one in self.outbox if one.kind is settle and one.pod_uid == uid]
        return self.done(*old)

    def named(self, resource: str) -> "Ledger":
        """With `resource` for rows that say none: they were written when there was one name."""
        rows = tuple(
            row if row.resource else dataclasses.replace(row, resource=resource)
            for row in self.rows
        )
        return dataclasses.replace(self, rows=rows)

    def held_ids(self) -> Held:
        """Slice ids in use by GPU, as the kubelet named them; what is no slice id is left out."""
        held: dict[GpuUuid, set[SliceId]] = {}
        for text in (text for row in self.rows for text in row.slice_ids):
            pair = split_slice_id(text)
            if pair is not None:
                held.setdefault(pair[0], set()).add(text)
        return {uuid: tuple(sorted(ids)) for uuid, ids in held.items()}

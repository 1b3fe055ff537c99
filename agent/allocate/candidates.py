"""Which containers the kubelet may mean, by its own records and by what runs."""

import dataclasses
import datetime as dt
import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import msgspec

from agent.allocate.room import GpuUse, RequestRules, Shortage
from agent.cluster import (
    BIND_PHASE,
    PHASE_SUCCESS,
    ContainerView,
    NodeLock,
    PodKey,
    PodTable,
    PodUid,
    PodView,
    Role,
)
from agent.errors import Refusal, RefusalReason
from agent.ledger import ContainerKey, Holding, KubeletEpoch, Ledger, Row, is_over
from agent.model import GpuUuid, Inventory, Share
from agent.setting import Field, choice, text

# Settings for matching an Allocate with a pod.


class UnlockedPods(enum.StrEnum):
    """Which pods without a node lock are served: none, those for which HAMi takes none, or all.

    HAMi up to and including 2.10 takes none where init containers alone request GPUs.
    """

    STRICT = "strict"
    SCHEDULED = "scheduled"
    UNIQUE = "unique"


class MatchSettings(msgspec.Struct, frozen=True):
    """Which pod an Allocate is for. `node`, `resource`: of Settings and SharingSettings."""

    node: str
    resource: str = "nvidia.com/gpu"
    unlocked_pods: Annotated[
        UnlockedPods,
        Field(
            "allocation.unlockedPods",
            choice(*UnlockedPods),
            "Which pods without a node lock are served, if the kubelet (1.34 or later) confirms "
            "that they are being admitted. strict: none. scheduled: those for which HAMi's "
            "scheduler takes none, because only init containers request GPUs; it must have bound "
            "them, and the annotation must be what it makes of their requests. unique: all.",
            flag="--unlocked-pods",
            live=True,
        ),
    ] = UnlockedPods.SCHEDULED
    scheduler_name: Annotated[
        str,
        Field(
            "allocation.schedulerName",
            text,
            "spec.schedulerName of the pods that HAMi's scheduler places.",
            live=True,
        ),
    ] = "hami-scheduler"
    requests: RequestRules = RequestRules()


# Pairs the groups of a pod's devices annotation with its containers.


class Assignment(msgspec.Struct, frozen=True):
    """The group at position `group_index` of the annotation belongs to this container."""

    group_index: int
    container: str
    shares: tuple[Share, ...]


def pair_groups(
    groups: Sequence[tuple[Share, ...]], containers: Sequence[ContainerView]
) -> tuple[Assignment, ...]:
    """Pair the non-empty groups, in order, with the containers that request GPUs, in order.

    `containers` are all of the pod's, init containers first. Positions in the annotation do not
    matter, because schedulers up to and including 2.8 shift them. Those also write no groups for
    init containers; then the groups belong to the regular containers.

    Raises:
        Refusal: COUNT_MISMATCH, if the numbers of groups and containers differ, or the number of
            shares in a group and the number of slices that its container requests.
    """
    filled = [(index, group) for index, group in enumerate(groups) if group]
    asking = [container for container in containers if container.count > 0]
    regular = [container for container in asking if container.role is Role.APP]
    all_asking = len(filled) == len(asking)
    if not all_asking and (not regular or len(filled) != len(regular)):
        raise Refusal(
            RefusalReason.COUNT_MISMATCH,
            f"the scheduler wrote GPUs for {len(filled)} containers, but {len(asking)} containers "
            "of the pod request GPUs; delete the pod and create it again.",
        )
    paired = []
    for (index, shares), container in zip(filled, asking if all_asking else regular, strict=True):
        if len(shares) != container.count:
            raise Refusal(
                RefusalReason.COUNT_MISMATCH,
                f"container {container.name} requests {container.count} GPUs, but the scheduler "
                f"wrote {len(shares)} for it; delete the pod and create it again.",
            )
        paired.append(Assignment(index, container.name, shares))
    return tuple(paired)


# The types of a decision about an Allocate: its evidence, its questions and its grant.

Known = Mapping[PodKey, Holding | None]
"""The witness's answers so far; None: it does not know the pod. A missing key: it was not asked."""

ALWAYS = dt.datetime.min.replace(tzinfo=dt.UTC)
"""Before any pod was made."""

NOT_HERE = PodUid("")
"""The result of a GET of a pod that is gone, or that this node may not read."""

UNREAD = None
"""The result of a GET that the API server did not answer in time."""


class Candidate(msgspec.Struct, frozen=True):
    """A pod that the kubelet may be admitting, and its next container.

    `row`: the row to replay; None: the container was not answered before. `deleted`: the pod is a
    tombstone. The kubelet still admits pods that were deleted while they queued.
    """

    pod: PodView
    container: ContainerView
    row: Row | None = None
    deleted: bool = False


class KubeletStart(msgspec.Struct, frozen=True):
    """What the agent saw when this kubelet began to take its lists.

    - `asks_since`: the kubelet asks for the containers of every pod that was made since then. Of
      the pods before it may have admitted some without asking, if it had lost its checkpoint.
    - `begun`: the pods that had a cgroup before the kubelet admitted its first pod; None: that is
      not known. Of all others it asks for each container when it admits them.
    """

    asks_since: dt.datetime = ALWAYS
    begun: frozenset[PodUid] | None = None


class KubeletView(msgspec.Struct, frozen=True):
    """What is known of the kubelet besides its PodResources answers.

    - `recorded`: the containers in its checkpoint file, the only list with ordinary init
      containers; None: not read, or unreadable.
    - `alive`: the runtime ids of containers that run. After a reboot, the API server still reports
      containers as running that are gone.
    - `witnessed`: this kubelet serves Get; otherwise the agent uses the checkpoint file instead.
    - `start`: what the agent saw of its start.
    """

    epoch: KubeletEpoch
    recorded: frozenset[ContainerKey] | None = None
    alive: frozenset[str] = frozenset()
    witnessed: bool = True
    start: KubeletStart = KubeletStart()


class Evidence(msgspec.Struct, frozen=True):
    """All facts that a decision uses.

    - `ledger`: includes rows that are being written.
    - `released_locks`: the former locks that still prove a right, the last one first.
    - `used_locks`: the last locks with the pods that were answered under them. It remembers longer
      than the rows. `outlived`: those of these locks that still stood when their pod was gone.
    - `known`: the witness's answers in this call.
    - `pod_uids_read`: the UIDs from GETs of pods; also NOT_HERE and UNREAD.
    - `registered`: the greatest amounts registered in the last 60 s, if not the inventory's.
    - `records_read`, `listed`, `waited`, `node_read`: the questions that were asked already.
      `list_failed`: the LIST failed. `node_unread`: the GET of the Node failed. `checked`: the
      runtime ids that were asked about.
    - `claimed`: pods that cannot be asking: another call answers them, or they were refused.
    - `absent`, `present`: names that the kubelet did not know, or knew, when it began this call's
      container. `alone`: no other call came for a moment. `beside`: of each call that
      was under way then, the names that the kubelet knew when it began, if that is known.
    """

    table: PodTable
    ledger: Ledger
    lock: NodeLock | None
    inventory: Inventory
    kubelet: KubeletView
    now: dt.datetime
    known: Known
    released_locks: tuple[NodeLock, ...] = ()
    used_locks: Mapping[str, PodUid] = msgspec.field(default_factory=dict)
    outlived: Mapping[str, PodUid] = msgspec.field(default_factory=dict)
    pod_uids_read: Mapping[PodKey, PodUid | None] = msgspec.field(default_factory=dict)
    registered: Mapping[GpuUuid, GpuUse] = msgspec.field(default_factory=dict)
    records_read: bool = False
    checked: frozenset[str] = frozenset()
    listed: bool = False
    list_failed: bool = False
    waited: bool = False
    node_read: bool = False
    node_unread: bool = False
    claimed: frozenset[PodUid] = frozenset()
    absent: frozenset[PodKey] = frozenset()
    present: frozenset[PodKey] = frozenset()
    alone: bool = False
    beside: tuple[frozenset[PodKey] | None, ...] = ()

    @property
    def blind(self) -> bool:
        """Whether the pods are not known: they were never listed, or the LIST failed."""
        return self.listed and (self.list_failed or not self.table.synced)


@dataclasses.dataclass(frozen=True, slots=True)
class AskKubelet:
    """Ask PodResources for this pod, and then for `others` until the kubelet knows one of them."""

    namespace: str
    name: str
    others: tuple[PodKey, ...] = dataclasses.field(default=(), compare=False)


class ReadRecords(msgspec.Struct, frozen=True):
    """Read the kubelet's checkpoint file, the only record of ordinary init containers."""


class CheckRunning(msgspec.Struct, frozen=True):
    """Ask which of these runtime ids have a live container. A pod's status can be stale."""

    ids: frozenset[str]


class ListPods(msgspec.Struct, frozen=True):
    """LIST the pods of this node, because the watch may lag."""


class LookAtPod(msgspec.Struct, frozen=True):
    """GET this pod, because another pod may have its name now."""

    namespace: str
    name: str


class AwaitLock(msgspec.Struct, frozen=True):
    """Wait for the Node's watch to show this pod's lock; empty: any other lock than now."""

    namespace: str = ""
    name: str = ""


class LookAtNode(msgspec.Struct, frozen=True):
    """GET the Node, because its watch may lag or be broken."""


class AwaitOthers(msgspec.Struct, frozen=True):
    """Wait a moment for other calls: the new pod's own call comes if this one is not for it."""


Question = (
    AskKubelet
    | ReadRecords
    | CheckRunning
    | ListPods
    | LookAtPod
    | AwaitLock
    | LookAtNode
    | AwaitOthers
)


class Grant(msgspec.Struct, frozen=True):
    """The container that is served, its shares, and its position in `…-allocated`.

    `lock`: the text of the node lock that names its pod; empty: none. `oversold`: the scheduler
    promised more of this GPU than it has; None: it did not.
    """

    candidate: Candidate
    group: int
    shares: tuple[Share, ...]
    lock: str = ""
    oversold: Shortage | None = None

    @property
    def key(self) -> ContainerKey:
        """The key of the container's row."""
        return ContainerKey(self.candidate.pod.uid, self.candidate.container.name)

    @property
    def replay(self) -> Row | None:
        """The row that is answered again; None: this is a first answer."""
        return self.candidate.row


# Finds the candidates of an Allocate: the pods of this node that it may be for.
#
# A pod is a candidate if it has a container that requests that many slices and has no row, or whose
# row the kubelet has no record of. Annotations do not matter.
#
# The kubelet asks at two places. It *admits* one pod after the other: new pods, and after its start
# all that were there before. There it asks in the order of the spec, stops at the first refusal and
# rejects the pod. It asks for no container that it has a record of, and after a start for none that
# ran at that moment by the runtime's word, even if it has died since. Later its *pod workers* start
# dead containers again, in parallel and in any order; they ask where there is no record, and after
# a refusal for the next container and for this one again some seconds later. So after a lost
# checkpoint the order says something only while a pod is being admitted.

ASKED_AFTER_DELETION = dt.timedelta(seconds=60)
"""How long after its deletion a pod may still be in the kubelet's queue."""

ASKED_UNWITNESSED = dt.timedelta(seconds=10)
"""The same without a PodResources Get. It is shorter, because each deleted pod is one more
candidate, and two candidates cause a refusal."""

STAMP = dt.timedelta(seconds=1)
"""The resolution of times in a pod's status: an event may be this much later than its time."""


def candidates(count: int, evidence: Evidence, settings: MatchSettings) -> tuple[Candidate, ...]:
    """The candidates for `count` slices: pods that exist, oldest first, then deleted pods.

    Without pods that another Allocate in flight has claimed or whose first Allocate was refused.
    """
    found = []
    for pod, deleted in (
        *((pod, False) for pod in _asking(count, evidence)),
        *((pod, True) for pod in _deleted_pods(evidence)),
    ):
        if pod.uid in evidence.claimed or pod.key in evidence.absent:
            continue
        # While the agent has not asked PodResources about the pod, the call may be for any of its
        # containers that wait, because records may be missing here.
        is_asked = pod.key in evidence.known or not evidence.kubelet.witnessed
        containers = (possible if is_asked else waiting)(pod, evidence, settings.resource)
        for each in containers:
            if each.container.count == count:
                found.append(msgspec.structs.replace(each, deleted=deleted))
                break
    return tuple(found)


def waiting(pod: PodView, evidence: Evidence, resource: str) -> tuple[Candidate, ...]:
    """The containers of `pod` for which the kubelet may still send Allocate, in its order.

    The order is init containers, then the others, as in the spec. The kubelet sends no Allocate for
    a container that runs. It does for an ended init container, if it started without its records.
    """
    rows = {row.key.container: row for row in evidence.ledger.rows_of(pod.uid)}
    return tuple(
        Candidate(pod, container, rows.get(container.name))
        for container in pod.asking(resource)
        if not is_alive(container, evidence.kubelet)
        and not is_over(container, evidence.kubelet.epoch)
        and not _is_held(pod, container, rows.get(container.name), evidence)
    )


def possible(pod: PodView, evidence: Evidence, resource: str) -> tuple[Candidate, ...]:
    """The containers of `pod` for which the kubelet may be asking now, of any count."""
    found = waiting(pod, evidence, resource)
    if is_new(pod, evidence):
        return found[:1]
    first = next((place for place, one in enumerate(found) if _was_dead(one, evidence)), None)
    if first is None:
        return found
    # It was dead when the kubelet started and has no record: the pod is being admitted.
    return found[: first + 1]


def is_at_admission(pod: PodView, evidence: Evidence, resource: str) -> bool:
    """Whether the kubelet can ask for this pod only when it admits it, which it does serially."""
    return is_new(pod, evidence) or any(
        _was_dead(one, evidence) for one in waiting(pod, evidence, resource)
    )


def is_new(pod: PodView, evidence: Evidence) -> bool:
    """Whether no kubelet before this one can have started a container of the pod."""
    rows = evidence.ledger.rows_of(pod.uid)
    return not pod.has_run and all(row.epoch == evidence.kubelet.epoch for row in rows)


def is_alive(container: ContainerView, kubelet: KubeletView) -> bool:
    """Whether the container has a live cgroup. Its status can be late or from before a reboot."""
    return container.running_id is not None and container.running_id in kubelet.alive


def _was_dead(candidate: Candidate, evidence: Evidence) -> bool:
    """Whether the kubelet found the container dead when it started, and asks for it at admission.

    Only a pod without a cgroup proves it. A status that says so may be out of date: the former
    kubelet may have started the container again without telling. That nobody saw it run proves
    nothing either: it can have died between the kubelet's look and the agent's.
    """
    kubelet, started = evidence.kubelet, candidate.container.started_at
    has_begun_since = started is not None and started + STAMP > kubelet.epoch.since
    begun = kubelet.start.begun
    return begun is not None and candidate.pod.uid not in begun and not has_begun_since


def _asking(count: int, evidence: Evidence) -> list[PodView]:
    """The pods, oldest first, with a container for `count` slices that is not plainly booked.

    Nearly all pods of a node are running. A call for each would make an Allocate slower with each.
    """
    kubelet, known = evidence.kubelet, evidence.known
    booked = evidence.ledger.booked_by(kubelet.epoch) if kubelet.recorded is None else set()
    pods = {
        pod.uid: pod
        for pod in evidence.table.pods.values()
        for container in pod.containers
        if container.count == count
        and (
            ContainerKey(pod.uid, container.name) not in booked
            or (pod.namespace, pod.name) in known
        )
    }
    present = [pod for pod in pods.values() if not pod.terminal]
    return sorted(present, key=lambda pod: (pod.created, pod.namespace, pod.name))


def _is_held(pod: PodView, container: ContainerView, row: Row | None, evidence: Evidence) -> bool:
    """Whether the kubelet has a record of the container, as far as is known.

    Without a record it may send Allocate, for the first time or again. It loses records if it is
    killed before it writes its checkpoint, or if the checkpoint is lost. PodResources answers by
    name and does not list ordinary init containers. The checkpoint has UIDs and all containers.
    """
    kubelet, holding = evidence.kubelet, evidence.known.get(pod.key)
    if holding and holding.ids_of(container.name, container.resource):
        return True
    if kubelet.recorded is not None and ContainerKey(pod.uid, container.name) in kubelet.recorded:
        return True
    if container.role is Role.INIT or not kubelet.witnessed:
        return kubelet.recorded is None and row is not None and row.epoch == kubelet.epoch
    # If PodResources was asked, it named no ids; the row may be booked for a pod of the same name.
    is_unasked = holding is None and kubelet.recorded is None
    return is_unasked and row is not None and row.is_booked_by(kubelet.epoch)


def _deleted_pods(evidence: Evidence) -> Iterator[PodView]:
    """Deleted pods without an answer that the kubelet may still have in its queue.

    - A pod that was answered before the kubelet lost its records is left out. It ends at once with
      any answer, but as a candidate it would cost its successor an answer.
    - A pod is left out if its successor has run, or this kubelet has sent Allocate for it.
    - A deletion time in the future was taken before the clock was set back; the pod is left out.
    """
    kubelet, rows_of = evidence.kubelet, evidence.ledger.rows_of
    life = ASKED_AFTER_DELETION if kubelet.witnessed else ASKED_UNWITNESSED
    recent = [
        stone.pod
        for stone in evidence.table.tombstones
        if dt.timedelta(0) <= evidence.now - stone.deleted_at <= life
        and stone.pod.annotations.get(BIND_PHASE) != PHASE_SUCCESS
    ]
    for pod in recent:
        if not pod.terminal and pod.gpu_containers and not rows_of(pod.uid):
            successor = evidence.table.named(*pod.key)
            rows = rows_of(successor.uid) if successor else ()
            is_past = successor is not None and successor.has_run  # it admits them in their order
            if not is_past and all(row.epoch != kubelet.epoch for row in rows):
                yield pod


# Asks the kubelet about the candidates, to find the pod that it is admitting.
#
# PodResources Get knows a pod from just before its admission. So among the candidates, the pod
# being admitted is the one that Get knows without device ids. PodResources has no UIDs; the
# kubelet's checkpoint file has.

MANY = 8
"""With more candidates than this, the agent does not ask about all. After a reboot with a lost
checkpoint there are up to 110, and the kubelet answers 100 calls a second."""


def to_ask(
    found: tuple[Candidate, ...], evidence: Evidence, settings: MatchSettings
) -> Question | None:
    """The next question that has to be answered before a candidate is taken; None: none is left.

    The owner of the node lock is asked about first.
    """
    # The decision needs the kubelet's checkpoint file:
    # - if Get is missing, or for init containers, which are listed nowhere else;
    # - if this kubelet once named ids for a candidate's container and now does not: one of the two
    #   answers was about another pod of that name;
    # - with many candidates: those in the file need no PodResources Get.
    if not evidence.records_read and (
        len(found) > MANY
        or any(
            not evidence.kubelet.witnessed
            or (each.row is not None and each.row.is_booked_by(evidence.kubelet.epoch))
            or any(container.role is Role.INIT for container in each.pod.gpu_containers)
            for each in found
        )
    ):
        return ReadRecords()
    containers = (container for each in found for container in each.pod.containers)
    running = frozenset(each.running_id for each in containers if each.running_id)
    unchecked = running - evidence.checked
    if unchecked:
        return CheckRunning(unchecked)
    if not evidence.kubelet.witnessed:
        return None
    left = [each for each in found if each.pod.key not in evidence.known]
    # The kubelet admits one pod after the other. So with many candidates, once one is known to be
    # admitted, only those remain whose containers the kubelet may be restarting in parallel.
    if len(found) > MANY and any(
        not each.deleted and is_at_admission(each.pod, evidence, settings.resource)
        for each in admitted(found, evidence, settings)
    ):
        left = [each for each in left if not is_at_admission(each.pod, evidence, settings.resource)]
    if not left:
        return None
    # Static pods come last: a tenant can create mirror pods that no kubelet admits.
    owner = evidence.lock.owner if evidence.lock else None
    left.sort(key=lambda each: (each.pod.key != owner, each.pod.static))
    first, *behind = left
    return AskKubelet(*first.pod.key, tuple(each.pod.key for each in behind))


def admitted(
    found: tuple[Candidate, ...], evidence: Evidence, settings: MatchSettings
) -> tuple[Candidate, ...]:
    """The candidates that the kubelet is admitting by its own answer."""
    return tuple(each for each in found if _is_admitted(each, evidence, settings))


def _is_admitted(candidate: Candidate, evidence: Evidence, settings: MatchSettings) -> bool:
    """Whether the kubelet knows the name, and its answer can be about this pod.

    The answer must name all app containers of the pod and no container of another. If the pod is
    new, the answer must have no ids for a later container, because the kubelet sends Allocate in
    the order of the spec.
    """
    holding = evidence.known.get(candidate.pod.key)
    if holding is None:
        return False
    named = {each.name for each in holding.containers}
    known = {each.name for each in candidate.pod.containers}
    apps = {each.name for each in candidate.pod.containers if each.role is Role.APP}
    names = [each.name for each in candidate.pod.asking(settings.resource)]
    later = names[names.index(candidate.container.name) + 1 :]
    has_later_ids = any(holding.ids_of(name, settings.resource) for name in later)
    return apps <= named <= known and not (is_new(candidate.pod, evidence) and has_later_ids)

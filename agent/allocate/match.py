"""Decides which container an Allocate is for and what it gets, or returns the next question.

An Allocate names no pod. The kubelet is the witness: it says which pod it admits. The node lock is
the proof of right: writing it needs rights on the Node, while a tenant can write annotations. The
caller asks the question, adds the answer to the evidence and decides again from the start.
"""

import datetime as dt
import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Annotated

import msgspec

from agent.allocate.room import (
    GpuUse,
    RequestRules,
    RoomClaim,
    Shortage,
    claim_of,
    read_request,
    require_serving,
    scheduled,
    scheduled_role,
    shortage,
)
from agent.cluster import (
    ALLOCATED,
    BIND_PHASE,
    PHASE_SUCCESS,
    VGPU_NODE,
    ContainerView,
    NodeLock,
    PodKey,
    PodTable,
    PodUid,
    PodView,
    Role,
)
from agent.errors import Refusal, RefusalReason, cap
from agent.ledger import ContainerKey, Holding, KubeletEpoch, Ledger, Row, is_over
from agent.model import Condition, GpuUuid, Inventory, Share, SharedGpu
from agent.setting import Field, choice, text


def decide(evidence: "Evidence") -> "Question | Grant":
    """Grant one container that asks for that many slices, or return the next question.

    Invariant: no container gets what belongs to another one. If the call may be for more than one
    container, none is served. Raises Refusal with its gate and a sentence for the pod's owner.

    1. Candidates: the pods of this node with a container that may be asking for `count` slices.
    2. Witness: the kubelet says which of them it is admitting.
    3. The kubelet is admitting exactly one of them.
    4. It is still the same pod: no new pod has its name, and no pod came that the watch lacks.
    5. The container is the next in order, or the only one that the kubelet can be asking for.
    6. A container that was answered before gets the same answer, as long as its GPUs are there.
    7. A first answer needs a right: the node lock names the pod.
    8. A first answer needs room: the GPUs in the annotation are here and serving; the shares fit.
    """
    # Steps 1 to 3: one candidate, or a question.
    pool = candidates(evidence)
    candidate = to_ask(pool, evidence) or exactly_one(pool, evidence)
    if not isinstance(candidate, Candidate):
        return candidate

    # Step 4. The lock comes before the GET of the pod: its owner may wait longer for the API server
    # (2 s in place of 0.15 s). A replay needs no lock.
    pod, row = candidate.pod, candidate.row
    question = seek_lock(pod, evidence) if row is None else None
    question = question or _still_the_same(candidate, evidence)
    if question is not None:
        return question

    # Step 5.
    asked = possible(pod, evidence)
    if sum(each.container.count == candidate.container.count for each in asked) > 1:
        raise Refusal(
            RefusalReason.MANY_PODS_ADMITTED,
            f"The kubelet lost its checkpoint and may start any of several containers of pod "
            f"{pod.title} again; delete the pod, and its controller makes a new one.",
        )

    # Steps 6 to 8.
    if row is not None:
        return replay(candidate, row, evidence)
    require_right(candidate, evidence)
    return check(candidate, evidence)


# What the operator chose.


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
    # fmt: off
    unlocked_pods: Annotated[UnlockedPods, Field("allocation.unlockedPods", choice(*UnlockedPods),
        "Which pods without a node lock are served, if the kubelet (1.34 or later) confirms that "
        "they are being admitted. strict: none. scheduled: those for which HAMi's scheduler takes "
        "none, because only init containers request GPUs; it must have bound them, and the "
        "annotation must be what it makes of their requests. unique: all.", flag="--unlocked-pods",
        live=True)] = UnlockedPods.SCHEDULED
    scheduler_name: Annotated[str, Field("allocation.schedulerName", text,
        "spec.schedulerName of the pods that HAMi's scheduler places.",
        live=True)] = "hami-scheduler"
    # fmt: on
    requests: RequestRules = RequestRules()


# The evidence, the questions whose answers add to it, and the grant.

ALWAYS = dt.datetime.min.replace(tzinfo=dt.UTC)
"""Before any pod was made."""

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

    @property
    def key(self) -> ContainerKey:
        """The key of the container's row."""
        return ContainerKey(self.pod.uid, self.container.name)


class KubeletStart(msgspec.Struct, frozen=True):
    """A kubelet instance, and what the agent saw when it began to take its lists.

    - `asks_since`: the kubelet asks for the containers of every pod that was made since then. Of
      the pods before it may have admitted some without asking, if it had lost its checkpoint.
    - `begun`: the pods that had a cgroup before it admitted its first pod; None: not known. Of all
      others it asks for each container when it admits them.
    """

    epoch: KubeletEpoch
    asks_since: dt.datetime = ALWAYS
    begun: frozenset[PodUid] | None = None


class Ask(enum.Enum):
    """What the caller finds out before it decides again."""

    KUBELET = "ask PodResources for the first pod, then for others until it knows one of them"
    RECORDS = "read the kubelet's checkpoint file, the only record of ordinary init containers"
    RUNNING = "which of these runtime ids have a live container: a pod's status can be stale"
    PODS = "LIST the pods of this node, because the watch may lag"
    POD = "GET this pod, because another pod may have its name now"
    LOCK = "wait for the Node's watch to show this pod's lock"
    NODE = "GET the Node, because its watch may lag or be broken"
    OTHERS = "wait for other calls: a new pod's own call comes if this one is not for it"


class Question(msgspec.Struct, frozen=True):
    """What to find out, and about which pods or runtime ids."""

    ask: Ask
    pods: tuple[PodKey, ...] = ()
    ids: frozenset[str] = frozenset()


class Evidence(msgspec.Struct):
    """All facts that a decision uses: the newest views, then the answers to this call's questions.

    - `count`: how many slices the container asks for.
    - `ledger`: includes rows that are being written.
    - `former_locks`: the removed locks that still prove a right, the last one first. `used_locks`:
      the last locks with the pods that were answered under them, longer than the rows last.
    - `registered`: the greatest amounts registered in the last 60 s, if not the inventory's.
    - `claimed`: pods that cannot be asking: another call answers them, or they were refused.
    - `known_before`: whether the kubelet knew a name when it began this call's container, if it was
      asked. `beside`: of each call that was under way then, the names that it knew, if known.

    The answers, which the caller adds:

    - `known`: by name what the kubelet has of the pod; None: it does not know the pod. A missing
      key: it was not asked. `witnessed`: this kubelet serves Get.
    - `recorded`: the containers in the kubelet's checkpoint file; None: not read, or unreadable.
    - `alive`: whether the container of a runtime id runs.
    - `pod_uids`: the UIDs from GETs of pods; also NOT_HERE and UNREAD.
    - `asked`: what was asked; False: there was no answer.
    """

    count: int
    settings: MatchSettings
    kubelet: KubeletStart
    table: PodTable = PodTable()
    ledger: Ledger = Ledger()
    lock: NodeLock | None = None
    inventory: Inventory = Inventory()
    now: dt.datetime = ALWAYS
    former_locks: tuple[NodeLock, ...] = ()
    used_locks: Mapping[str, PodUid] = {}
    registered: Mapping[GpuUuid, GpuUse] = {}
    claimed: frozenset[PodUid] = frozenset()
    known_before: Mapping[PodKey, bool] = {}
    beside: tuple[frozenset[PodKey] | None, ...] = ()
    known: dict[PodKey, Holding | None] = {}
    witnessed: bool = True
    recorded: AbstractSet[ContainerKey] | None = None
    alive: dict[str, bool] = {}
    pod_uids: dict[PodKey, PodUid | None] = {}
    asked: dict[Ask, bool] = {}

    @property
    def owner(self) -> PodKey | None:
        """The pod that the present node lock names."""
        return self.lock.owner if self.lock else None


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


# Step 1: the candidates, which are the pods of this node that the Allocate may be for.

ASKED_AFTER_DELETION = dt.timedelta(seconds=60)
"""How long after its deletion a pod may still be in the kubelet's queue."""

ASKED_UNWITNESSED = dt.timedelta(seconds=10)
"""The same without Get: each deleted pod is one more candidate, and two cause a refusal."""

STAMP = dt.timedelta(seconds=1)
"""The resolution of times in a pod's status: an event may be this much later than its time."""


def candidates(evidence: Evidence) -> tuple[Candidate, ...]:
    """The candidates for `count` slices: pods that exist, oldest first, then deleted pods.

    A pod is one if a container of it requests that many slices and has no row, or a row that the
    kubelet has no record of. Annotations do not matter.

    The kubelet asks at two places. It *admits* one pod after the other: new pods, and after its
    start all that were there before. There it asks in the order of the spec, stops at the first
    refusal and rejects the pod. It asks for no container that it has a record of, and after a start
    for none that ran at that moment by the runtime's word, even if it has died since. Later its
    *pod workers* start dead containers again, in parallel and in any order; they ask where there is
    no record, and after a refusal for the next container and for this one again some seconds later.
    So after a lost checkpoint the order says something only while a pod is being admitted.
    Source: kubernetes pkg/kubelet/cm/devicemanager/manager.go, devicesToAllocate.
    """
    # Nearly all pods of a node are running, and a call for each would make an Allocate slower with
    # each: so those whose containers are plainly booked are left out first.
    is_recorded = evidence.recorded is not None
    booked = set() if is_recorded else evidence.ledger.booked_by(evidence.kubelet.epoch)
    waits = {
        pod.uid: pod
        for pod in evidence.table.pods.values()
        for each in pod.containers
        if each.count == evidence.count
        and (
            ContainerKey(pod.uid, each.name) not in booked
            or (pod.namespace, pod.name) in evidence.known
        )
    }
    present = [pod for pod in waits.values() if not pod.terminal]
    present.sort(key=lambda pod: (pod.created, pod.key))

    found = list[Candidate]()
    for pod in (*present, *_deleted_pods(evidence)):
        if pod.uid in evidence.claimed or not evidence.known_before.get(pod.key, True):
            continue
        # While the agent has not asked PodResources about the pod, the call may be for any of its
        # containers that wait, because records may be missing here.
        is_asked = pod.key in evidence.known or not evidence.witnessed
        asking = possible(pod, evidence) if is_asked else waiting(pod, evidence)
        found += [each for each in asking if each.container.count == evidence.count][:1]
    return tuple(found)


def waiting(pod: PodView, evidence: Evidence) -> tuple[Candidate, ...]:
    """The containers of `pod` for which the kubelet may still send Allocate, in its order.

    That is the order of the spec, init containers first. The kubelet sends none for a container
    that runs. It does for an ended init container, if it started without its records.
    """
    rows = {row.key.container: row for row in evidence.ledger.rows_of(pod.uid)}
    is_deleted = pod.uid not in evidence.table.pods
    return tuple(
        Candidate(pod, container, rows.get(container.name), is_deleted)
        for container in pod.asking(evidence.settings.resource)
        # Its status can be late, or from before a reboot: a live cgroup shows that it runs.
        if not evidence.alive.get(container.running_id or "")
        and not is_over(container, evidence.kubelet.epoch)
        and not _is_held(pod, container, rows.get(container.name), evidence)
    )


def possible(pod: PodView, evidence: Evidence) -> tuple[Candidate, ...]:
    """The containers of `pod` for which the kubelet may be asking now, of any count."""
    found = waiting(pod, evidence)
    if is_new(pod, evidence):
        return found[:1]
    # What was dead when the kubelet started and has no record shows that the pod is being admitted.
    dead = [place for place, one in enumerate(found) if _was_dead(one, evidence)]
    return found[: dead[0] + 1] if dead else found


def is_at_admission(pod: PodView, evidence: Evidence) -> bool:
    """Whether the kubelet can ask for this pod only when it admits it, which it does serially."""
    return is_new(pod, evidence) or any(_was_dead(one, evidence) for one in waiting(pod, evidence))


def is_new(pod: PodView, evidence: Evidence) -> bool:
    """Whether no kubelet before this one can have started a container of the pod."""
    rows = evidence.ledger.rows_of(pod.uid)
    return not pod.has_run and all(row.epoch == evidence.kubelet.epoch for row in rows)


def _was_dead(candidate: Candidate, evidence: Evidence) -> bool:
    """Whether the kubelet found the container dead when it started, and asks for it at admission.

    Only a pod without a cgroup proves it. A status that says so may be out of date: the former
    kubelet may have started the container again without telling. That nobody saw it run proves
    nothing either: it can have died between the kubelet's look and the agent's.
    """
    begun, started = evidence.kubelet.begun, candidate.container.started_at
    has_begun_since = started is not None and started + STAMP > evidence.kubelet.epoch.since
    return begun is not None and candidate.pod.uid not in begun and not has_begun_since


def _is_held(pod: PodView, container: ContainerView, row: Row | None, evidence: Evidence) -> bool:
    """Whether the kubelet has a record of the container, as far as is known.

    It loses records if it is killed before it writes its checkpoint, or if the checkpoint is lost.
    """
    holding, recorded = evidence.known.get(pod.key), evidence.recorded
    if holding and holding.ids_of(container.name, container.resource):
        return True
    # The checkpoint has UIDs and all containers; PodResources has names alone.
    if recorded is not None:
        return ContainerKey(pod.uid, container.name) in recorded
    # PodResources does not list ordinary init containers.
    if container.role is Role.INIT or not evidence.witnessed:
        return row is not None and row.epoch == evidence.kubelet.epoch
    # If PodResources was asked, it named no ids; the row may be booked for a pod of the same name.
    return holding is None and row is not None and row.is_booked_by(evidence.kubelet.epoch)


def _deleted_pods(evidence: Evidence) -> Iterator[PodView]:
    """Deleted pods without an answer that the kubelet may still have in its queue.

    - A pod that was answered before the kubelet lost its records is left out. It ends at once with
      any answer, but as a candidate it would cost its successor an answer.
    - So is a pod whose successor has run or was answered: the kubelet admits pods of a name in
      their order.
    - A deletion time in the future was taken before the clock was set back; the pod is left out.
    """
    life = ASKED_AFTER_DELETION if evidence.witnessed else ASKED_UNWITNESSED
    for stone in evidence.table.tombstones:
        pod, is_recent = stone.pod, dt.timedelta(0) <= evidence.now - stone.deleted_at <= life
        is_answered = pod.annotations.get(BIND_PHASE) == PHASE_SUCCESS
        # Nearly all deleted pods were answered; only for the others all pods are gone through.
        if not is_recent or is_answered or evidence.ledger.rows_of(pod.uid):
            continue
        if pod.terminal or not pod.gpu_containers:
            continue
        next_one = evidence.table.named(*pod.key)
        rows = evidence.ledger.rows_of(next_one.uid) if next_one else ()
        is_asked = any(row.epoch == evidence.kubelet.epoch for row in rows)
        if not (next_one and (next_one.has_run or is_asked)):
            yield pod


# Step 2: the kubelet is asked about the candidates, to find the pod that it is admitting.

MANY = 8
"""With more candidates than this, the agent does not ask about all. After a reboot with a lost
checkpoint there are up to 110, and the kubelet answers 100 calls a second."""


def to_ask(found: tuple[Candidate, ...], evidence: Evidence) -> Question | None:
    """The next question that has to be answered before a candidate is taken; None: none is left.

    PodResources Get knows a pod from just before its admission. So among the candidates, the pod
    being admitted is the one that Get knows without device ids. The owner of the node lock is asked
    about first.
    """
    # The decision needs the kubelet's checkpoint file, which has UIDs:
    # - if Get is missing, or for init containers, which are listed nowhere else;
    # - if this kubelet once named ids for a candidate's container and now does not: one of the two
    #   answers was about another pod of that name;
    # - with many candidates: those in the file need no PodResources Get.
    if Ask.RECORDS not in evidence.asked and (
        len(found) > MANY
        or any(
            not evidence.witnessed
            or (each.row is not None and each.row.is_booked_by(evidence.kubelet.epoch))
            or any(container.role is Role.INIT for container in each.pod.gpu_containers)
            for each in found
        )
    ):
        return Question(Ask.RECORDS)

    if question := _running((each.pod for each in found), evidence):
        return question
    if not evidence.witnessed:
        return None

    left = [each.pod for each in found if each.pod.key not in evidence.known]
    # The kubelet admits one pod after the other. So with many candidates, once one is known to be
    # admitted, only those remain whose containers the kubelet may be restarting in parallel.
    if len(found) > MANY and any(
        not each.deleted and is_at_admission(each.pod, evidence)
        for each in admitted(found, evidence)
    ):
        left = [pod for pod in left if not is_at_admission(pod, evidence)]

    # Static pods come last: a tenant can create mirror pods that no kubelet admits.
    left.sort(key=lambda pod: (pod.key != evidence.owner, pod.static))
    return Question(Ask.KUBELET, tuple(pod.key for pod in left)) if left else None


def _running(pods: Iterable[PodView], evidence: Evidence) -> Question | None:
    """Ask which containers of the pods run, as far as that is not known."""
    ids = {each.running_id for pod in pods for each in pod.containers if each.running_id}
    unchecked = frozenset(ids - evidence.alive.keys())
    return Question(Ask.RUNNING, ids=unchecked) if unchecked else None


def admitted(found: tuple[Candidate, ...], evidence: Evidence) -> tuple[Candidate, ...]:
    """The candidates that the kubelet is admitting by its own answer; without Get all may be."""
    return tuple(each for each in found if not evidence.witnessed or _is_admitted(each, evidence))


def _is_admitted(candidate: Candidate, evidence: Evidence) -> bool:
    """Whether the kubelet knows the name, and its answer can be about this pod.

    If the pod is new, the answer must have no ids for a later container, because the kubelet sends
    Allocate in the order of the spec.
    """
    pod, holding = candidate.pod, evidence.known.get(candidate.pod.key)
    if holding is None:
        return False
    named = holding.containers.keys()
    apps = {each.name for each in pod.containers if each.role is Role.APP}
    # It names all app containers of its pod and no other: this one is of another pod of that name.
    if not apps <= named <= {each.name for each in pod.containers}:
        return False
    resource = evidence.settings.resource
    names = [each.name for each in pod.asking(resource)]
    later = names[names.index(candidate.container.name) + 1 :]
    return not (is_new(pod, evidence) and any(holding.ids_of(name, resource) for name in later))


# Step 3: the one candidate that the kubelet is admitting. Between several it never guesses.


def exactly_one(found: tuple[Candidate, ...], evidence: Evidence) -> Candidate | Question:
    """The candidate that the kubelet admits, or the question that has to be answered first.

    PodResources answers by name, also for a pod that is deleted during its admission. If a deleted
    and an existing pod have the name, the existing one is taken: the deleted one is being killed,
    and a later Allocate for the existing one gets the same answer.

    Raises:
        Refusal: no pod, several pods, or deleted pods alone are being admitted.
    """
    known = admitted(found, evidence)
    present = [each for each in known if not each.deleted]
    if evidence.witnessed and present and len({each.pod.key for each in known}) == 1:
        return present[0]

    if not present and evidence.ledger.rows and Ask.RECORDS not in evidence.asked:
        # The checkpoint may show that a container counts as held but is not.
        return Question(Ask.RECORDS)
    if Ask.PODS not in evidence.asked:
        # The pod table lags, or one of the pods has ended: kubelets before 1.34.7 and 1.35.4 still
        # admit it. For the lock's owner the API server has longer, so the lock comes first if the
        # one in view is of no pod that may be asking, and a newer one can be read.
        owner = evidence.owner
        is_nobodys = owner is None or evidence.known.get(owner, True) is None
        is_lock_unseen = not known and is_nobodys and Ask.NODE not in evidence.asked
        return Question(Ask.NODE if is_lock_unseen else Ask.PODS)

    newcomer = _beside_dead(known, evidence) if evidence.witnessed else None
    if newcomer is not None:
        return newcomer

    names = cap(", ".join(sorted({each.pod.title for each in known})))
    if not (evidence.asked[Ask.PODS] and evidence.table.synced):
        raise _unknown(
            f"no pod that it knows of, or several ({names or 'none'}) may be asking for "
            f"{evidence.count} slice(s)"
        )
    if not known:
        raise Refusal(
            RefusalReason.NO_POD_ADMITTED,
            f"The kubelet asks for {evidence.count} slice(s), but no pod of this node that "
            "requests this number is being admitted. Create the pod again, if it has no controller "
            "and was not deleted. A static pod gets no GPUs: make it a DaemonSet.",
        )
    first = known[0]
    if not present:
        raise Refusal(
            RefusalReason.POD_DELETED,
            f"Pod {first.pod.title} was deleted before its admission; create it again.",
        )
    if evidence.witnessed:
        raise Refusal(
            RefusalReason.MANY_PODS_ADMITTED,
            f"The kubelet may be asking for any of several pods ({names}), and the agent does not "
            "guess. If this pod is new, create it again. If they ran before, the kubelet lost its "
            "records of them: delete all but one of them.",
        )

    # Kubelets before 1.34 have no Get: a sole candidate is served if it holds the node lock, for
    # which a first answer still waits.
    if len(known) == 1 and (first.row is None or lock_of(first.pod, evidence)):
        return first
    raise Refusal(
        RefusalReason.WITNESS_SILENT,
        "This kubelet cannot say which pod it admits, and the agent serves only a pod that holds "
        f"the node lock and alone can be meant ({names}); start GPU pods one at a time, or upgrade "
        "the kubelet to 1.34.",
    )


def _beside_dead(known: tuple[Candidate, ...], evidence: Evidence) -> Candidate | Question | None:
    """The one new pod that asks beside dead containers, or the next question; None: not clear.

    The others have dead containers whose records the kubelet lost. It asks for them every few
    seconds, and in vain if nothing tells them apart. They must not cost every new pod its start:
    the kubelet is admitting this one now, and the scheduler has just placed it.
    """
    # A pod from before this kubelet took the lists may have been admitted without asking, and ask
    # when its container dies.
    new = [
        each
        for each in known
        if not each.deleted
        and each.pod.created >= evidence.kubelet.asks_since
        and is_at_admission(each.pod, evidence)
    ]
    if len(new) != 1 or new[0].row is not None:
        return None

    pod = new[0].pod
    # A deleted pod does not matter if the new one has its name: see exactly_one. A call beside this
    # one may be the new pod's, unless the kubelet did not know the pod yet when that call came.
    if any(each.deleted and each.pod.key != pod.key for each in known) or any(
        names is None or pod.key in names for names in evidence.beside
    ):
        return None

    # The kubelet answers by name: if a deleted pod of this name still runs, the answer may be about
    # that one, and nothing tells the call of the new pod from those of the dead containers.
    graves = [stone.pod for stone in evidence.table.tombstones if stone.pod.key == pod.key]
    if question := _running(graves, evidence):
        return question
    if any(evidence.alive.get(each.running_id or "") for one in graves for each in one.containers):
        return None

    if not (lock_of(pod, evidence) or may_be_unlocked(pod, evidence)):
        return seek_lock(pod, evidence)
    is_first = evidence.known_before.get(pod.key, False) and not evidence.beside
    return new[0] if is_first or Ask.OTHERS in evidence.asked else Question(Ask.OTHERS)


def rejected_pod(evidence: Evidence) -> PodUid | None:
    """The pod for which no further Allocate comes after this refusal; None: not known.

    The kubelet rejects a pod if one of its containers is refused at its admission. For a pod that
    has run, it sends Allocate again. If a deleted and an existing pod have the same name, the
    Allocate was for the deleted one, which came first.
    """
    found = candidates(evidence)
    if evidence.witnessed:
        if any(each.pod.key not in evidence.known for each in found):
            return None  # the call may have been for the one of which the kubelet said nothing
        found = admitted(found, evidence)
        if len({each.pod.key for each in found}) != 1:
            return None

    deleted = [each.pod.uid for each in found if each.deleted]
    # A kubelet before 1.34 confirms nobody: the call may have been that of a pod that is gone.
    if deleted or not evidence.witnessed:
        return deleted[0] if deleted else None

    pod = found[0].pod
    # A deleted pod of the name is no candidate once one was answered, but may still be asking.
    may_be_another = any(
        stone.pod.key == pod.key
        and evidence.now - stone.deleted_at <= ASKED_AFTER_DELETION
        and stone.pod.uid not in evidence.claimed
        for stone in evidence.table.tombstones
    )
    is_asked_again = len(found) != 1 or found[0].row is not None or pod.has_run
    return None if may_be_another or is_asked_again else pod.uid


def _unknown(what: str) -> Refusal:
    """The refusal while the API server does not answer, and `what` makes its word necessary."""
    return Refusal(
        RefusalReason.PODS_UNKNOWN,
        f"The agent could not ask the API server, and {what}; the kubelet or the pod's controller "
        "starts it again; without a controller, create it again.",
    )


# Step 4: no other pod has taken its name, and none asks that no view shows.


def _still_the_same(candidate: Candidate, evidence: Evidence) -> Question | None:
    """The question that must rule out a new pod that the watch has not shown; None: ruled out.

    A pod whose name was not generated can be created again with another share. Once a container of
    a pod was answered at its admission, the calls that follow are for the same pod. Raises Refusal.
    """
    pod, is_listed = candidate.pod, evidence.asked.get(Ask.PODS)
    # PodResources says "known, no devices" of a pod that is being admitted, of one that was started
    # without an Allocate, and of one whose records are lost. The last two ask only when a container
    # has died. Then a pod that no view shows may be asking instead.
    if not is_at_admission(pod, evidence) and not is_listed:
        if is_listed is None:
            return Question(Ask.PODS)
        raise _unknown(
            f"the kubelet has no record of pod {pod.title}, so a pod that the agent does not know "
            "may be asking"
        )

    if not pod.reusable_name or _is_under_way(candidate, evidence):
        return None
    if pod.key not in evidence.pod_uids:
        return None if is_listed else Question(Ask.POD, (pod.key,))

    uid = evidence.pod_uids[pod.key]
    # A GET that failed proves nothing.
    if uid != pod.uid and (uid is UNREAD or is_listed is False):
        raise _unknown(f"the name of pod {pod.title} may be another pod's by now")
    return None if uid == pod.uid or is_listed else Question(Ask.PODS)


def _is_under_way(candidate: Candidate, evidence: Evidence) -> bool:
    """Whether an earlier container of the pod was answered at this admission.

    PodResources must say that the kubelet holds it, or a new pod may have its name. Of ordinary
    init containers it says nothing, so that they prove nothing.
    """
    epoch, known = evidence.kubelet.epoch, evidence.known.get(candidate.pod.key)
    return candidate.row is None and any(
        row.epoch == epoch
        and (known is None or bool(known.ids_of(row.key.container, row.resource)))
        for row in evidence.ledger.rows_of(candidate.pod.uid)
    )


# Step 6: a container that has a row is answered as before.


def replay(candidate: Candidate, row: Row, evidence: Evidence) -> Question | Grant:
    """The same answer again. Raises Refusal if one of its GPUs is gone, lost or in MIG mode.

    A GPU that the operator has filtered out since still counts: its container may start again.
    """
    for share in row.shares:
        gpu = evidence.inventory.find(share.uuid)
        named = gpu.gpu.title if gpu else f"GPU {share.uuid}"
        is_there = gpu and gpu.there and gpu.health.condition is not Condition.LOST
        if gpu and is_there and not gpu.gpu.mig_enabled:  # in MIG mode nothing can use all of it
            continue
        if Ask.PODS not in evidence.asked:
            return Question(Ask.PODS)  # a pod that the watch has not shown may be asking
        raise Refusal(
            RefusalReason.BAD_GPU,
            f"Container {row.key.container} of pod {candidate.pod.title} holds {named}, which is "
            "gone, lost or in MIG mode; delete the pod so that it is placed again.",
        )
    return Grant(candidate, row.group, row.shares)


# Step 7: the node lock must name the pod.


def require_right(candidate: Candidate, evidence: Evidence) -> None:
    """Require that HAMi's scheduler placed the pod: the lock names it, or it needs none.

    The lock's time stamp and the pod's bind-time do not count: HAMi's scheduler writes the two in
    an order that differs by release, seconds apart. Raises Refusal.
    """
    pod, settings, lock = candidate.pod, evidence.settings, evidence.lock
    if pod.static:
        raise Refusal(
            RefusalReason.STATIC_POD,
            f"Pod {pod.title} is a static pod, which HAMi's scheduler never sees; create it "
            "through the API server.",
        )
    for container in pod.asking(settings.resource):
        # The scheduler takes no lock for such a request, and leaves forged annotations as they are.
        amounts, name = dict(container.others), settings.requests.memory
        if read_request(container.count, amounts, settings.requests) is None:
            raise Refusal(
                RefusalReason.DROPPED_REQUEST,
                f"HAMi's scheduler cannot count the {amounts[name]} MiB that container "
                f"{container.name} of pod {pod.title} requests, so it dropped the request; write "
                f"{name} as a number of MiB without a unit.",
            )
    if lock_of(pod, evidence) or may_be_unlocked(pod, evidence):
        return

    is_bound = not _is_made_with_its_node(pod)
    if is_bound and evidence.asked.get(Ask.NODE) is False:
        raise _unknown(f"no node lock that it knows of names pod {pod.title}")
    again = f"create it again with schedulerName {settings.scheduler_name}"
    if is_bound and _takes_lock(pod) and lock is not None and lock.owner not in {None, pod.key}:
        raise Refusal(
            RefusalReason.NO_RIGHT,
            f"Pod {pod.title} asks for GPUs while HAMi's scheduler places {'/'.join(lock.owner)} "
            f"on this node: another scheduler bound it, or its lock was taken over; {again}.",
        )
    why = "another scheduler bound it, the lock was removed, or it started before without its GPU"
    if not is_bound:
        why, again = "it was created with its node", "create it again without spec.nodeName"
    elif not _takes_lock(pod):
        again += " and with the GPU in an app container too"
    upgrade = "" if evidence.witnessed else " and upgrade the kubelet to 1.34"
    raise Refusal(
        RefusalReason.NO_LOCK,
        f"Pod {pod.title} holds no node lock of HAMi's scheduler: {why}; {again}, or an "
        f"operator has to set another allocation.unlockedPods{upgrade}.",
    )


def seek_lock(pod: PodView, evidence: Evidence) -> Question | None:
    """The question whose answer may show the pod's lock; None: there is none, or it is shown.

    A pod that needs no lock is waited for where HAMi takes one. Else the Node is read once, because
    HAMi after 2.10 takes one for each pod, and only a lock that a row notes is removed at once.
    """
    if lock_of(pod, evidence) or _is_made_with_its_node(pod):
        return None
    is_needed = _takes_lock(pod) or not may_be_unlocked(pod, evidence)
    if is_needed and Ask.LOCK not in evidence.asked:
        return Question(Ask.LOCK, (pod.key,))
    return None if Ask.NODE in evidence.asked else Question(Ask.NODE)


def may_be_unlocked(pod: PodView, evidence: Evidence) -> bool:
    """Whether the pod needs no lock. A kubelet before 1.34 confirms no pod, so each needs one.

    By default a pod needs none that HAMi's scheduler bound and for which it takes none. Of this the
    pod's author writes only the scheduler's name: of a pod without startTime only a scheduler has
    set PodScheduled, because the kubelet sets the two together, after the admission. Whether the
    annotation is the scheduler's is checked with the share.
    """
    settings, is_bound = evidence.settings, pod.scheduled and not pod.started
    is_hamis = is_bound and pod.scheduler == settings.scheduler_name and not _takes_lock(pod)
    return evidence.witnessed and (
        settings.unlocked_pods is UnlockedPods.UNIQUE
        or (settings.unlocked_pods is UnlockedPods.SCHEDULED and is_hamis)
    )


def _is_made_with_its_node(pod: PodView) -> bool:
    """Whether no scheduler bound it.

    A kubelet that rejects a pod hides who bound it, and its successor asks again if it died before
    it had told the rejection. Such a pod counts as bound: no tenant can bring that about.
    """
    return not (pod.scheduled or pod.started)


def _takes_lock(pod: PodView) -> bool:
    """Whether HAMi's scheduler locks the node for the pod: not for init containers alone."""
    return any(container.role is Role.APP for container in pod.gpu_containers)


def lock_of(pod: PodView, evidence: Evidence) -> NodeLock | None:
    """The present or former lock that proves the pod's right, or None.

    It proves nothing for a pod that no scheduler bound: its author may have given it the name of a
    pod that was deleted before its answer.

    A former lock counts because another vendor's plugin removes the shared lock when its own part
    of the pod is done. A lock under which another pod of the same name was answered proves nothing:
    a tenant can make such a pod, and a late watch still shows the removed lock. Exception: the
    present lock after a GET of the Node, because two pods of a name can take it within 1 s, and
    HAMi lets the next pod of the name take it over.
    """
    if _is_made_with_its_node(pod):
        return None
    for lock in (evidence.lock, *evidence.former_locks):
        if lock is not None and lock.owner == pod.key:
            is_read = lock is evidence.lock and evidence.asked.get(Ask.NODE)
            users = {evidence.used_locks.get(lock.value)}
            users |= evidence.ledger.answered_under(lock.value)
            if is_read or users <= {None, pod.uid}:
                return lock
    return None


# Step 8: the container may get what the scheduler's annotation says.


def check(candidate: Candidate, evidence: Evidence) -> Question | Grant:
    """Grant what the annotation says if its GPUs serve and have room, or ask. Raises Refusal.

    Tenants can write annotations. So every GPU and amount is checked against the pod's request,
    which nobody can change, the inventory and the ledger.
    """
    group, shares = _assigned(candidate, evidence.settings)
    lock = lock_of(candidate.pod, evidence)
    gpus = _usable(candidate, shares, evidence, has_lock=lock is not None)
    uid, pods = candidate.pod.uid, evidence.table.pods
    # A dead row does not count here. Reconcile closes it and removes its directory. A pod that the
    # kubelet does not know is dead only if this kubelet instance was answered: a new one may not
    # have admitted the pod yet.
    beside = {row.key: row for uuid in gpus for row in evidence.ledger.rows_on(uuid)}
    live = [
        row
        for row in beside.values()
        if row.is_live(evidence.table)
        and (row.epoch != evidence.kubelet.epoch or evidence.known.get(row.pod_key, True))
    ]
    wanted = RoomClaim(uid, candidate.container.role, shares, group)
    true = [claim_of(row) for row in live if row.counts(pods.get(row.key.pod_uid))]
    own = shortage(wanted, (claim for claim in true if claim.pod_uid == uid), gpus)
    if own is not None:
        raise _oversold(candidate, own, "let its containers ask for less, and create it again")
    oversold = shortage(wanted, true, gpus)
    hami = [claim for row in live if (claim := scheduled(row, pods.get(row.key.pod_uid)))]
    role = scheduled_role(wanted.role, group, candidate.pod)
    short = oversold and shortage(msgspec.structs.replace(wanted, role=role), hami, gpus)
    if short is None or oversold is None:
        return Grant(candidate, group, shares, lock=lock.value if lock else "", oversold=oversold)
    # One of the two sums must fit. Another pod that has ended, unseen as yet, may be in the way.
    full = {oversold.gpu.uuid, short.gpu.uuid}
    in_the_way = [
        row.pod_key
        for row in live
        if row.key.pod_uid != uid and any(share.uuid in full for share in row.limits)
    ]
    unasked = [key for key in in_the_way if key not in evidence.known]
    if unasked and evidence.witnessed:
        return Question(Ask.KUBELET, (unasked[0],))
    if in_the_way and Ask.PODS not in evidence.asked:
        # The scheduler's watch may have shown a change that the agent's watch has not.
        return Question(Ask.PODS)
    raise _oversold(candidate, oversold, "create it again, so that it is placed again")


def _oversold(candidate: Candidate, short: Shortage, to_do: str) -> Refusal:
    gate = RefusalReason.MEMORY_EXCEEDED if short.memory else RefusalReason.CORES_EXCEEDED
    what, total, limit = short.amounts
    return Refusal(
        gate,
        f"With container {candidate.container.name} of pod {candidate.pod.title}, "
        f"{short.gpu.gpu.title} would have {total} of {what} promised, and has {limit}; {to_do}.",
    )


def _assigned(candidate: Candidate, settings: MatchSettings) -> tuple[int, tuple[Share, ...]]:
    """The container's group number and shares in the annotation. Raises Refusal."""
    pod, container, name = candidate.pod, candidate.container, candidate.pod.title
    if pod.groups_error:
        raise Refusal(
            RefusalReason.MALFORMED_ANNOTATION,
            f"Annotation {ALLOCATED} of pod {name} cannot be read: {cap(pod.groups_error)}; "
            "create the pod again.",
        )
    if not any(pod.groups or ()):
        raise Refusal(
            RefusalReason.NO_ANNOTATION,
            f"Pod {name} was not placed by HAMi's scheduler: annotation {ALLOCATED} names no GPU; "
            "create it with schedulerName of HAMi's scheduler.",
        )
    node = pod.annotations.get(VGPU_NODE)
    if node != settings.node:
        raise Refusal(
            RefusalReason.WRONG_NODE,
            f"Pod {name} was given GPUs of node {cap(node or 'none', 63)}, and this is "
            f"{settings.node}; create it again.",
        )
    paired = pair_groups(pod.groups or (), pod.asking(container.resource), f"Pod {name}: ")
    if container.name not in paired:
        raise Refusal(
            RefusalReason.NO_CONTAINER_LEFT,
            f"HAMi's scheduler wrote no GPUs for container {container.name} of pod {name}; "
            "create it again.",
        )
    return paired[container.name]


def pair_groups(
    groups: Sequence[tuple[Share, ...]], containers: Sequence[ContainerView], whose: str = ""
) -> dict[str, tuple[int, tuple[Share, ...]]]:
    """Pair the containers that request GPUs, in order, with the non-empty groups, in order.

    By container: the position of its group, and its shares. `containers` are all of the pod's, init
    containers first. Positions in the annotation do not matter, because schedulers up to and
    including 2.8 shift them. Those also write no groups for init containers; then the groups belong
    to the regular containers.

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
            f"{whose}the scheduler wrote GPUs for {len(filled)} containers, but {len(asking)} "
            "containers of the pod request GPUs; delete the pod and create it again.",
        )
    paired = {}
    for (index, shares), container in zip(filled, asking if all_asking else regular, strict=True):
        if len(shares) != container.count:
            raise Refusal(
                RefusalReason.COUNT_MISMATCH,
                f"{whose}container {container.name} requests {container.count} GPUs, but the "
                f"scheduler wrote {len(shares)} for it; delete the pod and create it again.",
            )
        paired[container.name] = index, shares
    return paired


def _usable(
    candidate: Candidate, shares: tuple[Share, ...], evidence: Evidence, *, has_lock: bool
) -> dict[GpuUuid, SharedGpu]:
    """The GPUs of the shares, with the greatest amounts that they registered in the last 60 s.

    Raises Refusal unless all are known and serving, and no share is more than the container
    requests, as HAMi after 2.10 requires too. 0 % of compute is no limit, and 0 MiB is all of the
    memory. Without a lock, nothing else tells that the scheduler wrote the annotation: amounts must
    be the same as in the request then, and the rules that are known must do.
    """
    gpus: dict[GpuUuid, SharedGpu] = {}
    settings, container, title = evidence.settings, candidate.container, candidate.pod.title
    is_exact = settings.unlocked_pods is UnlockedPods.SCHEDULED and not has_lock
    request = read_request(container.count, dict(container.others), settings.requests)
    for share in shares:
        gpu = evidence.inventory.find(share.uuid)
        named = gpu.gpu.title if gpu else f"GPU {cap(share.uuid, 64)}"
        if gpu is None or not (gpu.present or gpu.health.condition is Condition.LOST):
            why = f" ({gpu.obstacle})" if gpu and gpu.obstacle else ""
            raise Refusal(
                RefusalReason.UNKNOWN_GPU,
                f"Pod {title} was given {named}, which this node does not share"
                f"{why}; create it again, so that it is placed again.",
            )
        require_serving(gpu, f"Pod {title}")
        recent = evidence.registered.get(gpu.uuid, GpuUse())
        mib = max(gpu.registered_mib, recent.memory_mib)
        percent = max(gpu.core_percent, recent.core_percent)
        gpus[share.uuid] = msgspec.structs.replace(gpu, registered_mib=mib, core_percent=percent)
        if request is None or not (settings.requests.known or is_exact):
            continue

        most = request.memory_on(mib) or mib
        memory, cores = share.memory_mib or mib, share.core_percent
        is_more = memory > most or 0 < request.cores < (cores or 101)
        is_other = cores != request.cores or (memory != most and request.memory_mib > 0)
        if is_more or (is_exact and is_other):
            raise Refusal(
                RefusalReason.NOT_AS_REQUESTED,
                f"Container {container.name} of pod {title} requests {most} MiB and "
                f"{request.cores or 100} % of the compute, but annotation {ALLOCATED} gives it "
                f"{memory} MiB and {cores or 100} % of {named}: somebody changed it, or the "
                "agent has other settings than the scheduler; delete the pod, and its controller "
                "makes a new one.",
            )
    return gpus

"""Which refusals of the agent are right where something fails, and under which condition.

Each one is held against the world as it was when the kubelet began to ask and when it was refused.
One that none of these conditions explains is a breach: a false refusal is as bad as a wrong answer.
"""

import asyncio
import datetime as dt
import enum
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

from agent.allocate.match import UnlockedPods
from agent.allocate.service import UNANSWERED_PAUSES
from agent.cluster import ALLOCATED, BIND_PHASE, PHASE_SUCCESS, PodUid
from agent.hami.annotations import decode_pod_devices
from agent.ledger import Decider, Holder, Ledger, Row
from agent.model import Condition, Share
from agent.sandbox.kubelet.pods import KubeletEvent
from agent.sandbox.store import Json
from tests.builders import NODE
from tests.machine.audit import asked_containers, key_of
from tests.machine.kubelet import REFUSED_ELSEWHERE, RESOURCE
from tests.machine.site import MachineSite

CROWDED = 2.0
"""Seconds for which other clients of PodResources may have used up its rate limit."""


_UNSEEN = "2001 2003 2007 2010"
"""Gates where the pod that asks may be one that no view shows; of its name a grave may be known."""
_SHARES = "3001 3004 3005 3006 3007"
_ROOM = "4003 4004"
_ANY = ""


class Fact(enum.Enum):
    """What of the world explains a refusal, and through which gates; the first one is counted."""

    GONE = "the pod was deleted before its Allocate was over: it ends, whatever it hears", _ANY
    OVER = "the pod had failed, for another reason, before it was asked for", _UNSEEN
    STATIC = "a static pod: HAMi's scheduler never saw it, nor can the agent", _ANY
    STRAY = "a pod that HAMi's scheduler did not place", _ANY
    EDITED = "its annotation is not what the scheduler wrote", _SHARES
    LOCKLESS = "HAMi takes no lock for it, and `unlockedPods: strict` refuses such a pod", "2005"
    STARTED = "HAMi takes no lock for it, and a kubelet started it unasked, or rejected it", "2005"
    UNLOCKED = (
        "the lock on the Node does not name it: the scheduler gave it up or away",
        "2004 2005",
    )
    NO_API = "the API server does not answer", _UNSEEN
    NO_LIST = "the pods of the node cannot be listed", _UNSEEN
    NO_WITNESS = "the kubelet answers no PodResources, or others used up its rate", "2007 5002"
    STARVED = "the agent got less of the processor than its chart promises", "5006"
    SLOW_DISK = "the disk takes too long for the time there is", "5001 5002"
    BAD_GPU = "a GPU that it was given is bad or lost, or was when it asked", "4001 4002"
    LIE = "a tenant made little of what its pod holds, and the scheduler believed it", _ROOM
    SOLD = "HAMi's scheduler has sold the same room to others already", _ROOM
    UNTOLD = "a kubelet has rejected another pod, and its status hides it for 10 s", _ROOM
    HIDDEN = "a rejected pod's status no longer says that its init phase ended", _ROOM
    LOST = "the kubelet lost its records of this pod, and says not what it starts", "2002 2009 2010"
    BESIDE = "it lost those of other pods, and starts their containers at the same time", "2009"
    NAMESAKE = "it lost them, and knows the name by a deleted pod that still runs, too", "2002"
    OVERLAP = "it asks for a dead container whose record it lost at the same time", "2002"
    TAKEN = "another call under way was taken for it, and the kubelet asks again soon", "2001"
    UNPROVEN = "it was made before the kubelet began to take the lists, which was late", "2002"
    BLIND = "the agent cannot see the pod that asks, and sees several with lost records", "2002"
    RIGHTLESS = (
        "STARTED, and another pod's dead container lost its record: either may ask",
        "2002",
    )

    def explains(self, gate: str) -> bool:
        """Whether a refusal through this gate is right where the fact holds."""
        _, gates = self.value
        return not gates or gate.removeprefix("HA-") in gates.split()


class Refusals:
    """Judges each refusal when it happens. `counted`: by gate and the first fact that explains.

    `right`: pods whose refusal a fact explains.
    """

    def __init__(self, site: MachineSite) -> None:
        self.counted: Counter[str] = Counter()
        self.right: set[str] = set()
        self.lies = 0
        self.crowded_at = -CROWDED
        self._site = site
        self._before: frozenset[Fact] = frozenset()
        self._failed = 0
        """Calls of PodResources that had failed when the kubelet asked."""
        self._open: set[tuple[str, str]] = set()
        self._beside: set[str] = set()
        """Pods whose calls overlapped with another one's."""
        site.kubelet.history.listen(self._hear)

    def _hear(self, event: KubeletEvent) -> None:
        if event.kind == "preferring":
            self._beside.discard(event.pod)
        if event.kind in ("preferring", "allocating"):
            self._open.add((event.pod, event.container))
            if len(self._open) > 1:
                self._beside |= {pod for pod, _ in self._open}
            self._failed = self._site.host.trouble.failed
            self._before = frozenset(self._facts(event.pod))
        elif event.kind == "allocate_refused" and "[HA-" in event.text:
            self._judge(event)
        if event.kind in ("allocated", "allocate_refused"):
            self._open.discard((event.pod, event.container))
        elif event.kind == "started":
            self._open.clear()

    def _judge(self, event: KubeletEvent) -> None:
        gate = "HA-" + event.text.rpartition("[HA-")[2].partition("]")[0]
        facts = {*self._before, *self._facts(event.pod)}
        for fact in Fact:
            if fact in facts and fact.explains(gate):
                self.counted[f"{gate} {fact.name}"] += 1
                self.right.add(event.pod)
                return
        names = sorted(fact.name for fact in facts)
        who = f"{event.pod} {event.container}"
        self._site.audit.breaches.append(f"a good pod was refused: {who}: {event.text}: {names}")

    def _facts(self, uid: str) -> Iterator[Fact]:
        own, lost = tuple(self._of_pod(uid)), tuple(self._lost())
        yield from own
        site = self._site
        if site.faults.is_down or site.faults.trip:
            yield Fact.NO_API
        if site.faults.is_down or site.faults.list_fails:
            yield Fact.NO_LIST
        now = asyncio.get_running_loop().time()
        was_silent = site.host.trouble.failed - self._failed >= len((0.0, *UNANSWERED_PAUSES))
        if site.host.trouble.silent or was_silent or now - self.crowded_at < CROWDED:
            yield Fact.NO_WITNESS
        if site.host.trouble.write:
            yield Fact.SLOW_DISK
        if site.host.trouble.starved:
            yield Fact.STARVED
        if self.lies:
            yield Fact.LIE
        if (site.faults.is_down or site.faults.list_fails) and lost:
            yield Fact.BLIND
        if uid in self._beside and lost:
            yield Fact.OVERLAP
            if uid in dict(lost):
                yield Fact.TAKEN
        pod, late = site.audit.pod(uid), site.listed_late
        if pod is not None and late is not None and lost:
            made = dt.datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
            if made < late:
                yield Fact.UNPROVEN
        if any(map(self._is_untold, site.kubelet.node.pods)):
            yield Fact.UNTOLD
        if site.audit.room.is_full_by_status(uid):
            yield Fact.HIDDEN
        yield from self._of_lost(uid, own, lost)

    def _of_lost(
        self, uid: str, own: Sequence[Fact], every: Sequence[tuple[str, str]]
    ) -> Iterator[Fact]:
        kubelet = self._site.kubelet.node.pods
        for lost, name in every:
            yield Fact.LOST if lost == uid else Fact.BESIDE
            # A new kubelet's rejection removes PodScheduled and sets startTime, but no Failed yet:
            # nothing shows who bound the pod. Source: kubernetes pkg/kubelet/status, mergePodStatus
            is_dead = name not in kubelet[lost].running
            if lost != uid and is_dead and Fact.STARTED in own:
                yield Fact.RIGHTLESS
            names = [node.spec.full_name for one, node in kubelet.items() if one != lost]
            if lost != uid and uid in kubelet and names.count(kubelet[uid].spec.full_name) > 1:
                yield Fact.NAMESAKE

    def _of_pod(self, uid: str) -> Iterator[Fact]:
        audit, pod = self._site.audit, self._site.audit.pod(uid)
        if pod is None:
            yield Fact.GONE if audit.was_there(uid) else Fact.STATIC
            return
        if pod["status"].get("phase") == "Failed":
            yield Fact.OVER
        groups = self._site.scheduler.placed.get(uid)
        if groups is None:
            yield Fact.STRAY
        elif _written(pod) != [tuple(group) for group in groups if group]:
            yield Fact.EDITED
        if _takes_lock(pod):
            if not self._site.scheduler.lock().endswith(f",{key_of(pod)}"):
                yield Fact.UNLOCKED
        elif self._site.host.unlocked is UnlockedPods.STRICT:
            yield Fact.LOCKLESS
        elif "startTime" in pod["status"]:
            yield Fact.STARTED
        if audit.room.is_oversold(uid):
            yield Fact.SOLD
        conditions = dict(zip(self._site.gpu_uuids(), self._site.conditions, strict=True))
        given = {str(share.uuid) for group in groups or () for share in group}
        if any(conditions[gpu] is not Condition.OK for gpu in given):
            yield Fact.BAD_GPU

    def _is_untold(self, uid: str) -> bool:
        """Whether the kubelet has rejected the pod, and the API server does not show it."""
        pod = self._site.audit.pod(uid)
        is_shown = pod is None or pod["status"].get("phase") == "Failed"
        return self._site.kubelet.node.pods[uid].is_rejected and not is_shown

    def _lost(self) -> Iterator[tuple[str, str]]:
        """Containers of live pods of which the kubelet has no record, though they had an answer.

        Or that it started without asking.
        """
        held, audit, agent = self._site.kubelet.held(RESOURCE), self._site.audit, self._site.agent
        ledger = agent.state.ledger.value if agent else Ledger()  # an answer may have been cut off
        for uid, node in self._site.kubelet.node.pods.items():
            for one in node.spec.containers:
                owner = (uid, one.name)
                is_known = owner in audit.answers or bool(node.starts.get(one.name))
                is_known |= bool(ledger.rows_of(PodUid(uid)))
                is_asked = bool(one.limits.get(RESOURCE))
                if is_asked and is_known and owner not in held and audit.is_live(uid):
                    yield owner


def _written(pod: Json) -> list[tuple[Share, ...]]:
    """What the pod's annotation gives its containers now."""
    text = pod["metadata"]["annotations"].get(ALLOCATED, "")
    return [group for group in decode_pod_devices(text) if group]


def _takes_lock(pod: Json) -> bool:
    """Whether a container that is no init container asks for a GPU."""
    apps = {one["name"] for one in pod["spec"]["containers"]}
    return any(name in apps for name in asked_containers(pod))


# What must be in order when all troubles are over and five minutes have passed.

REASONS = (
    "no healthy devices present",
    "previously allocated devices are no longer healthy",
    "cannot allocate unregistered device",
    "has been stopped",
    "requested number of devices unavailable",
    "Node didn't have enough resource",
    "Predicate NodeAffinity failed",
    "error reading from server: EOF",
    "code = Unavailable desc = connection error",
    REFUSED_ELSEWHERE,
)
"""What a pod may fail of, beside a refusal of ours that is right: the kubelet's own, our death."""


def left_over(world: MachineSite, refused: Collection[str]) -> Iterator[str]:
    """What is not as it must be, in words. `refused`: pods that were rightly refused by us."""
    yield from _locks(world)
    yield from wrong_in(world, REASONS, _is_excused, refused)


def wrong_in(
    world: MachineSite,
    reasons: Collection[str],
    is_excused: Callable[[MachineSite, Json], bool] = lambda *_: False,
    refused: Collection[str] = (),
) -> Iterator[str]:
    """The same of pods and ledger; `reasons`: words of those for which a pod may have failed."""
    for pod in world.pods():
        if pod["spec"].get("nodeName") == NODE:
            wrong = list(_wrong_of(world, pod, reasons, refused))
            if wrong and not is_excused(world, pod):
                yield from wrong
    if world.agent is None:
        yield "the agent is not there"
    else:
        yield from _differences(world, world.agent.state.ledger.value)


def _locks(world: MachineSite) -> Iterator[str]:
    text = world.scheduler.lock()
    if text:
        yield f"the lock is still there: {text}"


def _is_excused(world: MachineSite, pod: Json) -> bool:
    """Whether the agent has no part in it. Each is counted by its kind.

    A kubelet that lost its checkpoint, and to which no plugin has registered since, knows no such
    resource: it starts the containers without asking, and asks when one of them dies, long after
    the scheduler let go of the lock. And dead containers whose records are lost are refused as
    long as nothing tells which one the kubelet means.
    """
    uid = pod["metadata"]["uid"]
    node = world.kubelet.node.pods.get(uid)
    asked = node.starts.keys() & asked_containers(pod) if node else set()
    unasked = {name for name in asked if (uid, name) not in world.audit.answers}
    if node is not None and unasked and unasked >= node.waiting.keys():
        world.audit.excuses["a pod that the kubelet started without asking"] += 1
        return True
    if node is not None and any("[HA-2002]" in text for text in node.waiting.values()):
        world.audit.excuses["dead containers that nothing tells apart wait to be deleted"] += 1
        return True
    return False


def _wrong_of(
    world: MachineSite, pod: Json, reasons: Collection[str], refused: Collection[str]
) -> Iterator[str]:
    """A pod of this node runs, has run, or was refused with a reason."""
    metadata, status = pod["metadata"], pod["status"]
    name, uid = metadata["name"], metadata["uid"]
    if status["phase"] == "Failed":
        text = status.get("message", "")
        is_ours = "[HA-" in text and uid in refused
        if not is_ours and not any(word in text for word in reasons):
            yield f"pod {name} failed: {status}"
        return
    if status["phase"] == "Succeeded":
        return
    node = world.kubelet.node.pods.get(uid)
    apps = {one.name for one in node.spec.containers if one.kind == "app"} if node else set()
    if node is None or not apps <= node.running:
        yield f"pod {name} does not run: {node}"
    phase = (metadata.get("annotations") or {}).get(BIND_PHASE)
    # A kubelet that knew no plugin starts containers without asking: those were never answered.
    is_placed = any(world.scheduler.placed.get(uid, ())) and world.audit.is_served(uid)
    if is_placed and phase != PHASE_SUCCESS and uid not in world.scheduler.bound_again:
        yield f"pod {name} runs, and its phase is {phase}"


def _differences(world: MachineSite, ledger: Ledger) -> Iterator[str]:
    """The ledger holds what the kubelet holds, and nothing of pods that are over."""
    rows = {
        (str(row.key.pod_uid), row.key.container): row for row in ledger.rows_by(Decider.SCHEDULER)
    }
    yield from (
        f"the row of a pod that is over: {o}" for o in rows if not world.audit.is_live(o[0])
    )
    for owner, ids in world.kubelet.held(RESOURCE).items():
        is_ours = world.audit.is_live(owner[0]) and owner[0] not in world.audit.mistaken
        if is_ours and not _agree(rows.get(owner), ids):
            yield f"the kubelet's {owner} holds {sorted(ids)}, the ledger has {rows.get(owner)}"
    listed = dict(_listed(world))
    for row in ledger.rows_by(Decider.KUBELET) if listed else ():  # else it may be just starting
        # After a lost checkpoint nothing tells whether a pod that the kubelet knows uses the row.
        if row.holder not in listed or not listed[row.holder] <= set(row.slice_ids):
            yield f"the row of a stranger that is over: {row.holder} {row.slice_ids}"
    in_use = {text for row in ledger.rows for text in row.slice_ids}
    for holder, ids in listed.items():
        if not ids <= in_use:
            yield f"{holder} holds {sorted(ids)}, and the ledger takes some of them for free"


def _listed(world: MachineSite) -> Iterator[tuple[Holder, frozenset[str]]]:
    """The kubelet's List: each container with its slices, but no ordinary init containers."""
    held = world.kubelet.held(RESOURCE)
    for uid, node in world.kubelet.node.pods.items():
        for one in () if node.is_rejected else node.spec.containers:
            if one.kind != "init":
                ids = held.get((uid, one.name), frozenset())
                yield Holder(*node.spec.full_name, one.name), ids


def _agree(row: Row | None, ids: frozenset[str]) -> bool:
    return row is not None and set(row.slice_ids) == set(ids) and row.confirmed

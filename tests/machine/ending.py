"""What must be in order when all troubles are over and five minutes have passed."""

from collections.abc import Callable, Collection, Iterator

from agent.cluster import BIND_PHASE, PHASE_SUCCESS
from agent.ledger import Decider, Holder, Ledger, Row
from agent.sandbox.api_errors import Json
from tests.builders import NODE
from tests.machine.audit import asked_containers
from tests.machine.kubelet import REFUSED_ELSEWHERE, RESOURCE
from tests.machine.site import MachineSite

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

"""Planted bugs: each must be found, or the traces prove nothing."""

import contextlib
import dataclasses
from typing import NoReturn

import msgspec

from agent import settle as decisions
from agent import settle as settlement
from agent.allocate import match as matching
from agent.cluster import PodUid
from agent.errors import ApiError
from agent.settle import Effect, EffectKind
from tests.machine.mutants import replaced, uid_ignored
from tests.traces.cluster import TracedApi


@dataclasses.dataclass(frozen=True)
class Plant:
    """A bug, a trace that shows it where the watches lag so much, and the words of the breach."""

    patch: contextlib.AbstractContextManager[None]
    trace: str
    breach: str
    lag: float = 0.05


def lock_left() -> Plant:
    """Nobody owes the removal of a lock."""
    original = decisions.pending_effects

    def pending_effects(scene: decisions.SettlementFacts) -> tuple[Effect, ...]:
        return original(msgspec.structs.replace(scene, lock=None))

    return Plant(
        replaced(settlement, "pending_effects", pending_effects),
        "burst",
        "was in the scheduler's way",
    )


def lock_taken_by_name() -> Plant:
    """The lock of a pod that is gone is removed at once, whoever of that name took it."""
    original = decisions.pending_effects

    def pending_effects(scene: decisions.SettlementFacts) -> tuple[Effect, ...]:
        lock = scene.lock
        names = {stone.pod.key for stone in scene.table.tombstones}
        if lock is None or lock.owner not in names:
            return original(scene)
        release = Effect(
            kind=EffectKind.RELEASE_LOCK,
            pod_uid=PodUid("the-one-before"),
            namespace=lock.namespace,
            pod=lock.name,
            due=scene.now,
            lock=lock.value,
        )
        return (*original(scene), release)

    return Plant(
        replaced(settlement, "pending_effects", pending_effects), "same-name", "removal of "
    )


def row_of_a_namesake() -> Plant:
    """A row counts for every pod of its name."""
    return Plant(uid_ignored().patch, "same-name", "another one's directory")


def pod_not_looked_at() -> Plant:
    """A pod is served as the watch showed it, though it is gone by now."""
    unasked = replaced(matching, "_still_the_same", lambda *_: None)
    return Plant(unasked, "deleted-early", "deleted before", 0.005)


def node_not_looked_at() -> Plant:
    """What the Node's watch does not show is not there."""
    return Plant(replaced(TracedApi, "get_node", _silent), "serial", "refused: ", 0.5)


async def _silent(*_: object) -> NoReturn:
    raise ApiError("no answer")


PLANTS = (lock_left, lock_taken_by_name, row_of_a_namesake, pod_not_looked_at, node_not_looked_at)

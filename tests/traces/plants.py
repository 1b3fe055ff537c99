"""Planted bugs: each must be found, or the traces prove nothing."""

import contextlib
from typing import NoReturn

import msgspec

from agent import settle
from agent.allocate import match, service
from agent.cluster import PodUid
from agent.errors import ApiError
from agent.settle import Effect, EffectKind, SettlementFacts
from tests.machine.mutants import replaced, uid_ignored
from tests.traces.replay import TracedApi

REAL_EFFECTS = settle.pending_effects


def without_lock(scene: SettlementFacts) -> tuple[Effect, ...]:
    """Nobody owes the removal of a lock."""
    return REAL_EFFECTS(msgspec.structs.replace(scene, lock=None))


def by_name(scene: SettlementFacts) -> tuple[Effect, ...]:
    """The lock of a pod that is gone is removed at once, whoever of that name took it."""
    effects, lock = REAL_EFFECTS(scene), scene.lock
    if lock is None or lock.owner not in {stone.pod.key for stone in scene.table.tombstones}:
        return effects
    uid = PodUid("the-one-before")
    release = Effect(EffectKind.RELEASE_LOCK, uid, lock.namespace, lock.name, scene.now)
    return (*effects, msgspec.structs.replace(release, lock=lock.value))


async def silent(*_: object) -> NoReturn:
    """What the Node's watch does not show is not there."""
    raise ApiError("no answer")


def same_as_before(*_: object) -> None:
    """A pod is served as the watch showed it, though it is gone by now."""


Plant = tuple[contextlib.AbstractContextManager[None], str, str, float]
"""A bug, a trace that shows it where the watches lag so much, and the words of the breach."""


def plants() -> dict[str, Plant]:
    """All of them, each to be used once."""
    left = replaced(settle, "pending_effects", without_lock)
    taken = replaced(settle, "pending_effects", by_name)
    not_looked_at = replaced(match, "_still_the_same", same_as_before)
    namesake = replaced(service, "decide", uid_ignored)
    unread = replaced(TracedApi, "get_node", silent)
    return {
        "lock left": (left, "burst", "in the scheduler's way", 0.05),
        "lock taken by name": (taken, "same-name", "removal of ", 0.05),
        "row of a namesake": (namesake, "same-name", "another one's directory", 0.05),
        "pod not looked at": (not_looked_at, "deleted-early", "deleted before", 0.005),
        "node not looked at": (unread, "serial", "refused: ", 0.5),
    }

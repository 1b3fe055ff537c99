"""What of a replay was not as it must be, in words. Nothing here asks the agent's own code."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from agent.cluster import BIND_PHASE, MUTEX_LOCK, PHASE_SUCCESS
from agent.ledger import ContainerEdits
from tests.traces.replay import Patch, Removal, ReplayedAnswer, ReplayedStory, TracedHolding
from tests.traces.trace import TracedCall

BUDGET: Final = 1.0
"""Seconds for a preference and an Allocate: meanwhile the kubelet starts and stops nothing."""
FREE_WITHIN: Final = 5.0
"""Seconds from the last answer of a lock's owner to the lock's removal."""
ABANDONED: Final = 30.0
"""Seconds for which the lock of an owner that is gone has to stand: a successor may have it."""
GONE_WITHIN: Final = 35.0
READS: Final = frozenset({"get_pod", "get_node", "list_pods"})
"""What an Allocate may ask the API server, each once."""


def wrong(story: ReplayedStory) -> list[str]:
    """All breaches."""
    return [
        *(text for answer in story.answers for text in _answer(answer, story)),
        *(text for held in story.cluster.locks for text in _lock(held, story)),
        *(text for patch in story.cluster.patches for text in _patch(patch, story)),
        *(text for removal in story.cluster.removals for text in _removal(removal, story)),
        *_written(story),
        *(f"nobody asked for this: {text}" for text in story.cluster.others),
    ]


def reads(answer: ReplayedAnswer, story: ReplayedStory) -> Counter[str]:
    """What the API server was asked for during the call."""
    asked = (what for at, what in story.cluster.reads if answer.began <= at <= answer.ended)
    return Counter(asked)


def written(story: ReplayedStory) -> Counter[tuple[str, str]]:
    """How often each pod that lived on was patched and its lock removed, in vain or not."""
    patched = ((patch.uid, "patch") for patch in story.cluster.patches)
    freed = ((story.trace.owners[one.text], "lock") for one in story.cluster.removals)
    return Counter(one for one in (*patched, *freed) if one[0] in story.trace.settled)


def _answer(answer: ReplayedAnswer, story: ReplayedStory) -> Iterator[str]:
    call = answer.call
    who = f"{call.pod['metadata']['name']} {call.uid} at {call.t}"
    if answer.ended - answer.began > BUDGET:
        yield f"{who}: the answer took {answer.ended - answer.began:.3f} s"
    for what, count in reads(answer, story).items():
        if count > 1 or what not in READS:
            yield f"{who}: {count} times {what}"
    if len(set(answer.ids)) != len(call.ids):
        yield f"{who}: preferred {answer.ids}"
    if answer.edits is not None and not call.container:
        yield f"{who}: answered, though it was deleted before"
    elif answer.edits is not None:
        yield from (f"{who}: {text}" for text in _share(call, answer.edits, story))
    elif call.container and answer.uid not in story.cluster.gone_by(answer.ended):
        yield f"{who}: refused: {answer.refusal}"


def _share(call: TracedCall, edits: ContainerEdits, story: ReplayedStory) -> Iterator[str]:
    numbers = {one["id"]: one.get("index", 0) for one in story.trace.gpus}
    slots = sorted(call.slots, key=lambda slot: numbers[slot.gpu])
    expected = {
        "NVIDIA_VISIBLE_DEVICES": ",".join(slot.gpu for slot in slots),
        "CUDA_DEVICE_SM_LIMIT": str(slots[0].core_percent),
        **{f"CUDA_DEVICE_MEMORY_LIMIT_{n}": f"{slot.memory_mib}m" for n, slot in enumerate(slots)},
    }
    got = {key: text for key, text in edits.envs if key in expected or "_LIMIT" in key}
    if got != expected:
        yield f"got {got} for {expected}"
    own = {one.host_path for one in edits.mounts if "/containers/" in one.host_path}
    if {path.rpartition("/")[2] for path in own} != {f"{call.uid}_{call.container}"}:
        yield f"got another one's directory: {own}"


def _lock(held: TracedHolding, story: ReplayedStory) -> Iterator[str]:
    """An owner that was answered is in nobody's way; of one that is gone, HAMi takes the lock."""
    uid = story.trace.owners[held.text]
    answered = _answered(uid, story)
    if not held.by:
        yield f"lock {held.text} stands at the end"
    elif answered:
        stood = held.until - answered[-1].ended
        if held.by != "agent":
            yield f"lock {held.text} was in the scheduler's way {stood:.3f} s after the answer"
        elif not 0 <= stood <= FREE_WITHIN:
            yield f"lock {held.text} went {stood:.3f} s after the last answer"
    elif held.by == "agent" and uid not in story.cluster.gone_by(held.until):
        yield f"lock {held.text} was taken from its owner"
    elif held.by == "agent" and held.until - story.cluster.gone[uid] > GONE_WITHIN:
        yield f"lock {held.text} stood {held.until - story.cluster.gone[uid]:.3f} s too long"


def _patch(patch: Patch, story: ReplayedStory) -> Iterator[str]:
    who = f"patch of {patch.name} {patch.uid}"
    answered = _answered(patch.uid, story)
    if not answered or patch.name != answered[0].call.pod["metadata"]["name"]:
        yield f"{who}: not answered"
    elif patch.at < answered[-1].began:
        yield f"{who}: before its last Allocate"
    elif patch.notes != story.trace.settled.get(patch.uid, patch.notes):
        yield f"{who}: {patch.notes} for {story.trace.settled[patch.uid]}"
    elif patch.notes.get(BIND_PHASE) != PHASE_SUCCESS:
        yield f"{who}: {patch.notes}"


def _removal(removal: Removal, story: ReplayedStory) -> Iterator[str]:
    who = f"removal of {removal.text}"
    uid = story.trace.owners.get(removal.text, "")
    stood = [removal.at - one.since for one in story.cluster.locks if one.text == removal.text]
    if removal.key != MUTEX_LOCK or not stood:
        yield f"{who}: no such lock"
    elif answered := _answered(uid, story):
        if removal.at < answered[-1].began:
            yield f"{who}: before its owner's last Allocate"
    elif stood[0] < ABANDONED:
        yield f"{who}: nobody was answered under it, and it stood for {stood[0]:.3f} s"


def _written(story: ReplayedStory) -> Iterator[str]:
    """Each pod whose last container was answered is patched once, as the trace says."""
    done = Counter(patch.uid for patch in story.cluster.patches if patch.done)
    for uid in {answer.uid for answer in story.answers if answer.edits is not None}:
        if uid in story.trace.settled and done[uid] != 1:
            yield f"pod {uid} was patched {done[uid]} times"
    for removal, count in Counter(one.text for one in story.cluster.removals).items():
        if count > 2:
            yield f"removal of {removal} was tried {count} times"


def _answered(uid: str, story: ReplayedStory) -> list[ReplayedAnswer]:
    """What the pod's containers were answered, in order."""
    return [one for one in story.answers if one.uid == uid and one.edits is not None]

"""A call that ran out of time says what it was about, and of which pod, where that is known."""

import asyncio

import pytest
from structlog.testing import capture_logs

from agent.errors import Refusal, RefusalReason
from tests.services.allocation.allocating import NEXT_EPOCH, a_desk, ids, placed


async def refused(desk):
    with capture_logs() as logs, pytest.raises(Refusal) as caught:
        await desk.service.allocate(ids(1))
    assert caught.value.transient
    (line,) = [entry for entry in logs if entry["event"] == "alloc.refused"]
    return caught.value, line


@pytest.mark.parametrize(
    ("hang", "gate", "words", "told"),
    [
        (
            lambda desk: desk.disk.gate.clear(),
            RefusalReason.STATE_UNWRITABLE,
            "the disk has not answered",
            ("write-ledger", "team-a", "train-1", "main"),
        ),
        (
            lambda desk: desk.hooks.gate.clear(),
            RefusalReason.HOST_DIRECTORY,
            "the disk has not answered",
            ("make-directory", "team-a", "train-1", "main"),
        ),
        (
            lambda desk: setattr(desk.hooks, "hanging", "facts"),
            RefusalReason.HOST_DIRECTORY,
            "hook path",
            ("look-at-hook-path", None, None, None),
        ),
        (
            lambda desk: setattr(desk.witness, "hung", True),
            RefusalReason.OUT_OF_TIME,
            "which pod",
            ("find-pod", None, None, None),
        ),
    ],
    ids=["disk", "directory", "hook path", "kubelet"],
)
async def test_what_hangs_is_named_and_not_the_search_for_the_pod(hang, gate, words, told):
    async with a_desk() as desk:
        desk.bind(placed(1))
        hang(desk)

        refusal, line = await refused(desk)
        desk.disk.gate.set()

    assert gate is refusal.gate
    assert words in refusal.sentence
    assert gate.value == line["gate"]
    assert told == tuple(line.get(key) for key in ("step", "ns", "pod", "ctr"))


async def test_a_write_that_comes_back_after_the_refusal_serves_the_next_kubelet():
    async with a_desk() as desk:
        desk.bind(placed(1))
        desk.disk.gate.clear()
        await refused(desk)
        desk.disk.gate.set()
        await asyncio.sleep(1)
        assert 1 == len(desk.ledger.rows)
        desk.epoch = NEXT_EPOCH  # this one rejected the pod, and will not ask again

        edits = await desk.service.allocate(ids(1))

        assert [edits] == [row.edits for row in desk.ledger.rows]


async def test_what_an_allocate_waits_for_is_measured_and_a_preference_is_not():
    async with a_desk() as desk:
        desk.bind(placed(1, reusable_name=True))
        desk.witness.delay = 0.02
        await desk.service.prefer(ids(1), (), 1)

        await desk.service.allocate(ids(1))

        waits = {row.labels[0]: row for row in desk.service.waits.rows()}
    assert ["api-server", "directory", "disk", "hook-path", "kubelet"] == sorted(waits)
    assert {1} == {row.cumulative[-1] for row in waits.values()}
    assert pytest.approx(0.02, abs=1e-4) == waits["kubelet"].total

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


async def test_a_disk_that_hangs_is_named_and_not_the_search_for_the_pod():
    async with a_desk() as desk:
        pod = desk.bind(placed(1))
        desk.disk.gate.clear()

        refusal, line = await refused(desk)
        desk.disk.gate.set()

    assert RefusalReason.STATE_UNWRITABLE is refusal.gate
    assert "the disk has not answered" in refusal.sentence
    assert ("write-ledger", "HA-5001") == (line["step"], line["gate"])
    assert (pod.namespace, pod.name, "main") == (line["ns"], line["pod"], line["ctr"])


async def test_a_directory_that_hangs_is_named():
    async with a_desk() as desk:
        pod = desk.bind(placed(1))
        desk.hooks.gate.clear()

        refusal, line = await refused(desk)

    assert RefusalReason.HOST_DIRECTORY is refusal.gate
    assert "the disk has not answered" in refusal.sentence
    assert ("make-directory", pod.name) == (line["step"], line["pod"])


async def test_a_hook_path_that_hangs_is_named_and_not_the_search_for_the_pod(monkeypatch):
    async with a_desk() as desk:
        desk.bind(placed(1))
        monkeypatch.setattr(desk.hooks, "facts", asyncio.Event().wait)

        refusal, line = await refused(desk)

    assert RefusalReason.HOST_DIRECTORY is refusal.gate
    assert "hook path" in refusal.sentence
    assert "look-at-hook-path" == line["step"]


async def test_a_kubelet_that_hangs_is_out_of_time_without_a_pod():
    async with a_desk() as desk:
        desk.bind(placed(1))
        desk.witness.hung = True

        refusal, line = await refused(desk)

    assert RefusalReason.OUT_OF_TIME is refusal.gate
    assert "which pod" in refusal.sentence
    assert "find-pod" == line["step"]
    assert "pod" not in line


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

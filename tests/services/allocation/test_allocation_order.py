"""Durable before answered, one pod per call, and dead rows in nobody's way."""

import asyncio
import datetime as dt

import msgspec
import pytest

from agent.cluster import Phase, Role
from agent.errors import Refusal, RefusalReason
from agent.kit.turns import BOOKING
from agent.ledger import KubeletEpoch
from agent.reconcile.rules import Adoption
from agent.settle import EffectKind
from agent.state import CURRENT, decode_state
from tests.builders import a_container
from tests.services.allocation.allocating import EPOCH, G1, NEXT_EPOCH, a_desk, ids, placed


async def outcome(desk, *numbers):
    """What the kubelet gets for these ids: edits, or the gate that closed."""
    return await outcome_of(desk, ids(*numbers))


async def outcome_of(desk, slices):
    """The same for slices."""
    try:
        return await desk.service.allocate(slices)
    except Refusal as refusal:
        return refusal.gate


async def test_the_answer_comes_only_after_the_row_is_durable():
    async with a_desk() as desk:
        desk.bind(placed(1))
        desk.disk.gate.clear()
        async with asyncio.TaskGroup() as group:
            answering = group.create_task(desk.service.allocate(ids(4)))
            await asyncio.sleep(0.5)
            assert not answering.done()
            assert () == desk.ledger.rows
            desk.disk.gate.set()
        desk.disk.crash()

        state = decode_state(await desk.disk.content(CURRENT))
        assert [answering.result()] == [row.edits for row in state.ledger.rows]


async def test_a_pod_that_is_being_written_is_no_candidate_for_the_next_call():
    async with a_desk() as desk:
        pod = desk.bind(placed(1))
        desk.disk.gate.clear()
        async with asyncio.TaskGroup() as group:
            first = group.create_task(outcome(desk, 4))
            await asyncio.sleep(0.01)
            assert RefusalReason.NO_POD_ADMITTED is await outcome(desk, 5)
            desk.disk.gate.set()

        assert RefusalReason.OVERLAP is first.result()
        assert [pod.uid] == [row.key.pod_uid for row in desk.ledger.rows]


async def test_a_row_on_its_way_to_disk_takes_room_already():
    async with a_desk() as desk:
        desk.bind(placed(1, f"{G1},NVIDIA,60000,10:;"))
        other = placed(2, f"{G1},NVIDIA,60000,10:;")
        desk.disk.gate.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(outcome(desk, 4))
            await asyncio.sleep(0.01)
            desk.bind(other)
            assert RefusalReason.MEMORY_EXCEEDED is await outcome(desk, 5)
            desk.disk.gate.set()


async def test_a_pod_that_the_kubelet_dropped_makes_room_and_keeps_its_directory_for_reconcile():
    async with a_desk() as desk:
        rejected = desk.bind(placed(1, f"{G1},NVIDIA,60000,10:;"))
        await desk.service.allocate(ids(4))
        desk.witness.forget(rejected)  # the API still shows it Pending
        desk.bind(placed(2, f"{G1},NVIDIA,60000,10:;"))

        await desk.service.allocate(ids(4))

        assert ["train-1", "train-2"] == [row.pod for row in desk.ledger.rows]
        assert f"{rejected.uid}_main" in desk.hooks.names


async def test_a_slow_look_at_the_hook_path_gives_a_container_to_one_of_two_calls(monkeypatch):
    async with a_desk() as desk:
        desk.bind(placed(1))
        look = desk.hooks.facts

        async def slowly():
            await asyncio.sleep(0.05)
            return await look()

        monkeypatch.setattr(desk.hooks, "facts", slowly)

        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(outcome(desk, number)) for number in (1, 2)]

        assert 1 == sum(not isinstance(call.result(), RefusalReason) for call in calls)
        assert 1 == len(desk.ledger.rows)


async def test_an_answer_that_the_kubelet_would_die_of_is_not_given():
    async with a_desk() as desk:
        desk.bind(placed(1))
        desk.disk.gate.clear()
        async with asyncio.TaskGroup() as group:
            first = group.create_task(outcome(desk, 4))
            await asyncio.sleep(0.01)
            # The kubelet begins with a dead container of another pod.
            await desk.service.prefer(ids(5, 6), (), 1)
            desk.disk.gate.set()

        assert RefusalReason.OVERLAP is first.result()


async def test_a_put_off_replay_keeps_the_kubelet_from_its_pods_next_container_meanwhile():
    async with a_desk() as desk:
        old = placed(1, phase=Phase.RUNNING)
        desk.bind(old)
        await desk.service.allocate(ids(4))
        desk.epoch = NEXT_EPOCH
        desk.see(old)
        desk.witness.delay = 0.01
        async with asyncio.TaskGroup() as group:
            replay = group.create_task(outcome(desk, 9))
            await asyncio.sleep(0.005)
            two = (a_container(count=2),)
            desk.bind(placed(2, f"{G1},NVIDIA,500,5:{G1},NVIDIA,500,5:;", containers=two))
            desk.disk.gate.clear()
            first = group.create_task(outcome(desk, 5, 6))
            await asyncio.sleep(0.5)
            assert not replay.done()
            desk.disk.gate.set()

        assert RefusalReason.OVERLAP is replay.result()
        assert not isinstance(first.result(), RefusalReason)


async def test_an_adopted_row_says_what_the_scheduler_wrote():
    async with a_desk() as desk:
        pod = placed(1, phase=Phase.RUNNING)

        row = await desk.shares.adopt(Adoption(pod, pod.containers[0], ids(3)))

        assert row is not None
        assert (ids(3), EPOCH, True) == (row.slice_ids, row.epoch, row.confirmed)
        assert pod.groups == (row.shares, ())


async def test_an_adopted_row_without_ids_is_answered_with_when_the_kubelet_asks():
    async with a_desk() as desk:
        pod = placed(1, phase=Phase.RUNNING)
        row = await desk.shares.adopt(Adoption(pod, pod.containers[0], ()))
        assert row is not None
        await desk.state.commit(lambda ledger: ledger.put(row))
        desk.admit(pod)

        edits = await desk.service.allocate(ids(9))

        assert (False, KubeletEpoch()) == (row.confirmed, row.epoch)
        assert row.edits == edits
        assert {("replay", ""): 1} == desk.results


@pytest.mark.parametrize(
    ("text", "containers"),
    [
        ("GPU-elsewhere,NVIDIA,1,1:;", (a_container(),)),
        (f"{G1},NVIDIA,1,1:;{G1},NVIDIA,1,1:;", (a_container(),)),
    ],
    ids=["a GPU that is not here", "other groups than containers"],
)
async def test_a_holder_that_cannot_be_understood_is_not_adopted(text, containers):
    async with a_desk() as desk:
        pod = placed(1, text, containers=containers)

        assert None is await desk.shares.adopt(Adoption(pod, pod.containers[0], ids(3)))


async def test_a_hook_path_that_hangs_keeps_nobody_from_looking_at_the_other_holders():
    async with a_desk() as desk:
        desk.hooks.hanging = "facts"
        pod = placed(1)

        async with asyncio.timeout(60):
            assert None is await desk.shares.adopt(Adoption(pod, pod.containers[0], ids(3)))


async def test_a_container_that_the_scheduler_wrote_nothing_for_is_not_adopted():
    async with a_desk() as desk:
        pod = placed(1)

        assert None is await desk.shares.adopt(Adoption(pod, a_container(name="other"), ids(3)))


async def test_a_container_that_ran_without_being_asked_for_is_not_waited_for():
    over = msgspec.structs.replace(
        a_container(name="init", role=Role.INIT), ended_at=EPOCH.since + dt.timedelta(seconds=1)
    )
    groups = f"{G1},NVIDIA,6000,20:;{G1},NVIDIA,2000,20:;"
    async with a_desk() as desk:
        desk.bind(placed(1, groups, containers=(over, a_container())))

        await desk.service.allocate(ids(4))

        (row,) = desk.ledger.rows
        assert ("main", 1, 2000) == (row.key.container, row.group, row.shares[0].memory_mib)
        settled = desk.effects(EffectKind.SETTLE_POD)
        assert ["success"] == [one.phase for one in settled]


async def test_a_container_that_was_begun_before_another_one_is_not_granted_after_it():
    async with a_desk() as desk:
        old = desk.bind(placed(1, phase=Phase.RUNNING))
        await desk.service.allocate(ids(4))
        desk.epoch = NEXT_EPOCH
        two = (a_container(count=2),)
        desk.bind(placed(2, f"{G1},NVIDIA,500,5:{G1},NVIDIA,500,5:;", containers=two))
        desk.witness.admit(old)

        first = await desk.service.prefer(ids(1, 2, 3), (), 2)
        second = await desk.service.prefer(ids(5, 6), (), 1)

        assert RefusalReason.OVERLAP is await outcome_of(desk, first)
        assert RefusalReason.OVERLAP is not await outcome_of(desk, second)


async def test_a_put_off_replay_waits_until_the_kubelet_has_booked_the_other_answer():
    async with a_desk() as desk:
        desk.bind(placed(1, phase=Phase.RUNNING))
        await desk.service.allocate(ids(4))
        desk.epoch = NEXT_EPOCH
        desk.disk.gate.clear()
        ended = []

        async def asked(*numbers):
            await outcome(desk, *numbers)
            ended.append(asyncio.get_running_loop().time())

        async with asyncio.TaskGroup() as group:
            group.create_task(asked(9))
            await asyncio.sleep(0.01)
            desk.bind(placed(2))
            group.create_task(asked(5))
            await asyncio.sleep(0.01)
            desk.disk.gate.set()

        new, put_off = ended
        assert BOOKING == pytest.approx(put_off - new)

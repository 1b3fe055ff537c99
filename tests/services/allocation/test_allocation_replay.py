"""A container that was answered before gets the same bytes again."""

import asyncio

import msgspec
import pytest

from agent.cluster import Phase, Role
from agent.errors import Refusal, RefusalReason
from agent.ledger import State
from agent.model import Condition
from tests.builders import a_container, a_gpu, a_health, a_shared_gpu, an_inventory
from tests.services.allocation.allocating import G1, NEXT_EPOCH, a_desk, ids, placed


async def answered(desk, pod):
    """The pod was given its GPU; the kubelet lost its record of it and was restarted."""
    desk.bind(pod)
    edits = await desk.service.allocate(ids(4))
    desk.lock(None)
    desk.epoch = NEXT_EPOCH
    return edits


async def test_the_answer_is_equal_and_the_directory_is_left_as_it_is():
    async with a_desk() as desk:
        pod = placed(1)
        first = await answered(desk, pod)

        again = await desk.service.allocate(ids(9))

        assert first == again
        assert 1 == desk.hooks.wiped[f"{pod.uid}_main"]
        assert 2 == desk.hooks.made[f"{pod.uid}_main"]
        assert {("ok", ""): 1, ("replay", ""): 1} == desk.results


async def test_the_row_takes_the_ids_and_the_epoch_of_the_new_kubelet():
    async with a_desk() as desk:
        await answered(desk, placed(1))
        await asyncio.sleep(90)

        await desk.service.allocate(ids(9))

        (row,) = desk.ledger.rows
        assert (ids(9), NEXT_EPOCH, False) == (row.slice_ids, row.epoch, row.confirmed)
        assert desk.clock.now() == row.answered_at


async def test_live_limits_change_no_byte_of_the_answer_and_stay():
    async with a_desk() as desk:
        first = await answered(desk, placed(1))
        (row,) = desk.ledger.rows
        live = (msgspec.structs.replace(row.shares[0], memory_mib=1),)
        await desk.state.commit(
            lambda ledger: ledger.put(msgspec.structs.replace(row, live_limits=live))
        )

        assert first == await desk.service.allocate(ids(9))
        assert live == desk.ledger.rows[0].limits


async def test_a_replay_survives_a_restart_of_the_agent():
    async with a_desk() as desk:
        pod = placed(1)
        first = await answered(desk, pod)
        ledger, disk = desk.ledger, desk.disk
    async with a_desk(State(generation=1, ledger=ledger), disk) as later:
        later.see(pod)
        later.witness.admit(pod)
        later.epoch = NEXT_EPOCH

        assert first == await later.service.allocate(ids(9))


async def test_a_row_that_is_being_closed_answers_nobody():
    async with a_desk() as desk:
        first = await answered(desk, placed(1))
        (row,) = desk.ledger.rows
        desk.shares.calls.taken.add(row.key)
        with pytest.raises(Refusal):
            await desk.service.allocate(ids(9))

        desk.shares.calls.taken.discard(row.key)
        assert first == await desk.service.allocate(ids(9))


async def test_a_bad_gpu_is_no_hindrance_but_a_lost_one_is():
    async with a_desk() as desk:
        first = await answered(desk, placed(1))
        sick = a_shared_gpu(gpu=a_gpu(index=0), health=a_health(condition=Condition.BAD))
        desk.inventory.set(an_inventory(gpus=(sick,)))
        assert first == await desk.service.allocate(ids(9))

        lost = msgspec.structs.replace(sick, health=a_health(condition=Condition.LOST))
        desk.inventory.set(an_inventory(gpus=(lost,)))
        with pytest.raises(Refusal) as caught:
            await desk.service.allocate(ids(9))

        assert RefusalReason.BAD_GPU is caught.value.gate
        assert 1 == len(desk.ledger.rows)


async def test_a_replay_that_overlaps_another_call_is_refused_and_served_later():
    async with a_desk() as desk:
        old = placed(1, phase=Phase.RUNNING)
        first = await answered(desk, old)
        new = placed(2)
        desk.disk.gate.clear()

        async def outcome(number):
            try:
                return await desk.service.allocate(ids(number))
            except Refusal as refusal:
                return refusal

        async with asyncio.TaskGroup() as group:
            refused = group.create_task(outcome(9))
            await asyncio.sleep(0.01)
            desk.bind(new)
            other = group.create_task(outcome(5))
            await asyncio.sleep(0.01)
            desk.disk.gate.set()

        assert RefusalReason.OVERLAP is refused.result().gate
        assert refused.result().transient
        assert not isinstance(other.result(), Refusal)
        desk.witness.forget(new)
        assert first == await desk.service.allocate(ids(9))


async def test_a_container_that_runs_is_not_taken_for_one_that_is_asked_for_again():
    async with a_desk() as desk:
        running = a_container(running_id="containerd://a")
        old = placed(1, phase=Phase.RUNNING, containers=(running,))
        await answered(desk, old)
        desk.containers.alive = {"containerd://a"}
        new = desk.bind(placed(2))

        answer = await desk.service.allocate(ids(5))

        assert any(new.uid in mount.host_path for mount in answer.mounts)


async def test_a_container_whose_status_says_running_but_whose_cgroup_is_gone_is_replayed():
    async with a_desk() as desk:
        old = placed(1, containers=(a_container(running_id="containerd://a"),))
        first = await answered(desk, old)

        assert first == await desk.service.allocate(ids(5))


async def test_of_two_containers_the_one_that_died_is_replayed():
    async with a_desk() as desk:
        text = f"{G1},NVIDIA,1000,1:;{G1},NVIDIA,2000,1:;"
        containers = (
            a_container(name="a", running_id="containerd://a"),
            a_container(name="b", count=1),
        )
        pod = placed(1, text, containers=containers)
        desk.bind(msgspec.structs.replace(pod, containers=tuple(map(_stopped, containers))))
        await desk.service.allocate(ids(1))
        desk.witness.admit(pod, a=ids(1)[0])
        second = await desk.service.allocate(ids(2))
        desk.epoch = NEXT_EPOCH
        desk.witness.admit(pod)  # the checkpoint is lost
        desk.see(pod)
        desk.containers.alive = {"containerd://a"}

        assert second == await desk.service.allocate(ids(7))


def _stopped(container):
    return msgspec.structs.replace(container, running_id=None)


async def test_the_ended_init_container_of_a_running_pod_is_replayed_and_then_in_nobodys_way():
    async with a_desk() as desk:
        share = f"{G1},NVIDIA,1000,1:"
        containers = (
            a_container(name="init", role=Role.INIT),
            a_container(name="app", running_id="containerd://app"),
        )
        pod = placed(1, f"{share};{share};", containers=containers)
        desk.bind(msgspec.structs.replace(pod, containers=tuple(map(_stopped, containers))))
        first = await desk.service.allocate(ids(1))
        recorded = frozenset({desk.ledger.rows[0].key})
        desk.records.keys = recorded
        await desk.service.allocate(ids(2))
        desk.epoch = NEXT_EPOCH
        desk.records.keys = frozenset()  # the checkpoint is lost
        desk.admit(pod)
        desk.lock(None)
        desk.containers.alive = {"containerd://app"}

        assert first == await desk.service.allocate(ids(8))

        desk.records.keys = recorded
        new = desk.bind(placed(2))
        answer = await desk.service.allocate(ids(5))
        assert any(new.uid in mount.host_path for mount in answer.mounts)

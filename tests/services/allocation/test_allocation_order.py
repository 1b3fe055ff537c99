"""Durable before answered, one pod per call, and dead rows in nobody's way."""

import asyncio
import itertools

import pytest

from agent.cluster import Phase, Role
from agent.errors import Refusal, RefusalReason
from agent.ledger import ContainerKey, KubeletEpoch
from agent.reconcile import Adoption
from agent.settle import EffectKind
from agent.state import CURRENT, decode_state
from tests.builders import a_container
from tests.services.allocation.allocating import G1, a_desk, ids, placed


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


async def test_an_adopted_row_without_ids_is_answered_with_when_the_kubelet_asks():
    async with a_desk() as desk:
        pod = placed(1, phase=Phase.RUNNING)
        row = await desk.service.adopt(Adoption(pod, pod.containers[0], ()))
        assert row is not None
        await desk.state.commit(lambda ledger: ledger.put(row))
        desk.admit(pod)

        edits = await desk.service.allocate(ids(9))

        assert (False, KubeletEpoch()) == (row.confirmed, row.epoch)
        assert row.edits == edits
        assert {("replay", ""): 1} == desk.results


SHARE = f"{G1},NVIDIA,1,1:;"


@pytest.mark.parametrize(
    ("text", "container", "hanging"),
    [
        ("GPU-elsewhere,NVIDIA,1,1:;", "main", ""),
        (SHARE * 2, "main", ""),
        (SHARE, "main", "facts"),
        (SHARE, "other", ""),
    ],
    ids=[
        "a GPU that is not here",
        "other groups than containers",
        "a hook path that hangs",
        "a container that the scheduler wrote nothing for",
    ],
)
async def test_a_holder_that_cannot_be_understood_is_not_adopted_and_held_up_nobody(
    text, container, hanging
):
    async with a_desk() as desk:
        desk.hooks.hanging = hanging
        found = Adoption(placed(1, text), a_container(name=container), ids(3))

        async with asyncio.timeout(60):
            assert None is await desk.service.adopt(found)


# An Allocate is answered with what the scheduler wrote, once it is on disk.


KINDS = tuple((role, count) for role in (Role.INIT, Role.SIDECAR, Role.APP) for count in (0, 1, 2))


async def test_each_container_gets_its_own_group_wherever_those_without_gpus_stand():
    for layout in itertools.product(KINDS, repeat=3):
        apps = [role is Role.APP for role, _ in layout]
        if apps != sorted(apps) or not any(count for role, count in layout if role is Role.APP):
            continue
        containers = tuple(
            a_container(name=f"c{place}", role=role, count=count)
            for place, (role, count) in enumerate(layout)
        )
        text = "".join(
            f"{G1},NVIDIA,{100 + place},1:" * one.count + ";"
            for place, one in enumerate(containers)
        )
        async with a_desk() as desk:
            pod = desk.bind(placed(1, text, containers=containers))
            held: dict[str, str] = {}
            recorded = frozenset[ContainerKey]()
            for one in pod.gpu_containers:
                answer = dict((await desk.service.allocate(ids(*range(one.count)))).envs)
                place = int(one.name[1:])
                assert f"{100 + place}m" == answer["CUDA_DEVICE_MEMORY_LIMIT_0"], layout
                row = desk.ledger.rows[-1]
                assert (one.name, place, one.role) == (row.key.container, row.group, row.role)
                if one.role is Role.INIT:
                    recorded |= {row.key}
                    desk.records.keys = recorded
                else:
                    held[one.name] = ids(len(held))[0]
                desk.witness.admit(pod, **held)
            (settle,) = desk.effects(EffectKind.SETTLE_POD)
            asking = tuple(place for place, one in enumerate(containers) if one.count)
            assert ("success", asking) == (settle.phase, settle.groups)

"""Durable before answered, one pod per call, and dead rows in nobody's way."""

import asyncio
import itertools

import pytest

from agent.cluster import NodeView, Phase, Role
from agent.errors import Refusal, RefusalReason
from agent.kit.timing import BOOKING
from agent.ledger import ContainerKey, KubeletEpoch
from agent.reconcile import Adoption
from agent.settle import EffectKind
from agent.state import CURRENT, decode_state
from tests.builders import NODE, a_container, a_lock
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

        row = await desk.service.adopt(Adoption(pod, pod.containers[0], ids(3)))

        assert row is not None
        assert (ids(3), EPOCH, True) == (row.slice_ids, row.epoch, row.confirmed)
        assert pod.groups == (row.shares, ())


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


# An Allocate is answered with what the scheduler wrote, once it is on disk.


def envs(edits):
    return dict(edits.envs)


def shown_later(desk, pod):
    """Another Node's view comes first."""
    loop = asyncio.get_running_loop()
    loop.call_later(0.05, desk.node.set, NodeView(NODE, "uid", "9"))
    loop.call_later(0.1, desk.lock, pod)


def shown_on_opening(desk, pod):
    desk.looked = lambda: desk.lock(pod)


@pytest.mark.parametrize("show", [shown_on_opening, shown_later])
async def test_a_lock_that_the_watch_shows_when_it_is_opened_or_a_moment_later_is_enough(show):
    async with a_desk() as desk:
        pod = placed(1)
        desk.admit(pod)
        show(desk, pod)

        assert G1 == envs(await desk.service.allocate(ids(4)))["NVIDIA_VISIBLE_DEVICES"]


async def test_the_last_container_settles_the_pod_at_once_and_releases_its_lock():
    async with a_desk() as desk:
        pod = desk.bind(placed(1))

        await desk.service.allocate(ids(4))

        (settle,) = desk.effects(EffectKind.SETTLE_POD)
        (release,) = desk.effects(EffectKind.RELEASE_LOCK)
        assert ("success", (0,), pod.uid) == (settle.phase, settle.groups, settle.pod_uid)
        assert settle.due <= desk.ledger.rows[0].answered_at
        assert a_lock(namespace="team-a", name="train-1").value == release.lock


async def test_a_container_before_the_last_settles_its_group_after_a_second_of_quiet():
    async with a_desk() as desk:
        share = f"{G1},NVIDIA,1000,10:"
        containers = (a_container(name="a"), a_container(name="b", count=0), a_container(name="c"))
        pod = desk.bind(placed(1, f"{share};;{share};", containers=containers))

        await desk.service.allocate(ids(4))

        (settle,) = desk.effects(EffectKind.SETTLE_POD)
        assert ("", (0,)) == (settle.phase, settle.groups)
        assert 1 == (settle.due - desk.ledger.rows[0].answered_at).total_seconds()
        assert [] == desk.effects(EffectKind.RELEASE_LOCK)

        desk.witness.admit(pod, a=ids(4)[0])
        await desk.service.allocate(ids(5))

        (settle,) = desk.effects(EffectKind.SETTLE_POD)
        assert ("success", (0, 2)) == (settle.phase, settle.groups)
        assert 1 == len(desk.effects(EffectKind.RELEASE_LOCK))


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

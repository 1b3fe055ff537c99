"""An Allocate is answered with what the scheduler wrote, once it is on disk."""

import asyncio

import pytest

from agent.allocate.candidates import UnlockedPods
from agent.cluster import NodeView
from agent.settle import EffectKind
from tests.builders import NODE, a_container, a_lock
from tests.services.allocation.allocating import G1, a_desk, ids, placed


def envs(edits):
    return dict(edits.envs)


async def test_a_lock_that_the_nodes_watch_shows_when_it_is_opened_for_us_is_enough():
    async with a_desk() as desk:
        pod = placed(1)
        desk.admit(pod)
        desk.looked = lambda: desk.lock(pod)

        assert G1 == envs(await desk.service.allocate(ids(4)))["NVIDIA_VISIBLE_DEVICES"]


async def test_the_last_container_settles_the_pod_at_once_and_releases_its_lock():
    async with a_desk() as desk:
        pod = desk.bind(placed(1))

        await desk.service.allocate(ids(4))

        (settle,) = desk.effects(EffectKind.SETTLE_POD)
        (release,) = desk.effects(EffectKind.RELEASE_LOCK)
        assert ("success", (0,), pod.uid) == (settle.phase, settle.groups, settle.pod_uid)
        assert desk.ledger.rows[0].answered_at == settle.due
        assert a_lock(namespace="team-a", name="train-1").value == release.value


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


@pytest.mark.parametrize("annotations", [{}, {"hami.io/mutex.lock": "2026-09-01T12:00:00Z"}])
async def test_a_lock_that_is_not_the_pods_is_left_alone(annotations):
    async with a_desk(unlocked=UnlockedPods.UNIQUE) as desk:
        pod = desk.bind(placed(1))
        desk.node.set(NodeView(NODE, "uid", "3", annotations))

        await desk.service.allocate(ids(4))

        assert [pod.uid] == [effect.pod_uid for effect in desk.effects(EffectKind.SETTLE_POD)]
        assert [] == desk.effects(EffectKind.RELEASE_LOCK)


async def test_a_lock_that_the_watch_shows_a_moment_later_is_waited_for():
    async with a_desk() as desk:
        pod = placed(1)
        desk.admit(pod)
        loop = asyncio.get_running_loop()
        loop.call_later(0.05, desk.node.set, NodeView(NODE, "uid", "9"))
        loop.call_later(0.1, desk.lock, pod)

        answer = await desk.service.allocate(ids(4))

        assert G1 == envs(answer)["NVIDIA_VISIBLE_DEVICES"]

"""An Allocate is answered with what the scheduler wrote, once it is on disk."""

import asyncio

import pytest

from agent.allocate.candidates import UnlockedPods
from agent.cluster import NodeView, Role
from agent.ledger import EffectKind
from agent.model import Share
from tests.builders import NODE, a_container, a_lock
from tests.services.allocation.allocating import G1, G2, a_desk, ids, placed


def envs(edits):
    return dict(edits.envs)


async def test_a_container_gets_the_gpu_and_the_limits_that_were_written():
    async with a_desk() as desk:
        desk.bind(placed(1, f"{G2},NVIDIA,3000,30:;"))

        answer = envs(await desk.service.allocate(ids(4)))

        assert G2 == answer["NVIDIA_VISIBLE_DEVICES"]
        assert "3000m" == answer["CUDA_DEVICE_MEMORY_LIMIT_0"]
        assert "30" == answer["CUDA_DEVICE_SM_LIMIT"]
        assert {("ok", ""): 1} == desk.results


async def test_two_gpus_are_ordered_as_cuda_numbers_them_and_so_is_the_row():
    async with a_desk() as desk:
        text = f"{G2},NVIDIA,2000,20:{G1},NVIDIA,1000,10:;"
        desk.bind(placed(1, text, containers=(a_container(count=2),)))

        answer = envs(await desk.service.allocate(ids(4, 5)))

        assert f"{G1},{G2}" == answer["NVIDIA_VISIBLE_DEVICES"]
        assert "1000m" == answer["CUDA_DEVICE_MEMORY_LIMIT_0"]
        assert (Share(G1, 1000, 10), Share(G2, 2000, 20)) == desk.ledger.rows[0].shares


async def test_the_directory_is_made_anew_and_named_after_pod_and_container():
    async with a_desk() as desk:
        pod = desk.bind(placed(1))

        answer = await desk.service.allocate(ids(4))

        assert {f"{pod.uid}_main"} == desk.hooks.names
        assert 1 == desk.hooks.wiped[f"{pod.uid}_main"]
        assert any(mount.host_path.endswith(f"{pod.uid}_main") for mount in answer.mounts)


async def test_a_lock_that_the_nodes_watch_shows_when_it_is_opened_for_us_is_enough():
    async with a_desk() as desk:
        pod = placed(1)
        desk.see(pod)
        desk.witness.admit(pod)
        desk.looked = lambda: desk.lock(pod)

        assert G1 == envs(await desk.service.allocate(ids(4)))["NVIDIA_VISIBLE_DEVICES"]


@pytest.mark.parametrize("counts", [(1, 1), (2, 1), (1, 2)])
async def test_the_second_container_is_asked_for_while_the_first_is_not_confirmed(counts):
    async with a_desk() as desk:
        group = [f"{G1},NVIDIA,{1000 + n},1:" * count for n, count in enumerate(counts)]
        containers = tuple(a_container(name=f"c{n}", count=c) for n, c in enumerate(counts))
        pod = desk.bind(placed(1, ";".join(group) + ";", containers=containers))
        await desk.service.allocate(ids(*range(counts[0])))
        desk.witness.admit(pod, c0=" ".join(ids(*range(counts[0]))))

        answer = envs(await desk.service.allocate(ids(*range(5, 5 + counts[1]))))

        assert "1001m" == answer["CUDA_DEVICE_MEMORY_LIMIT_0"]
        assert ["c0", "c1"] == [row.key.container for row in desk.ledger.rows]


async def test_the_container_after_an_init_container_of_another_count_is_found():
    async with a_desk() as desk:
        containers = (
            a_container(name="init", role=Role.INIT, count=2),
            a_container(name="app", count=1),
        )
        share = f"{G1},NVIDIA,1000,1:"
        pod = desk.bind(placed(1, f"{share}{share};{share};", containers=containers))
        await desk.service.allocate(ids(0, 1))
        desk.records.keys = frozenset({desk.ledger.rows[0].key})
        desk.epoch = None  # the kubelet was restarted in between

        await desk.service.allocate(ids(0))

        assert ["init", "app"] == [row.key.container for row in desk.ledger.rows]
        assert {pod.uid} == {row.key.pod_uid for row in desk.ledger.rows}


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


async def test_a_pod_that_the_watch_has_not_shown_yet_is_found_by_one_list():
    async with a_desk() as desk:
        pod = placed(1)
        desk.lock(pod)
        desk.witness.admit(pod)
        desk.unseen = [pod]

        await desk.service.allocate(ids(4))

        assert 1 == desk.refreshes


async def test_a_lock_that_the_watch_shows_a_moment_later_is_waited_for():
    async with a_desk() as desk:
        pod = placed(1)
        desk.see(pod)
        desk.witness.admit(pod)
        loop = asyncio.get_running_loop()
        loop.call_later(0.05, desk.node.set, NodeView(NODE, "uid", "9"))
        loop.call_later(0.1, desk.lock, pod)

        answer = await desk.service.allocate(ids(4))

        assert G1 == envs(answer)["NVIDIA_VISIBLE_DEVICES"]

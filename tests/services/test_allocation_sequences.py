"""The sequences that an allocation is guarded against, at the service that answers the kubelet."""

import asyncio
import dataclasses
import datetime as dt
import itertools

import pytest

from agent.core.errors import Gate, Refusal
from agent.core.ledger import ContainerKey, EffectKind
from agent.core.match_settings import UnlockedPods
from agent.core.pods import Phase, Role
from tests.builders import a_container, a_gpu, a_shared_gpu, an_inventory
from tests.services.allocating import G1, G2, NEXT_EPOCH, a_desk, annotated, ids, placed

LONG = 360.0


async def refused(desk, gate, count=1):
    """The refusal; it owes nothing and writes nothing."""
    before, ledger = desk.disk.writes, desk.ledger
    with pytest.raises(Refusal) as caught:
        await desk.service.allocate(ids(*range(count)))
    assert gate is caught.value.gate
    assert (before, ledger) == (desk.disk.writes, desk.ledger)
    return caught.value


@pytest.mark.parametrize("forged", [True, False], ids=["with annotations", "bare"])
async def test_a_stray_pod_of_another_count_settles_nothing_of_the_lock_owner(forged):
    async with a_desk() as desk:
        stray = placed(2, f"{G1},NVIDIA,1,1:{G1},NVIDIA,1,1:;", containers=(a_container(count=2),))
        stray = stray if forged else dataclasses.replace(stray, annotations={}, groups=None)
        owner = placed(1)
        desk.see(stray, owner)
        desk.lock(owner)
        desk.witness.admit(stray)

        assert "train-1" in (await refused(desk, Gate.NO_RIGHT, 2)).sentence

        desk.witness.forget(stray)
        desk.witness.admit(owner)
        await desk.service.allocate(ids(4))
        assert {owner.uid} == {effect.pod_uid for effect in desk.ledger.outbox}
        assert ["success"] == [one.phase for one in desk.effects(EffectKind.SETTLE_POD)]


async def test_a_container_restarts_after_a_lost_checkpoint_while_another_pod_holds_the_lock():
    async with a_desk() as desk:
        old = desk.bind(placed(1))
        first = await desk.service.allocate(ids(4))
        desk.epoch = NEXT_EPOCH
        desk.see(
            dataclasses.replace(
                old, phase=Phase.RUNNING, containers=(a_container(running_id="containerd://a"),)
            )
        )
        lock, owed = desk.lock(placed(2)), desk.ledger.outbox

        assert first == await desk.service.allocate(ids(9))

        assert owed == desk.ledger.outbox
        assert lock.value not in {effect.value for effect in owed}


async def test_after_a_reboot_three_pods_are_asked_for_one_by_one_and_get_their_old_answers():
    async with a_desk() as desk:
        pods, answers = [], []
        for number in (1, 2, 3):
            pod = desk.bind(placed(number, f"{G1},NVIDIA,{1000 * number},10:;"))
            answers.append(await desk.service.allocate(ids(number)))
            desk.witness.admit(pod, main=ids(number)[0])
            pods.append(pod)
        desk.lock(None)
        desk.epoch = NEXT_EPOCH  # and with it went all containers
        for pod in pods:
            running = (a_container(running_id=f"containerd://{pod.name}"),)
            desk.see(dataclasses.replace(pod, phase=Phase.RUNNING, containers=running))
            desk.witness.forget(pod)

        again = []
        for number, pod in enumerate(pods):
            desk.witness.admit(pod)
            again.append(await desk.service.allocate(ids(7 - number)))
            desk.witness.admit(pod, main=ids(7 - number)[0])

        assert answers == again


async def test_of_two_pods_of_an_expired_lock_the_first_is_refused_and_the_second_gets_its_own():
    async with a_desk() as desk:
        first = placed(1)
        second = placed(2, f"{G2},NVIDIA,2000,20:;")
        desk.see(first, second)
        desk.lock(second)
        desk.witness.admit(first)
        await refused(desk, Gate.NO_RIGHT)
        desk.witness.forget(first)
        desk.witness.admit(second)

        answer = dict((await desk.service.allocate(ids(4))).envs)

        assert (G2, "2000m") == (
            answer["NVIDIA_VISIBLE_DEVICES"],
            answer["CUDA_DEVICE_MEMORY_LIMIT_0"],
        )
        assert {second.uid} == {effect.pod_uid for effect in desk.ledger.outbox}


async def test_forged_annotations_beside_a_lock_are_worth_nothing():
    async with a_desk() as desk:
        forger = placed(2, annotations=annotated(f"{G1},NVIDIA,1,1:;"))
        desk.see(forger, placed(1))
        desk.lock(placed(1))
        desk.witness.admit(forger)

        await refused(desk, Gate.NO_RIGHT)


async def test_a_finished_job_that_the_api_still_shows_running_does_not_fill_its_gpu():
    async with a_desk() as desk:
        job = desk.bind(placed(1, f"{G1},NVIDIA,81559,100:;"))
        await desk.service.allocate(ids(1))
        desk.witness.admit(job, main=ids(1)[0])
        desk.see(dataclasses.replace(job, phase=Phase.RUNNING))
        desk.bind(placed(2, f"{G1},NVIDIA,81559,100:;"))
        await refused(desk, Gate.MEMORY_EXCEEDED)
        desk.witness.forget(placed(2))

        desk.witness.forget(job)  # it has ended, and the API server will say so soon
        desk.bind(placed(3, f"{G1},NVIDIA,81559,100:;"))
        await desk.service.allocate(ids(2))

        assert ["train-1", "train-3"] == [row.pod for row in desk.ledger.rows]


@pytest.mark.parametrize("other", [None, placed(9)], ids=["no lock", "another pod's lock"])
async def test_unique_serves_the_pod_that_the_kubelet_confirms_whoever_has_the_lock(other):
    async with a_desk(unlocked=UnlockedPods.UNIQUE) as desk:
        pod = desk.bind(placed(1))
        desk.lock(other)

        await desk.service.allocate(ids(1))

        assert [(pod.uid, "")] == [(row.key.pod_uid, row.lock) for row in desk.ledger.rows]
        assert [] == desk.effects(EffectKind.RELEASE_LOCK)


async def test_the_peak_of_an_init_container_stays_reserved_and_is_counted_once():
    async with a_desk() as desk:
        await beside_an_init_peak(desk)
        desk.bind(placed(2, f"{G1},NVIDIA,22000,10:;"))

        await refused(desk, Gate.MEMORY_EXCEEDED)

        desk.bind(placed(3, f"{G1},NVIDIA,21559,10:;"))
        desk.witness.forget(placed(2))
        await desk.service.allocate(ids(3))


async def beside_an_init_peak(desk):
    """A pod of 60000 MiB in its init container and 50000 then; the kubelet asks for another one."""
    containers = (a_container(name="init", role=Role.INIT), a_container(name="app"))
    text = f"{G1},NVIDIA,60000,10:;{G1},NVIDIA,50000,10:;"
    pod = desk.bind(placed(1, text, containers=containers))
    await desk.service.allocate(ids(1))
    desk.records.keys = frozenset({desk.ledger.rows[0].key})
    await desk.service.allocate(ids(1))
    desk.witness.admit(pod, app=ids(1)[0])
    done = dataclasses.replace(containers[0], has_run=True, succeeded=True)
    return dataclasses.replace(pod, phase=Phase.RUNNING, containers=(done, containers[1]))


async def test_the_room_of_an_init_peak_is_given_out_once_the_init_containers_have_succeeded():
    async with a_desk() as desk:
        desk.see(await beside_an_init_peak(desk))
        desk.bind(placed(2, f"{G1},NVIDIA,31559,10:;"))

        await desk.service.allocate(ids(3))

        assert 0 == desk.refreshes


async def test_a_pod_is_not_refused_for_room_that_our_late_watch_still_counts():
    async with a_desk() as desk:
        desk.unseen.append(await beside_an_init_peak(desk))
        desk.bind(placed(2, f"{G1},NVIDIA,31559,10:;"))

        await desk.service.allocate(ids(3))

        assert 1 == desk.refreshes


async def test_what_the_scheduler_oversold_is_given_as_written_and_told():
    async with a_desk() as desk:
        init = a_container(name="init", role=Role.INIT, count=0)
        pod = placed(1, f"{G1},NVIDIA,60000,10:;", containers=(init, a_container()))
        desk.bind(pod)
        await desk.service.allocate(ids(1))
        desk.witness.admit(pod, main=ids(1)[0])
        done = dataclasses.replace(init, has_run=True, succeeded=True)
        desk.see(dataclasses.replace(pod, containers=(done, a_container())))
        assert [] == desk.said
        desk.bind(placed(2, f"{G1},NVIDIA,60000,10:;"))

        await desk.service.allocate(ids(3))

        (event,) = desk.said
        assert ("GpuOversold", True) == (event.reason, event.warning)
        assert "has given out 120000 MiB of memory of GPU 0" in event.text
        assert "which has 81559 MiB" in event.text


@pytest.mark.parametrize("off", [-LONG, LONG], ids=["behind", "ahead"])
async def test_a_lock_whose_stamp_is_six_minutes_off_is_as_good_as_any(off):
    async with a_desk() as desk:
        pod = desk.bind(placed(1))
        stamp = desk.clock.now() + dt.timedelta(seconds=off)
        desk.see(
            dataclasses.replace(
                pod,
                annotations={
                    **pod.annotations,
                    "hami.io/bind-time": str(int(stamp.timestamp())),
                },
            )
        )
        lock = desk.lock(pod, stamp)

        await desk.service.allocate(ids(4))

        assert 0 == desk.refreshes
        (release,) = desk.effects(EffectKind.RELEASE_LOCK)
        assert lock.value == release.value


async def test_a_pod_whose_kubelet_comes_back_after_six_minutes_is_served():
    async with a_desk() as desk:
        desk.bind(placed(1))
        await asyncio.sleep(LONG)

        await desk.service.allocate(ids(4))

        assert {("ok", ""): 1} == desk.results


async def test_an_answer_releases_the_lock_that_is_there_then_and_not_an_older_one():
    async with a_desk() as desk:
        pod = desk.bind(placed(1))
        later = desk.clock.now() + dt.timedelta(seconds=5)
        again = desk.lock(pod, later)
        noted = {**pod.annotations, "hami.io/bind-time": str(int(later.timestamp()))}
        desk.see(dataclasses.replace(pod, annotations=noted))

        await desk.service.allocate(ids(4))

        assert [again.value] == [one.value for one in desk.effects(EffectKind.RELEASE_LOCK)]


async def test_a_lowered_split_count_takes_nothing_from_a_container_that_starts_again():
    async with a_desk() as desk:
        desk.bind(placed(1))
        first = await desk.service.allocate(ids(9))
        desk.epoch = NEXT_EPOCH
        desk.inventory.set(an_inventory(gpus=(a_shared_gpu(gpu=a_gpu(index=0), split_count=1),)))

        assert first == await desk.service.allocate(ids(9))


KINDS = tuple((role, count) for role in (Role.INIT, Role.SIDECAR, Role.APP) for count in (0, 1))


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
            (f"{G1},NVIDIA,{100 + place},1:" if one.count else "") + ";"
            for place, one in enumerate(containers)
        )
        async with a_desk() as desk:
            pod = desk.bind(placed(1, text, containers=containers))
            held: dict[str, str] = {}
            recorded = frozenset[ContainerKey]()
            for one in pod.gpu_containers:
                answer = dict((await desk.service.allocate(ids(len(held)))).envs)
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

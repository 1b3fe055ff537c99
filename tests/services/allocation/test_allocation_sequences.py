"""The sequences that an allocation is guarded against, at the service that answers the kubelet."""

import datetime as dt
import itertools

import msgspec
import pytest

from agent.cluster import Phase, Role
from agent.errors import Refusal, RefusalReason
from agent.ledger import ContainerKey
from agent.settle import EffectKind
from tests.builders import a_container
from tests.services.allocation.allocating import G1, G2, a_desk, ids, placed


async def refused(desk, gate, count=1):
    """The refusal; it owes nothing and writes nothing."""
    before, ledger = desk.disk.writes, desk.ledger
    with pytest.raises(Refusal) as caught:
        await desk.service.allocate(ids(*range(count)))
    assert gate is caught.value.gate
    assert (before, ledger) == (desk.disk.writes, desk.ledger)
    return caught.value


async def test_the_peak_of_an_init_container_stays_reserved_and_is_counted_once():
    async with a_desk() as desk:
        await beside_an_init_peak(desk)
        desk.bind(placed(2, f"{G1},NVIDIA,22000,10:;"))

        await refused(desk, RefusalReason.MEMORY_EXCEEDED)

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
    done = msgspec.structs.replace(containers[0], has_run=True, succeeded=True)
    return msgspec.structs.replace(pod, phase=Phase.RUNNING, containers=(done, containers[1]))


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


async def test_an_answer_releases_the_lock_that_is_there_then_and_not_an_older_one():
    async with a_desk() as desk:
        pod = desk.bind(placed(1))
        later = desk.clock.now() + dt.timedelta(seconds=5)
        again = desk.lock(pod, later)
        noted = {**pod.annotations, "hami.io/bind-time": str(int(later.timestamp()))}
        desk.see(msgspec.structs.replace(pod, annotations=noted))

        await desk.service.allocate(ids(4))

        assert [again.value] == [one.value for one in desk.effects(EffectKind.RELEASE_LOCK)]


async def test_an_answer_of_this_kubelet_counts_where_its_checkpoint_cannot_be_read():
    containers = (a_container(name="init", role=Role.INIT), a_container(name="app"))
    pod = placed(1, f"{G1},NVIDIA,1000,10:;{G2},NVIDIA,2000,20:;", containers=containers)
    async with a_desk() as desk:
        desk.bind(pod)
        desk.records.keys = None
        first = await desk.service.allocate(ids(1))

        second = await desk.service.allocate(ids(2, gpu=1))

    assert first != second
    assert ["init", "app"] == [row.key.container for row in desk.ledger.rows]


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

"""A pod that our watch has not shown yet is never taken for one that waits for its old answer."""

import asyncio
import contextlib

import msgspec
import pytest

from agent.allocate.service import API_BUDGET, LOCK_PAUSE
from agent.cluster import Phase, PodTable
from agent.errors import ApiError, Refusal, RefusalReason
from agent.ledger import KubeletEpoch, Ledger, State
from agent.settle import EffectKind
from tests.builders import a_container, a_lock, a_row, a_share
from tests.services.allocation.allocating import G1, NEXT_EPOCH, a_desk, ids, placed

OLD = placed(1, f"{G1},NVIDIA,6000,20:;")
NEW = placed(2, f"{G1},NVIDIA,2000,20:;")
BEFORE = KubeletEpoch(inode=7, ctime_ns=1)
ROW = a_row(pod_uid=OLD.uid, pod=OLD.name, shares=[a_share(uuid=G1)], epoch=BEFORE)
RAN = msgspec.structs.replace(
    OLD, phase=Phase.RUNNING, containers=(msgspec.structs.replace(a_container(), has_run=True),)
)
NAMED = msgspec.structs.replace(NEW, reusable_name=True)
LOST = State(ledger=Ledger((ROW,)))
"""The kubelet that was answered is gone, and so is its record."""


async def test_a_pod_that_comes_while_another_waits_for_its_old_answer_gets_no_answer_of_that_one():
    async with a_desk(LOST) as desk:
        desk.see(RAN)
        desk.lock(NEW)
        desk.witness.admit(RAN)
        desk.witness.admit(NEW)
        desk.unseen = [NEW]
        await asyncio.sleep(60)

        await desk.service.allocate(ids(0))

    assert ({("ok", ""): 1}, 1) == (desk.results, desk.refreshes)
    assert {OLD.uid, NEW.uid} == {row.key.pod_uid for row in desk.ledger.rows}


async def test_what_the_kubelet_began_before_it_knew_the_newcomer_is_not_for_it():
    async with a_desk(LOST) as desk:
        desk.see(RAN, NEW)
        desk.lock(NEW)
        desk.witness.admit(RAN)
        await asyncio.sleep(60)
        offered = await desk.service.prefer(ids(0, 1), (), 1)
        desk.witness.admit(NEW)

        await desk.service.allocate(offered)

        assert {("replay", ""): 1} == desk.results


@pytest.mark.parametrize(
    ("pod", "idle", "lists"),
    [(OLD, True, 0), (OLD, False, 1), (RAN, False, 1)],
    ids=["it never ran", "it may have run", "its container died"],
)
async def test_an_old_answer_is_given_again_after_a_list_only_where_a_newcomer_may_be_meant(
    pod, idle, lists
):
    async with a_desk(LOST) as desk:
        desk.containers.pods = frozenset() if idle else frozenset({pod.uid})
        desk.see(pod)
        desk.epoch = KubeletEpoch(8, desk.epoch.ctime_ns)
        desk.witness.admit(pod)
        await asyncio.sleep(60)

        await desk.service.allocate(ids(0))

        assert ({("replay", ""): 1}, lists) == (desk.results, desk.refreshes)


async def test_without_the_api_server_an_old_answer_is_given_again_only_to_a_pod_being_admitted():
    async with a_desk(LOST) as desk:
        desk.refresh_error = ApiError("away")
        desk.admit(OLD)
        desk.containers.pods = frozenset()
        desk.epoch = KubeletEpoch(8, desk.epoch.ctime_ns)
        await asyncio.sleep(0.1)
        await desk.service.allocate(ids(0))
        assert {("replay", ""): 1} == desk.results

    async with a_desk(LOST) as desk:
        desk.refresh_error = ApiError("away")
        desk.admit(RAN)
        with pytest.raises(Refusal) as refused:
            await desk.service.allocate(ids(0))

    assert (RefusalReason.PODS_UNKNOWN, True) == (refused.value.gate, refused.value.transient)


async def test_a_preference_for_an_old_answer_asks_nobody_but_the_kubelet():
    async with a_desk(LOST) as desk:
        desk.admit(OLD)

        await desk.service.prefer(ids(0, 1), (), 1)

        assert (0, [], 0) == (desk.refreshes, desk.gets, desk.node_gets)


@pytest.mark.parametrize("is_away", [True, False], ids=["nobody says whose it is", "it is its own"])
async def test_a_pod_whose_name_can_return_costs_one_get_and_is_served_where_the_name_is_its_own(
    is_away,
):
    async with a_desk() as desk:
        desk.bind(NAMED)
        if is_away:
            desk.names[NAMED.key] = ApiError("away")
            with pytest.raises(Refusal) as refused:
                await desk.service.allocate(ids(0))
            assert RefusalReason.PODS_UNKNOWN is refused.value.gate
        else:
            await desk.service.allocate(ids(0))

        assert (0, [NAMED.key], 0) == (desk.refreshes, desk.gets, desk.node_gets)
        rows = [] if is_away else [NAMED.uid]
        assert rows == [row.key.pod_uid for row in desk.ledger.rows]


async def test_an_api_server_that_says_nothing_is_waited_for_no_longer_than_an_answer_may_take():
    async with a_desk() as desk:
        silence = desk.silent = asyncio.Event()
        desk.see(NEW)
        desk.lock(OLD)
        desk.witness.admit(NEW)
        began = asyncio.get_running_loop().time()

        with pytest.raises(Refusal) as refused:
            await desk.service.allocate(ids(0))

        assert not silence.is_set()
        assert RefusalReason.PODS_UNKNOWN is refused.value.gate
        assert API_BUDGET + LOCK_PAUSE == pytest.approx(
            asyncio.get_running_loop().time() - began, abs=0.01
        )


@pytest.mark.parametrize("pod", [NEW, NAMED], ids=["generated", "its own"])
async def test_the_lock_of_a_pod_whose_name_can_return_goes_behind_the_patch_with_its_uid(pod):
    async with a_desk() as desk:
        desk.bind(pod)

        await desk.service.allocate(ids(0))

        lock = a_lock(namespace=pod.namespace, name=pod.name).value
        (settle,) = desk.effects(EffectKind.SETTLE_POD)
        released = [effect.lock for effect in desk.effects(EffectKind.RELEASE_LOCK)]
        assert (("", [lock]) if pod is NEW else (lock, [])) == (settle.lock, released)


@pytest.mark.parametrize("is_refused", [False, True], ids=["it is cut off", "it is refused"])
async def test_a_call_of_the_kubelet_before_uses_up_no_pod_of_the_next(is_refused):
    """It ends while the agent waits, and the next kubelet admits the same pod."""
    pod = placed(1, reusable_name=True)
    async with a_desk() as desk, asyncio.TaskGroup() as group:
        desk.bind(pod)
        silence = desk.silent = asyncio.Event()
        desk.names[pod.key] = ApiError("away")

        async def ask() -> None:
            with contextlib.suppress(Refusal):
                await desk.service.allocate(ids(1))

        first = group.create_task(ask())
        await asyncio.sleep(0.05)
        desk.epoch = KubeletEpoch(8, desk.epoch.ctime_ns)
        if not is_refused:
            first.cancel()
        silence.set()
        await asyncio.wait([first])
        desk.names.clear()

        await desk.service.allocate(ids(2))

    assert {("ok", ""): 1} == {key: n for key, n in desk.results.items() if key[0] == "ok"}


# An agent restarted while the API server is away says so, and answers nobody.


async def answered():
    """The ledger of an agent that answered a pod, on disk; then kubelet and agent died."""
    async with a_desk() as desk:
        pod = desk.bind(placed(1))
        edits = await desk.service.allocate(ids(4))
        return pod, edits, desk.ledger, desk.disk


def cut_off(desk):
    desk.pods.set(PodTable())
    desk.node.set(None)
    desk.refresh_error = ApiError("connection refused")
    desk.epoch = NEXT_EPOCH


@pytest.mark.parametrize("number", [1, 2], ids=["it was answered", "another pod"])
async def test_whoever_asks_is_refused_for_the_moment_with_the_true_reason(number):
    _, _, ledger, disk = await answered()
    async with a_desk(State(generation=1, ledger=ledger), disk) as desk:
        cut_off(desk)
        desk.witness.admit(placed(number))

        with pytest.raises(Refusal) as caught:
            await desk.service.allocate(ids(5))

        assert (RefusalReason.PODS_UNKNOWN, True) == (caught.value.gate, caught.value.transient)
        assert "could not ask the API server" in caught.value.sentence
        assert ledger == desk.ledger


async def test_a_list_that_comes_in_time_is_what_decides():
    pod, first, ledger, disk = await answered()
    async with a_desk(State(generation=1, ledger=ledger), disk) as desk:
        cut_off(desk)
        desk.witness.admit(pod)
        desk.refresh_error, desk.unseen = None, [pod]
        silence = desk.silent = asyncio.Event()
        asyncio.get_running_loop().call_later(0.1, silence.set)

        assert first == await desk.service.allocate(ids(9))

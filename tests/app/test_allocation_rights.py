"""Whose the node lock is, and what that is worth, acted out by the whole agent on its node."""

import asyncio

import pytest

from agent.allocate import service
from agent.allocate.match import UnlockedPods
from agent.cluster import PHASE_FAILED, PHASE_SUCCESS
from tests.app.story import AllocationStory, a_story, told
from tests.builders import NODE, a_uuid
from tests.machine.mutants import replaced
from tests.machine.pods import NAMESPACE, Box, Shape, a_pod_object

BIG = Shape((Box(mib=12000),))
SMALL = Shape((Box(mib=4000),))
LONG = 360.0
"""Seconds: longer than the scheduler keeps a lock."""


@told
async def test_a_success_that_comes_late_is_not_written_on_the_pod_made_anew():
    async with a_story() as story:
        old = await story.bound("web-0", SMALL)
        await story.cut_off_when_answered(old)
        assert "allocating" == story.bind_phase("web-0")
        story.world.delete(story.pod("web-0"), 0)
        story.world.create("web-0", SMALL)
        await asyncio.sleep(30)
        assert "" == story.bind_phase("web-0")

        story.world.faults.clear()
        await story.until(lambda: not story.lock)
        assert "" == story.bind_phase("web-0")
        await story.placed("web-0")
        await story.running("web-0")
        await story.until(lambda: story.bind_phase("web-0") == PHASE_SUCCESS)


@pytest.mark.parametrize(
    ("before", "served"), [(50, True), (100, False)], ids=["just now", "long ago"]
)
@told
async def test_an_expired_lock_that_was_handed_over_gives_neither_pod_the_others_share(
    before, served
):
    """For a minute it still proves the first one's right."""
    async with a_story() as story:
        await story.world.stop_kubelet(LONG + 50)
        await story.bound("first", SMALL)
        await asyncio.sleep(LONG + 50 - before)
        await story.bound("second", Shape((Box(mib=2000),)))

        if served:
            await story.running("first")
            assert "4000m" == story.envs("first")["CUDA_DEVICE_MEMORY_LIMIT_0"]
        else:
            await story.failed("first", "HA-2004", within=150)
            assert "team-a/second" in story.message("first")
        await story.running("second")

        assert "2000m" == story.envs("second")["CUDA_DEVICE_MEMORY_LIMIT_0"]
        phase = PHASE_SUCCESS if served else PHASE_FAILED
        await story.until(lambda: story.bind_phase("first") == phase)
        await story.until(lambda: story.bind_phase("second") == PHASE_SUCCESS)


def test_the_planted_bug_that_only_the_lock_that_stands_proves_a_right_is_found():
    """Stories where nothing fails show it once in thousands."""
    told_so = test_an_expired_lock_that_was_handed_over_gives_neither_pod_the_others_share

    with replaced(service, "former_locks", lambda *_: ()), pytest.raises(TimeoutError):
        told_so(before=50, served=True)


@pytest.mark.parametrize("seconds", [1, 35], ids=["the lock stands", "it went just now"])
@pytest.mark.parametrize("is_placed", [True, False])
@told
async def test_the_unused_lock_of_a_deleted_pod_is_for_the_next_that_hami_places_under_its_name(
    seconds, is_placed
):
    async with a_story() as story:
        await story.world.stop_kubelet(seconds)
        await story.bound("train", SMALL)
        story.world.delete(story.pod("train"), 0)
        await asyncio.sleep(seconds)
        assert bool(story.lock) is (seconds == 1)

        if is_placed:
            await story.runs("train", Shape((Box(mib=2000),)))
            assert "2000m" == story.envs("train")["CUDA_DEVICE_MEMORY_LIMIT_0"]
        else:  # it was created with its node
            story.world.create_stray("train", Shape((Box(mib=12000),), forged=12000))
            await story.failed("train", "HA-2005")
            assert "without spec.nodeName" in story.message("train")
            await story.until(lambda: story.bind_phase("train") == PHASE_FAILED)


@told
async def test_a_tenant_that_makes_little_of_a_running_pods_share_frees_nothing():
    async with a_story() as story:
        await story.runs("liar", BIG)
        await story.runs("beside", BIG)
        for name in ("liar", "beside"):
            story.world.lie(story.pod(name))

        await story.bound("next", BIG)

        await story.failed("next", "HA-4003")
        assert story.is_running("liar")
        assert story.is_running("beside")


@pytest.mark.parametrize(
    "status",
    [
        {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulerError"}]},
        {"conditions": [], "startTime": "2026-09-01T12:00:00Z"},
    ],
    ids=["its scheduler gave up the bind", "a kubelet that was replaced rejected it"],
)
@told
async def test_a_bound_pod_whose_status_hides_it_afterwards_is_served(status):
    async with a_story() as story:
        await story.world.stop_kubelet(20.0)
        await story.bound("train", SMALL)
        story.world.store.update(
            "pods", "team-a", "train", lambda pod: {**pod, "status": pod["status"] | status}
        )

        await story.running("train")


# Pods for which HAMi takes no lock, and annotations that a tenant wrote.


APP = Box(count=0)
INIT, SIDECAR = (Box(kind, mib=3000) for kind in ("init", "sidecar"))
LOCKLESS = Shape((INIT, APP))
HUGE = 3 << 30
"""MiB that HAMi cannot count, so that it drops the request."""
G0, G1 = a_uuid(0), a_uuid(1)


@pytest.mark.parametrize(
    "boxes",
    [
        (INIT, APP),
        (SIDECAR, APP),
        (INIT, Box("init", count=2, mib=5000, cores=0), APP),
        (Box("init", count=0), SIDECAR, Box("init", mib=2000), APP, APP),
        (Box("init", mib=0, cores=100), APP),
    ],
    ids=lambda boxes: " ".join(f"{box.kind}{box.count}" for box in boxes),
)
@pytest.mark.parametrize("unlocked", [UnlockedPods.SCHEDULED, UnlockedPods.UNIQUE])
@told
async def test_a_pod_whose_init_containers_alone_ask_is_served(boxes, unlocked):
    async with a_story(unlocked=unlocked) as story:
        uid = await story.runs("prepare", Shape(boxes))

        assert not story.lock
        asking = [(place, box) for place, box in enumerate(boxes) if box.count]
        assert {("ok", ""): len(asking)} == story.results
        assert len(asking) == story.asked(uid)
        for place, box in asking:
            envs = story.envs("prepare", f"c{place}")
            assert f"{box.mib or 16000}m" == envs["CUDA_DEVICE_MEMORY_LIMIT_0"]
            assert box.count == len(envs["NVIDIA_VISIBLE_DEVICES"].split(","))
        await story.until(lambda: story.bind_phase("prepare") == PHASE_SUCCESS)


async def bound_by_hand(story: AllocationStory, name: str, shape: Shape, scheduler: str) -> None:
    """Its tenant wrote the annotations, and somebody who may bind pods bound it here."""
    pod = a_pod_object(name, shape, 0, schedulerName=scheduler)
    story.world.store.create("pods", pod)
    story.world.store.bind(NAMESPACE, name, NODE)


@pytest.mark.parametrize("scheduler", ["hami-scheduler", "other"])
@pytest.mark.parametrize("beside", [False, True], ids=["no lock", "another's lock"])
@pytest.mark.parametrize(
    ("boxes", "forged"), [((INIT, APP), 3000), ((Box(mib=12000),), 12000), ((Box(mib=12000),), 1)]
)
@told
async def test_annotations_that_a_tenant_wrote_give_no_right(scheduler, beside, boxes, forged):
    """A pod that names its node itself is refused, whatever is written on it."""
    async with a_story() as story:
        if beside:
            await story.world.stop_kubelet(5.0)
            await story.bound("owner", SMALL)
            await asyncio.sleep(1.0)  # the kubelet admits the older one first, by the second
        story.world.create_stray("forger", Shape(boxes, forged=forged), scheduler)

        await story.failed("forger", "HA-2005")
        assert "without spec.nodeName" in story.message("forger")
        await story.until(lambda: story.bind_phase("forger") == PHASE_FAILED)
        assert beside or {("refused", "no_lock"): 1} == story.results
        if beside:
            await story.running("owner")


@pytest.mark.parametrize("seconds", [None, 2], ids=["it runs", "it has ended, and its row is gone"])
@told
async def test_a_lock_that_was_used_proves_nothing_for_the_next_pod_of_the_name(seconds):
    async with a_story() as story:
        await story.runs("train", Shape((Box(mib=4000),), seconds=seconds))
        await story.until(lambda: not story.lock)
        await story.until(lambda: seconds is None or not story.rows)
        story.world.delete(story.pod("train"), 0)

        await bound_by_hand(story, "train", Shape((Box(mib=12000),), forged=12000), "mine")

        await story.failed("train", "HA-2005")


@told
async def test_a_pod_that_another_scheduler_bound_is_refused():
    async with a_story() as story:
        await bound_by_hand(story, "forger", Shape((INIT, APP), forged=3000), "mine")

        await story.failed("forger", "HA-2005")
        assert "create it again with schedulerName hami-scheduler" in story.message("forger")


@pytest.mark.parametrize(
    "boxes", [(INIT, Box("init", mib=HUGE), APP), (Box("init", mib=HUGE), APP)]
)
@told
async def test_forged_annotations_of_a_request_that_hami_drops_are_worth_nothing(boxes):
    async with a_story() as story:
        await story.world.stop_kubelet(10.0)
        await story.bound("forger", Shape(boxes, forged=3000))
        groups = "".join(f"{G0},NVIDIA,3000,20:;" for box in boxes if box.count)
        assert story.world.edit("forger", groups)

        await story.failed("forger", "HA-3006")
        assert "cannot count the 3221225472 MiB" in story.message("forger")


ONE, PAIR = Shape((Box(mib=3000),)), Shape((Box(mib=3000, count=2),))
TWO = Shape((Box(mib=1000, cores=10), Box(mib=8000, cores=40)))
OTHER_AMOUNTS = ("2999,20", "3001,20", "0,20", "3000,19", "3000,21", "3000,0", "16000,100")


@pytest.mark.parametrize(
    ("shape", "text", "gate"),
    [
        # Without a lock, other amounts than requested; with it, more than requested.
        *((LOCKLESS, f"{G0},NVIDIA,{amount}:;", "HA-3007") for amount in OTHER_AMOUNTS),
        *((ONE, f"{G0},NVIDIA,{amount}:;", "HA-3007") for amount in ("3001,20", "0,20")),
        *((ONE, f"{G0},NVIDIA,{amount}:;", "HA-3007") for amount in ("3000,100", "3000,0")),
        (ONE, f"{G0},NVIDIA,3000,20:{G1},NVIDIA,3000,20:;", "HA-3004"),
        (PAIR, f"{G0},NVIDIA,9,20:{G1},NVIDIA,9000,20:;", "HA-3007"),
        (PAIR, f"{G0},NVIDIA,3000,20:;", "HA-3004"),
        (TWO, f"{G0},NVIDIA,8000,40:;{G0},NVIDIA,1000,10:;", "HA-3007"),
        (TWO, f"{G1},NVIDIA,1000,10:;{G1},NVIDIA,8001,40:;", "HA-3007"),
        (TWO, f"{G0},NVIDIA,1000,10:;", "HA-3004"),
    ],
)
@told
async def test_no_more_is_given_than_was_requested(shape, text, gate):
    """The tenant writes on the pod after it was bound and before it is admitted."""
    async with a_story() as story:
        await story.world.stop_kubelet(10.0)
        await story.bound("edited", shape)
        assert story.world.edit("edited", text)

        await story.failed("edited", gate)
        assert "delete the pod" in story.message("edited")
        asked = "requests 3000 MiB and 20 % of the compute"
        assert shape is not LOCKLESS or asked in story.message("edited")
        await story.until(lambda: story.bind_phase("edited") == PHASE_FAILED)
        await story.until(lambda: not story.lock)
        await story.runs("next", SMALL)

"""Pods for which HAMi takes no lock, and annotations that a tenant wrote, before the agent."""

import asyncio

import pytest

from agent.allocate.candidates import UnlockedPods
from agent.cluster import PHASE_FAILED, PHASE_SUCCESS
from tests.app.story import AllocationStory, a_story, told
from tests.builders import NODE, a_uuid
from tests.machine.pods import NAMESPACE, Box, Shape, a_pod_object

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


@told
async def test_it_is_served_beside_pods_that_hold_the_lock_and_leaves_it_to_them():
    async with a_story() as story:
        await story.world.stop_kubelet(20.0)
        for name in ("first", "second"):
            await story.bound(name, LOCKLESS)
        await story.bound("owner", Shape((Box(mib=4000),)))
        lock = story.lock
        assert lock.endswith(",owner")
        await story.bound("third", LOCKLESS)

        await story.running("first", "second", "owner", "third")

        assert {("ok", ""): 4} == story.results
        await story.until(lambda: not story.lock)


@pytest.mark.parametrize("death", ["kubelet", "agent", "reboot"])
@told
async def test_it_gets_the_same_again_after_a_death(death):
    async with a_story() as story:
        if death == "kubelet":
            story.world.die_after_answer()
        uid = await story.runs("prepare", Shape((SIDECAR, APP)))
        before = story.world.audit.answers[(uid, "c0")]
        if death == "agent":
            story.world.kill_agent_at(0, 1.0)
            await asyncio.sleep(5)
            await story.world.end_containers(0, 2)
        elif death == "reboot":
            await story.world.reboot(lose=True)
        await asyncio.sleep(60)

        await story.running("prepare")
        assert before == story.world.audit.answers[(uid, "c0")]


@told
async def test_strict_refuses_it_and_names_the_setting():
    async with a_story(unlocked=UnlockedPods.STRICT) as story:
        await story.bound("prepare", LOCKLESS)

        await story.failed("prepare", "HA-2005")
        assert "set allocation.unlockedPods to scheduled" in story.message("prepare")
        await story.until(lambda: story.bind_phase("prepare") == PHASE_FAILED)


async def bound_by_hand(story: AllocationStory, name: str, shape: Shape, scheduler: str) -> None:
    """Its tenant wrote the annotations, and somebody who may bind pods bound it here."""
    pod = a_pod_object(name, shape, 0, schedulerName=scheduler)
    story.world.store.create("pods", pod)
    story.world.store.bind(NAMESPACE, name, NODE)


@pytest.mark.parametrize("scheduler", ["hami-scheduler", "other"])
@pytest.mark.parametrize("beside", [False, True], ids=["no lock", "another's lock"])
@told
async def test_a_pod_that_names_its_node_itself_is_refused(scheduler, beside):
    async with a_story() as story:
        if beside:
            await story.world.stop_kubelet(5.0)
            await story.bound("owner", Shape((Box(mib=4000),)))
        story.world.create_stray("forger", Shape((INIT, APP), forged=3000), scheduler)

        await story.failed("forger", "HA-2005")
        assert "without nodeName" in story.message("forger")
        if beside:
            await story.running("owner")


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
        assert "cannot count 3221225472 MiB" in story.message("forger")


@told
async def test_a_pod_that_the_kubelet_has_started_before_is_refused():
    async with a_story() as story:
        await story.world.stop_kubelet(10.0)
        await story.bound("odd", LOCKLESS)
        story.world.store.update(
            "pods", NAMESPACE, "odd", lambda pod: pod | {"status": pod["status"] | STARTED}
        )

        await story.failed("odd", "HA-2005")


STARTED = {"startTime": "2026-09-01T12:00:00Z"}


async def edited(story: AllocationStory, shape: Shape, text: str) -> None:
    """The pod `edited`, whose tenant writes on it after it was bound and before it is admitted."""
    await story.world.stop_kubelet(10.0)
    await story.bound("edited", shape)
    assert story.world.edit("edited", text)


@pytest.mark.parametrize(
    "text", ["2999,20", "3001,20", "0,20", "3000,19", "3000,21", "3000,0", "16000,100"]
)
@told
async def test_without_a_lock_other_amounts_than_requested_are_refused(text):
    async with a_story() as story:
        await edited(story, LOCKLESS, f"{G0},NVIDIA,{text}:;")

        await story.failed("edited", "HA-3007")
        assert "requests 3000 MiB and 20 % of the compute" in story.message("edited")
        await story.until(lambda: story.bind_phase("edited") == PHASE_FAILED)


TWO = Shape((Box(mib=1000, cores=10), Box(mib=8000, cores=40)))


@pytest.mark.parametrize(
    ("shape", "text", "gate"),
    [
        (Shape((Box(mib=3000),)), f"{G0},NVIDIA,3001,20:;", "HA-3007"),
        (Shape((Box(mib=3000),)), f"{G0},NVIDIA,0,20:;", "HA-3007"),
        (Shape((Box(mib=3000),)), f"{G0},NVIDIA,3000,100:;", "HA-3007"),
        (Shape((Box(mib=3000),)), f"{G0},NVIDIA,3000,0:;", "HA-3007"),
        (Shape((Box(mib=3000),)), f"{G0},NVIDIA,3000,20:{G1},NVIDIA,3000,20:;", "HA-3004"),
        (Shape((Box(mib=3000, count=2),)), f"{G0},NVIDIA,9,20:{G1},NVIDIA,9000,20:;", "HA-3007"),
        (Shape((Box(mib=3000, count=2),)), f"{G0},NVIDIA,3000,20:;", "HA-3004"),
        (TWO, f"{G0},NVIDIA,8000,40:;{G0},NVIDIA,1000,10:;", "HA-3007"),
        (TWO, f"{G1},NVIDIA,1000,10:;{G1},NVIDIA,8001,40:;", "HA-3007"),
        (TWO, f"{G0},NVIDIA,1000,10:;", "HA-3004"),
    ],
)
@told
async def test_with_the_lock_no_more_is_given_than_was_requested(shape, text, gate):
    async with a_story() as story:
        await edited(story, shape, text)

        await story.failed("edited", gate)
        assert "delete the pod" in story.message("edited")
        await story.until(lambda: not story.lock)
        await story.runs("next", Shape((Box(mib=4000),)))


@pytest.mark.parametrize("text", ["1,20", "2999,1"])
@told
async def test_a_pod_that_makes_little_of_its_share_gets_little(text):
    async with a_story() as story:
        await story.world.stop_kubelet(10.0)
        uid = await story.bound("edited", Shape((Box(mib=3000),)))
        ((share,),) = story.world.scheduler.placed[uid]
        assert story.world.edit("edited", f"{share.uuid},NVIDIA,{text}:;")

        await story.running("edited")
        mib, cores = text.split(",")
        envs = story.envs("edited")
        assert (f"{mib}m", cores) == (
            envs["CUDA_DEVICE_MEMORY_LIMIT_0"],
            envs["CUDA_DEVICE_SM_LIMIT"],
        )

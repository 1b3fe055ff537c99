"""What befalls kubelet, agent and containers amid allocations, acted out by the whole agent."""

import asyncio
import errno

import pytest

from agent.cluster import PHASE_SUCCESS
from tests.app.story import a_story, told
from tests.fakes.chance import Seeded
from tests.machine.kubelet import RESOURCE
from tests.machine.pods import Box, Shape
from tests.machine.world import SPLIT

BIG = Shape((Box(mib=12000),))
SMALL = Shape((Box(mib=4000),))
DAY = 86_400.0
"""Seconds."""


@told
async def test_a_container_restarts_after_a_lost_checkpoint_while_another_pod_holds_the_lock():
    async with a_story() as story:
        uid = await story.runs("old", SMALL)
        await story.until(lambda: not story.lock)
        await story.world.restart_kubelet(lose=True)
        await asyncio.sleep(2)
        story.world.create("next", SMALL)
        lock = story.take_lock("next")

        await story.world.kubelet.container_died(uid, "c0")
        await story.until(lambda: story.results.get(("replay", "")))
        await story.running("old")

        assert lock == story.lock
        await story.placed("next", within=400)
        await story.running("next")


@pytest.mark.parametrize("count", [3, 16])
@told
async def test_a_reboot_with_a_lost_checkpoint_gives_all_pods_their_old_answers(count):
    """The kubelet asks for all of them at once, and bounds the questions that it answers."""
    async with a_story() as story:
        story.world.set_split(count)
        names = [f"p{number}" for number in range(count)]
        shape = Shape((Box(mib=300, cores=0),))
        uids = [await story.runs(name, shape) for name in names]
        before = [story.asked(uid) for uid in uids]

        await story.world.reboot(lose=True)
        assert {"Running"} == {story.phase(name) for name in names}
        await story.running(*names, within=120)

        assert [times + 1 for times in before] == [story.asked(uid) for uid in uids]
        assert {("replay", ""): count} == story.results


@told
async def test_a_pod_that_another_handler_rejects_after_our_answer_gives_its_share_back():
    async with a_story() as story:
        await story.runs("beside", BIG)
        story.world.create("misplaced", Shape((Box(mib=12000),), misplaced=True))
        uid = await story.placed("misplaced")
        await story.until(lambda: story.phase("misplaced") == "Failed")
        assert "NodeAffinity" in story.message("misplaced")
        assert (uid, "c0") in story.world.audit.answers

        await story.runs("next", BIG)

        await story.until(lambda: not story.lock)


@told
async def test_containers_restart_after_the_split_count_was_lowered_under_them():
    async with a_story() as story:
        names = ("a", "b", "c")
        for name in names:
            await story.runs(name, SMALL)
        story.world.set_split(1)
        await asyncio.sleep(1)

        await story.world.end_containers(0, 3)
        await story.running(*names)
        await story.world.restart_kubelet(lose=False)
        await story.world.end_containers(0, 3)
        await story.running(*names)
        await story.world.reboot(lose=True)
        await story.running(*names, within=120)


@pytest.mark.parametrize("steps", range(11))
@told
async def test_an_agent_killed_at_any_await_of_an_allocate_loses_no_answer_and_gives_none_twice(
    steps,
):
    async with a_story(seed=steps + 1) as story:
        await story.runs("before", SMALL)
        uid = await story.bound("train", SMALL)
        await story.until(lambda: story.asked(uid), step=0.0002)
        assert "train" not in {row.pod for row in story.rows}
        story.world.kill_agent_at(steps, 3.0)
        await story.until(lambda: story.phase("train") != "Pending", within=60)

        if story.phase("train") == "Failed":
            assert "code = Unavailable" in story.message("train")
        else:
            await story.running("train")
            await story.until(lambda: story.bind_phase("train") == PHASE_SUCCESS)
        await story.until(lambda: not story.lock)
        await story.world.kubelet.until_allocatable(RESOURCE, 2 * SPLIT)
        await story.runs("next", SMALL)
        assert story.is_running("before")


@told
async def test_an_agent_that_was_away_for_a_day_closes_what_ended_and_keeps_what_runs():
    async with a_story() as story:
        await story.runs("stays", SMALL)
        await story.runs("goes", SMALL)
        story.world.kill_agent_at(0, DAY)
        await story.until(lambda: story.world.agent is None, 120)  # at rest it takes few steps
        story.world.delete(story.pod("goes"), 1)
        await asyncio.sleep(DAY)

        await story.until(lambda: story.world.agent is not None)
        await story.world.kubelet.until_allocatable(RESOURCE, 2 * SPLIT)
        await story.runs("comes", SMALL)

        await story.until(lambda: ["stays", "comes"] == [row.pod for row in story.rows], 120)
        assert story.is_running("stays")


# The kubelet lost its checkpoint and asks for dead containers that nothing tells apart: every few
# seconds, and in vain until all but one are deleted. A good pod is refused if a dead one's call
# overtakes its own, or if it comes while one is under way that began after the kubelet knew the
# pod. If each call beside it counted: one in eight.
@pytest.mark.timeout(120)
@told
async def test_good_pods_that_come_beside_dead_containers_that_nothing_tells_apart_run():
    async with a_story() as story:
        story.world.set_split(10)
        for number in range(8):
            await story.bound(f"old-{number}", Shape((Box(mib=300 + number, cores=0),)))
            await asyncio.sleep(1)
        await asyncio.sleep(60)
        await story.world.restart_kubelet(lose=True)
        await asyncio.sleep(120)
        await story.world.end_containers(0, 8)
        await asyncio.sleep(30)
        ends, dice = [], Seeded(3)
        for number in range(16):
            await asyncio.sleep(dice.uniform(2, 9))
            await story.bound(f"good-{number}", Shape((Box(mib=400 + number, cores=0),)))
            await asyncio.sleep(8)
            ends.append(story.phase(f"good-{number}"))
            story.world.delete(story.pod(f"good-{number}"), 0)
        for pod in story.world.pods():
            story.world.delete(pod, 0)

        assert ends.count("Failed") <= 1
        assert ends.count("Running") == 16 - ends.count("Failed")


@pytest.mark.parametrize("container", ["c0", "c1"])
@told
async def test_a_pod_runs_though_its_deleted_namesake_asked_first_and_heard_of_a_full_disk(
    container,
):
    async with a_story() as story:
        kubelet, faults = story.world.kubelet, story.world.disk.faults
        await story.world.stop_kubelet(2.0)
        gone = await story.bound("train", Shape((Box(mib=2000), Box(mib=2000))))
        await story.until(lambda: kubelet.life)  # it admits the pods 0.9 s later

        def hear(event):
            if (event.pod, event.container) != (gone, container):
                return
            if event.kind == "allocating":
                faults.fail_at(0, errno.ENOSPC, times=50)
            elif event.kind == "allocate_refused":
                faults.revive()

        kubelet.history.listen(hear)
        story.world.delete(story.pod("train"), 0)
        await story.runs("train", Shape((Box(mib=4000), Box(mib=4000))))

        assert {"ok", "refused"} == {result for result, _ in story.results} - {"replay"}
        assert "4000m" == story.envs("train", "c1")["CUDA_DEVICE_MEMORY_LIMIT_0"]

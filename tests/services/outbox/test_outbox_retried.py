"""What is owed survives outages, throttling, full disks and the end of the process."""

import asyncio
import errno

import pytest

from agent.cluster import PHASE_FAILED, Phase, PodTable
from agent.ledger import Ledger
from agent.settle import DELAYS, LOCK_DELAYS, REFUSED, REFUSED_REFILL
from tests.fakes.apiserver import FakeApi
from tests.services.outbox.owing import a_placed_pod, owing, releasing, settling, telling

POD = a_placed_pod()


class HangingApi(FakeApi):
    """Never answers a patch of a pod."""

    async def annotate_pod(self, *_args: object) -> None:
        await asyncio.Event().wait()


PHASE = "hami.io/bind-phase"


async def test_an_outage_of_hours_ends_with_the_lock_and_the_pod_done():
    async with owing(POD) as desk:
        desk.api.begin_outage()
        await desk.owe(releasing(POD), settling(POD), telling(POD))
        await asyncio.sleep(3 * 3600)
        assert [releasing(POD), settling(POD)] == list(desk.owed)
        assert 3 * 3600 * (1 / LOCK_DELAYS[-1] + 2 / DELAYS[-1]) + 30 > desk.api.writes

        desk.api.end_outage()
        await asyncio.sleep(40)

        assert not desk.owed
        assert not desk.locked
        assert "success" == desk.annotations(POD)[PHASE]
        assert [] == desk.api.events


@pytest.mark.parametrize("seconds", [1, 8, 36.5, 37.5, 38.5, 40, 600])
async def test_a_lock_is_free_within_five_seconds_of_the_end_of_an_outage(seconds: float):
    async with owing(POD) as desk:
        desk.api.begin_outage()
        await desk.owe(releasing(POD))
        await asyncio.sleep(seconds)
        assert desk.locked

        desk.api.end_outage()
        await asyncio.sleep(5)

        assert not desk.locked
        assert () == desk.owed


async def test_a_server_that_names_a_time_is_left_alone_until_then():
    async with owing(POD) as desk:
        desk.api.throttle(1, retry_after=20.0)

        await desk.owe(releasing(POD))
        await asyncio.sleep(19.9)
        assert 1 == desk.api.writes
        await asyncio.sleep(0.2)

        assert 2 == desk.api.writes
        assert () == desk.owed


async def test_after_a_success_the_next_failure_is_retried_soon_again():
    async with owing(POD) as desk:
        desk.api.throttle(4, retry_after=0.0)
        await desk.owe(settling(POD))
        await asyncio.sleep(10)
        desk.api.throttle(1, retry_after=0.0)
        desk.api.edit_pod(*POD.key, {PHASE: "allocating"})
        desk.see()

        await desk.owe(settling(POD))
        await asyncio.sleep(0.2)

        assert () == desk.owed


async def test_a_disk_that_fails_after_the_deed_does_not_make_it_done_twice():
    async with owing(POD) as desk:
        await desk.owe(releasing(POD))
        desk.disk.faults.fail_at(0, errno.ENOSPC, times=9)
        await asyncio.sleep(60)

        assert () == desk.owed
        assert not desk.locked
        assert 1 == desk.api.writes
        assert 1 == desk.results["release-lock", "done"]


async def test_what_a_dead_process_owed_is_done_by_the_next_one():
    ledger = Ledger().owe(releasing(POD)).owe(settling(POD))
    async with owing(POD, ledger=ledger) as desk:
        await asyncio.sleep(1)

        assert () == desk.owed
        assert not desk.locked
        assert "success" == desk.annotations(POD)[PHASE]


async def test_after_a_restart_no_pod_is_given_up_before_the_pods_are_known():
    ledger = Ledger().owe(releasing(POD)).owe(settling(POD))
    async with owing(POD, ledger=ledger) as desk:
        desk.pods.set(PodTable())
        await asyncio.sleep(5)
        assert (settling(POD),) == desk.owed
        assert not desk.locked

        desk.see()
        await asyncio.sleep(1)

        assert not desk.owed
        assert "success" == desk.annotations(POD)[PHASE]


async def test_a_server_that_hangs_over_pods_does_not_hold_up_a_lock():
    pods = [a_placed_pod(number) for number in range(9)]
    async with owing(*pods, api=HangingApi()) as desk:
        await desk.owe(*(settling(pod) for pod in pods))
        await asyncio.sleep(1)

        await desk.owe(releasing(pods[0]))
        await asyncio.sleep(0.1)

        assert not desk.locked
        assert 9 == len(desk.owed)


async def test_no_effect_is_under_way_twice_and_the_newer_one_follows_the_older():
    async with owing(POD) as desk:
        desk.api.delay = 2.0
        await desk.owe(settling(POD, phase="", groups=(0,)))
        await asyncio.sleep(0.5)
        await desk.owe(settling(POD))
        await asyncio.sleep(1)
        assert 1 == desk.api.writes
        await asyncio.sleep(5)

        assert 2 == desk.api.writes
        assert () == desk.owed
        assert ";;" == desk.annotations(POD)["hami.io/vgpu-devices-to-allocate"]


async def test_nothing_to_do_is_no_request():
    async with owing(POD) as desk:
        await asyncio.sleep(24 * 3600)

        assert 0 == sum(desk.api.calls.values())


async def test_patches_of_refused_pods_are_bounded_and_a_lock_waits_behind_none_of_them():
    count = REFUSED + 20
    pods = [a_placed_pod(n, Phase.FAILED) for n in range(count)]
    async with owing(*pods) as desk:
        desk.found.set(
            tuple(settling(pod, phase=PHASE_FAILED, groups=(), value="") for pod in pods)
        )
        await asyncio.sleep(1)
        assert REFUSED == desk.api.writes
        await desk.owe(releasing(POD))
        await asyncio.sleep(1)
        assert not desk.locked

        await asyncio.sleep(20 * REFUSED_REFILL)
        assert {("settle-pod", "done"): count, ("release-lock", "done"): 1} == desk.results

"""How often the node is looked at, and what is told; the scenes are those of tests/app."""

import asyncio
import contextlib

from agent.allocate.service import DISK_BUDGET, AllocateStep
from agent.errors import PermissionFault, Refusal, RefusalReason, StateError
from agent.inventory import CHECK_PERIOD, LEAST, NodeCheck, Withholder
from tests.services.at_work import at_work

SOON = CHECK_PERIOD + 0.01


class FullPlace:
    """Something that is looked at: well, wrong, or hanging."""

    def __init__(self) -> None:
        self.error = None
        self.looks = 0
        self.answers = asyncio.Event()
        self.answers.set()

    async def check(self) -> None:
        self.looks += 1
        await self.answers.wait()
        if self.error is not None:
            raise self.error


class WithheldRoom:
    def __init__(self) -> None:
        self.disk, self.library = FullPlace(), FullPlace()
        self.told = []
        self.changes = []
        looks = (
            NodeCheck(AllocateStep.WRITE, self.disk.check),
            NodeCheck(AllocateStep.HOOK, self.library.check),
        )
        self.cue = lambda: None
        self.withholder = Withholder(looks, self._withhold, self.told.append, (self._follow,))

    async def _follow(self, look):
        self.cue = look
        await asyncio.Event().wait()

    def _withhold(self, state):
        self.changes.append((asyncio.get_running_loop().time(), state))

    @property
    def withheld(self):
        return bool(self.withholder.reasons.value)

    @property
    def reasons(self):
        return self.withholder.reasons.value


@contextlib.asynccontextmanager
async def a_room():
    room = WithheldRoom()
    async with at_work(room.withholder.run):
        await asyncio.sleep(0)
        yield room


async def test_what_is_cued_withholds_at_once_with_one_event_and_what_is_not_within_a_period():
    async with a_room() as room:
        await asyncio.sleep(11)
        room.library.error = Refusal(RefusalReason.NO_LIBRARY, "libvgpu.so is missing.")
        room.cue()
        await asyncio.sleep(0.001)
        assert room.withheld
        await asyncio.sleep(600)
        (event,) = room.told
        assert ("NothingOffered", True) == (event.reason, event.warning)
        assert event.text.endswith("no slice is on offer: libvgpu.so is missing. [HA-5005]")
        room.library.error = None
        await asyncio.sleep(LEAST + 0.01)
        assert not room.withheld
        await asyncio.sleep(12)
        room.disk.error = PermissionFault("others may write there")
        await asyncio.sleep(CHECK_PERIOD)
        assert room.withheld


async def test_a_storm_of_refusals_makes_two_looks_a_second():
    async with a_room() as room:
        await asyncio.sleep(1)
        looks = room.disk.looks
        for _ in range(1000):
            room.withholder.look()
            await asyncio.sleep(0.01)

        assert room.disk.looks - looks <= 10 / LEAST + 1


async def test_a_disk_that_is_full_now_and_then_changes_the_list_twice_a_second_at_most():
    async with a_room() as room:
        for number in range(1000):
            room.disk.error = None if number % 2 else StateError("/state is full.")
            room.withholder.look()
            await asyncio.sleep(0.1)

        assert 0 < len(room.changes) <= 100 / LEAST + 1


async def test_another_refusal_is_a_reason_to_look_and_nothing_more():
    async with a_room() as room:
        await asyncio.sleep(1)
        looks = room.disk.looks
        room.withholder.refused(str(Refusal(RefusalReason.NO_LOCK, "Pod a holds no lock.")))
        await asyncio.sleep(0.01)

        assert not room.withheld
        assert looks + 1 == room.disk.looks


async def test_all_that_is_wrong_is_told_each_once_with_its_id():
    async with a_room() as room:
        room.disk.error = StateError("/state is full")
        room.library.error = PermissionFault("others may write there [P-KUBELET]")
        await asyncio.sleep(SOON)
        first, second = room.reasons
        assert "(/state is full)" in first
        assert first.endswith("[HA-5001]")
        assert second.endswith("[P-KUBELET]")
        room.disk.error = room.library.error
        await asyncio.sleep(SOON)

        assert (second,) == room.reasons
        assert 1 == len(room.told)


async def test_a_look_that_hangs_is_a_reason_and_holds_up_no_other_one():
    async with a_room() as room:
        await asyncio.sleep(0.1)
        room.disk.answers.clear()
        await asyncio.sleep(CHECK_PERIOD + DISK_BUDGET)
        (reason,) = room.reasons
        assert "the disk has not answered in time" in reason
        looks = room.library.looks
        await asyncio.sleep(60)

        assert looks + 100 < room.library.looks
        assert 2 == room.disk.looks
        room.disk.answers.set()
        await asyncio.sleep(0.01)
        assert not room.withheld

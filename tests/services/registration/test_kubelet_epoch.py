"""Which kubelet is there: its socket's inode and ctime, published as they change."""

import asyncio

import pytest

from agent.errors import KubeletError
from agent.kubelet.register import KubeletWatch
from agent.ledger import KubeletEpoch
from tests.fakes.registration_side import KubeletSide
from tests.services.at_work import at_work


async def test_a_new_kubelet_is_a_new_epoch() -> None:
    side = KubeletSide()
    kubelet = KubeletWatch(side)
    async with at_work(kubelet.run):
        side.start_kubelet()
        first = await kubelet.epoch.until(lambda epoch: epoch is not None)
        side.start_kubelet()
        second = await kubelet.epoch.until(lambda epoch: epoch not in {None, first})
        side.stop_kubelet()
        await kubelet.epoch.until(lambda epoch: epoch is None)

    assert first != second


async def test_whatever_comes_or_goes_in_the_directory_is_passed_on() -> None:
    side, heard = KubeletSide(), asyncio.Queue[str]()
    kubelet = KubeletWatch(side, heard.put_nowait)
    async with at_work(kubelet.run):
        for name in ("ours.sock", "nvidia-gpu.sock", ""):
            side.report(name)
        assert ["ours.sock", "nvidia-gpu.sock", ""] == [await heard.get() for _ in range(3)]


async def test_the_epoch_of_an_answer_is_looked_up_and_not_remembered() -> None:
    side = KubeletSide()
    kubelet = KubeletWatch(side)
    side.touch_kubelet()

    assert kubelet.epoch.value is None
    assert kubelet.now() == side.present


async def test_a_directory_that_cannot_be_looked_at_leaves_the_last_epoch() -> None:
    class Broken(KubeletSide):
        def epoch(self) -> KubeletEpoch | None:
            raise KubeletError("no access")

    kubelet = KubeletWatch(Broken())
    kubelet.epoch.set(KubeletEpoch(1, 2))

    assert kubelet.now() == KubeletEpoch(1, 2)


async def test_a_watch_that_ends_is_an_error() -> None:
    class Ending(KubeletSide):
        async def changes(self):
            yield ""

    with pytest.raises(KubeletError, match="directory ended"):
        await KubeletWatch(Ending()).run()

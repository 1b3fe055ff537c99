"""One LIST on demand: as new as the question, shared by those who ask at the same time."""

import asyncio

import pytest
from structlog.testing import capture_logs

from agent.errors import ApiError
from agent.kube.watches import LISTS, LISTS_REFILL
from tests.builders import a_pod, a_pod_uid
from tests.fakes.apiserver import FakeApi
from tests.services.cluster.test_pods_table import ONE, TWO, following


async def test_a_refresh_shows_what_the_watch_has_not_delivered_yet():
    async with following(api := FakeApi()) as room:
        api.lag = 30
        api.put_pod(ONE)
        await asyncio.sleep(0.1)
        assert [] == room.names
        table = await room.pods.refresh()

        assert ONE.uid in table.pods
        assert table == room.table.value


async def test_late_frames_do_not_undo_a_refresh():
    api = FakeApi()
    api.put_pod(ONE)

    async with following(api) as room:
        api.lag = 10
        api.put_pod(TWO)
        api.delete_pod(*TWO.key)
        await room.pods.refresh()
        seen = []
        for _ in range(30):
            await asyncio.sleep(1)
            seen.append(room.names)
        api.put_pod(TWO)
        await asyncio.sleep(11)

        assert [["one"]] * 30 == seen
        assert ["one", "two"] == room.names


async def test_a_list_that_the_watch_has_overtaken_is_not_taken():
    class Slow(FakeApi):
        async def list_pods(self):
            found = await super().list_pods()
            await asyncio.sleep(0.8 if self.calls["list_pods"] > 1 else 0)
            return found

    api = Slow()

    async with following(api) as room, asyncio.TaskGroup() as group:
        asking = group.create_task(room.pods.refresh())
        await asyncio.sleep(0.4)
        api.put_pod(ONE)
        table = await asking

        assert ONE.uid in table.pods


async def test_those_who_ask_together_share_one_list():
    async with following(api := FakeApi()) as room:
        async with asyncio.TaskGroup() as group:
            for _ in range(10):
                group.create_task(room.pods.refresh())

        assert 2 == api.calls["list_pods"]


async def test_who_asks_during_a_list_waits_for_the_next_one():
    async with following(api := FakeApi()) as room:
        api.delay = 0.8
        async with asyncio.TaskGroup() as group:
            group.create_task(room.pods.refresh())
            await asyncio.sleep(0.4)
            api.put_pod(ONE)
            second = group.create_task(room.pods.refresh())

        assert ONE.uid in second.result().pods
        assert 3 == api.calls["list_pods"]


async def test_a_caller_that_gives_up_takes_nobody_with_it():
    async with following(api := FakeApi()) as room:
        api.delay = 0.8
        async with asyncio.TaskGroup() as group:
            patient = group.create_task(room.pods.refresh())
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.4):
                    await room.pods.refresh()

        assert patient.result().synced


async def test_a_list_that_hangs_holds_up_no_later_one():
    async with following(api := FakeApi()) as room:
        api.delay = 60
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.6):
                await room.pods.refresh()
        api.delay = 0
        async with asyncio.timeout(0.6):
            table = await room.pods.refresh()

        assert table.synced


@pytest.mark.parametrize(
    ("fault", "said"), [(ApiError("refused"), "refused"), (None, "out of time")], ids=str
)
async def test_a_list_that_fails_or_takes_too_long_is_told_to_who_asked(
    fault: ApiError | None, said: str
):
    async with following(api := FakeApi()) as room:
        if fault is not None:
            api.fail(fault, call="list_pods")
        else:
            api.delay = 60
        with pytest.raises(ApiError, match=said):
            await room.pods.refresh()
        api.delay = 0

        assert (await room.pods.refresh()).synced


async def test_a_refresh_during_an_outage_of_the_watch_leaves_the_table_stale():
    async with following(api := FakeApi()) as room:
        await asyncio.sleep(60)
        api.begin_outage()
        await asyncio.sleep(4)
        api.end_outage()
        api.put_pod(a_pod(uid=a_pod_uid(5), name="five"))
        table = await room.pods.refresh()

        assert table.stale
        assert a_pod_uid(5) in table.pods


async def test_however_many_ask_the_lists_of_a_minute_are_bounded_and_it_is_told_once_a_minute():
    api = FakeApi()
    refused = 0

    async with following(api) as room:
        before, began = api.calls["list_pods"], asyncio.get_running_loop().time()
        with capture_logs() as logs:
            for _ in range(600):
                try:
                    await room.pods.refresh()
                except ApiError:
                    refused += 1
                await asyncio.sleep(0.15)

        seconds = asyncio.get_running_loop().time() - began

    made = api.calls["list_pods"] - before
    assert 600 == made + refused
    assert LISTS <= made <= LISTS + seconds / LISTS_REFILL + 1
    assert 2 == [line["event"] for line in logs].count("pods.list_left_out")


async def test_however_many_unknown_pods_have_asked_the_locks_owner_has_its_list():
    async with following(FakeApi()) as room:
        for _ in range(LISTS):
            await room.pods.refresh()
        with pytest.raises(ApiError, match="too many"):
            await room.pods.refresh()

        for _ in range(LISTS):
            assert (await room.pods.refresh(is_owners=True)).synced
        with pytest.raises(ApiError, match="too many"):
            await room.pods.refresh(is_owners=True)

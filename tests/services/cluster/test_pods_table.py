"""The table of this node's pods follows the API server through everything that happens to it."""

import asyncio
import contextlib
import dataclasses
import datetime as dt
import re
from collections.abc import AsyncIterator

import msgspec
import pytest

from agent.cluster import NodeEvent, PodTable
from agent.errors import ApiError
from agent.kit.cell import Cell
from agent.kube.objects import KEEP, LISTS, LISTS_REFILL, PodWatch
from tests.builders import RESOURCE, a_container, a_pod, a_pod_uid
from tests.fakes.apiserver import FakeApi
from tests.fakes.chance import NoChance
from tests.fakes.clock import LoopClock
from tests.services.at_work import at_work

ONE = a_pod(uid=a_pod_uid(1), name="one")
TWO = a_pod(uid=a_pod_uid(2), name="two")


@dataclasses.dataclass
class PodsRoom:
    pods: PodWatch
    table: Cell[PodTable]
    clock: LoopClock
    noted: list[NodeEvent]

    @property
    def names(self) -> list[str]:
        return sorted(pod.name for pod in self.table.value.pods.values())

    @property
    def graves(self) -> list[str]:
        return sorted(grave.pod.name for grave in self.table.value.tombstones)


@contextlib.asynccontextmanager
async def following(api: FakeApi, *, settle: float = 0.1) -> AsyncIterator[PodsRoom]:
    table, clock, noted = Cell(PodTable()), LoopClock(), []
    pods = PodWatch(api, table, clock, NoChance(), Cell(RESOURCE), noted.append)
    async with at_work(pods.run):
        await asyncio.sleep(settle)
        yield PodsRoom(pods, table, clock, noted)


@contextlib.asynccontextmanager
async def following_one() -> AsyncIterator[tuple[FakeApi, PodsRoom]]:
    """The same, of a node with one pod."""
    api = FakeApi()
    api.put_pod(ONE)
    async with following(api) as room:
        yield api, room


async def test_pods_are_counted_by_another_name_without_asking_the_api_server():
    old, new = "nvidia.com/gpu", "example.com/vgpu"
    api, resource = FakeApi(), Cell(old)
    api.put_pod(msgspec.structs.replace(ONE, containers=(a_container(resource=old),)))
    api.put_pod(msgspec.structs.replace(TWO, containers=(a_container(resource=new),)))
    table: Cell[PodTable] = Cell(PodTable())
    pods = PodWatch(api, table, LoopClock(), NoChance(), resource)

    def counted() -> list[str]:
        return [pod.name for pod in table.value.pods.values() if pod.gpu_containers]

    async with at_work(pods.run):
        await asyncio.sleep(0.1)
        assert ["one"] == counted()
        resource.set(new)
        await asyncio.sleep(0.1)
        assert ["two"] == counted()
        api.put_pod(a_pod(uid=a_pod_uid(3), name="three", containers=(a_container(resource=new),)))
        api.delete_pod(TWO.namespace, "two")
        await asyncio.sleep(0.1)

    assert ["three"] == counted()
    assert [new] == [one.resource for one in table.value.tombstones[0].pod.gpu_containers]
    assert 1 == api.calls["list_pods"]


async def test_a_pod_deleted_before_the_clock_was_set_back_is_kept_no_longer_for_that():
    async with following_one() as (api, room):
        api.delete_pod(*ONE.key)
        await asyncio.sleep(0.1)
        room.clock.step(dt.timedelta(days=-1))
        api.put_pod(TWO)
        await asyncio.sleep(KEEP.total_seconds())
        assert ["one"] == room.graves
        api.edit_pod(*TWO.key, {"step": "1"})
        await asyncio.sleep(0.1)

        assert [] == room.graves


async def test_a_frame_older_than_a_look_does_not_take_back_what_the_look_saw():
    async with following_one() as (api, room):
        api.lag = 1.0
        api.edit_pod(*ONE.key, {"step": "1"})
        await asyncio.sleep(0.5)
        api.edit_pod(*ONE.key, {"step": "2"})

        assert ONE.uid == await room.pods.find_uid(*ONE.key)
        for _ in range(3):
            assert "2" == room.table.value.pods[ONE.uid].annotations["step"]
            await asyncio.sleep(0.6)


async def test_a_list_from_before_what_the_watch_showed_takes_nothing_back():
    class LateApi(FakeApi):
        async def list_pods(self):
            found = await super().list_pods()
            await asyncio.sleep(1)
            return found

    api = LateApi()
    async with following(api, settle=2) as room, asyncio.TaskGroup() as group:
        group.create_task(room.pods.refresh())
        await asyncio.sleep(0.5)
        api.put_pod(ONE)
        await asyncio.sleep(1)

        assert ["one"] == room.names


async def test_a_forgotten_position_is_listed_again_and_the_missing_are_buried():
    async with following_one() as (api, room):
        await asyncio.sleep(10)
        api.begin_outage()
        await asyncio.sleep(1)
        api.delete_pod(*ONE.key)
        api.put_pod(TWO)
        api.forget_history()
        api.end_outage()
        await asyncio.sleep(10)

        assert ["two"] == room.names
        assert ["one"] == room.graves
        assert not room.table.value.stale
        assert (("gone",), 1) in room.pods.restarts.items()


async def test_an_outage_is_shown_and_the_old_pods_stay():
    async with following_one() as (api, room):
        await asyncio.sleep(60)
        api.begin_outage()
        await asyncio.sleep(86_400)
        assert room.table.value.stale
        assert ["one"] == room.names
        api.put_pod(TWO)
        api.end_outage()
        await asyncio.sleep(60)

        assert not room.table.value.stale
        assert ["one", "two"] == room.names
        (noted,) = room.noted
        assert ("ApiServerAway", True) == (noted.reason, noted.warning)
        assert re.match(r"the API server could not be followed from .* to .* UTC: ", noted.text)

        api.begin_outage()
        await asyncio.sleep(5)
        api.end_outage()
        await asyncio.sleep(60)
        assert [noted] == room.noted

    assert api.calls["watch_pods"] + api.calls["list_pods"] <= 86_400 / 30 + 20


async def test_a_watch_that_breaks_at_the_same_place_again_and_again_gives_way_to_a_list():
    class Poisoned(FakeApi):
        async def watch_pods(self, resource_version):
            async for change in super().watch_pods(resource_version):
                yield change
                if resource_version == "2":
                    raise ApiError("a frame is longer than 8 MiB")

    api = Poisoned()
    api.put_pod(ONE)

    async with following(api) as room:
        api.put_pod(TWO)
        await asyncio.sleep(120)

        assert ["one", "two"] == room.names
        assert not room.table.value.stale

    assert 2 == api.calls["list_pods"]


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


async def test_those_who_ask_together_share_one_list():
    async with following(api := FakeApi()) as room:
        async with asyncio.TaskGroup() as group:
            for _ in range(10):
                group.create_task(room.pods.refresh())

        assert 2 == api.calls["list_pods"]


# One LIST on demand: as new as the question, shared by those who ask at the same time.


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


async def test_however_many_ask_the_lists_of_a_minute_are_bounded():
    api = FakeApi()
    refused = 0

    async with following(api) as room:
        before, began = api.calls["list_pods"], asyncio.get_running_loop().time()
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


async def test_a_list_that_a_defect_cut_off_is_an_error_of_the_api_server():
    class Defective(FakeApi):
        async def list_pods(self):
            if self.calls["list_pods"]:
                await asyncio.sleep(1)
            return await super().list_pods()

        async def watch_pods(self, resource_version):
            yield await anext(super().watch_pods(resource_version))
            await asyncio.sleep(0.5)
            raise ValueError("a defect")

    table = Cell(PodTable())
    pods = PodWatch(Defective(), table, LoopClock(), NoChance(), Cell(RESOURCE))

    async def follow():
        with pytest.raises(ExceptionGroup):
            await pods.run()

    async with asyncio.TaskGroup() as group:
        group.create_task(follow())
        await table.until(lambda table: table.synced)
        with pytest.raises(ApiError, match="given up"):
            await pods.refresh()

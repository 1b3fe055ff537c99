"""What the extender knows of its cluster: lists, watches, and what it writes on nodes."""

import asyncio
from pathlib import Path

import pytest

from agent.core.inventory.gpu import GpuUuid
from agent.core.inventory.share import Share
from agent.sandbox.api_errors import Json
from agent.sandbox.extender.service import ExtenderOptions
from agent.sandbox.extender.view import SeenPods
from agent.sandbox.scheduler.cluster import StoreCluster
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.usage import Reservation
from agent.sandbox.scheduler.verbs import HamiVerbs
from agent.sandbox.store import ObjectStore
from tests.fakes.chance import Seeded
from tests.fakes.clock import START, ManualClock
from tests.fakes.extender_rig import HANDSHAKE, QUICK, ExtenderRig, a_cluster, extended
from tests.fakes.scheduler_cluster import register_of

pytestmark = pytest.mark.looptime(False)

SICK = register_of("GPU-a", healthy=False)
ASKED = f"Requesting_{START:%Y-%m-%d %H:%M:%S}"


async def test_a_node_that_is_seen_first_is_asked_for_its_handshake(tmp_path: Path) -> None:
    async with extended(tmp_path) as rig:
        await rig.until_node(lambda: HANDSHAKE in rig.node())
        assert ASKED == rig.node()[HANDSHAKE]

        rig.create_node("n2")
        await rig.until_node(lambda: HANDSHAKE in rig.node("n2"))


async def test_a_handshake_that_is_gone_is_asked_for_in_the_next_interval(tmp_path: Path) -> None:
    async with extended(tmp_path, ExtenderOptions(QUICK, interval=0.05)) as rig:
        await rig.until_node(lambda: HANDSHAKE in rig.node())
        rig.annotate_node(handshake=None)

        await rig.until_node(lambda: rig.node().get(HANDSHAKE) == ASKED)


async def test_a_changed_annotation_is_used_at_once(tmp_path: Path) -> None:
    async with extended(tmp_path) as rig:
        rig.create_pod("p")
        await rig.filter("p")
        rig.annotate_node(register=SICK)

        refused = await rig.until_fits("p", fits=False)

        assert {"n1": "1/1 CardNotHealth"} == refused["FailedNodes"]


async def test_a_node_that_was_deleted_is_forgotten(tmp_path: Path) -> None:
    async with extended(tmp_path) as rig:
        rig.create_pod("p")
        await rig.filter("p")
        rig.store.delete("nodes", "", "n1")

        refused = await rig.until_fits("p", fits=False)

        assert {"n1": "node unregistered"} == refused["FailedNodes"]


async def test_a_deleted_pod_makes_room(tmp_path: Path) -> None:
    async with extended(tmp_path) as rig:
        await fill(rig)
        rig.store.delete("pods", "default", "held", grace=0)

        await rig.until_fits("p")


async def test_watches_that_end_are_opened_again(tmp_path: Path) -> None:
    async with extended(tmp_path) as rig:
        await fill(rig)
        rig.api.end_watches()
        rig.store.delete("pods", "default", "held", grace=0)

        await rig.until_fits("p")


async def test_what_went_while_the_history_was_lost_is_forgotten(tmp_path: Path) -> None:
    async with extended(tmp_path) as rig:
        await fill(rig)
        rig.create_node("n2")
        await rig.api.begin_outage()
        rig.store.delete("pods", "default", "held", grace=0)
        rig.store.delete("nodes", "", "n2")
        rig.store.forget_history()
        await rig.api.end_outage()

        await rig.until_fits("p")
        answer = await rig.filter("p", "n2")
        assert {"n2": "node unregistered"} == answer["FailedNodes"]


async def test_a_new_extender_counts_what_was_placed_before(tmp_path: Path) -> None:
    async with a_cluster(tmp_path) as rig:
        async with rig.extending():
            await fill(rig)
        async with rig.extending():
            answer = await rig.filter("p")

    assert {"n1": "1/1 CardInsufficientMemory"} == answer["FailedNodes"]


async def test_what_is_reserved_while_a_list_is_under_way_stays() -> None:
    hami = verbs()
    pods = SeenPods(hami)
    hami.usage.reserve("old", Reservation("n1", [[Share(GpuUuid("GPU-a"), 1, 0)]], 0))
    known = pods.known()
    hami.usage.reserve("new", Reservation("n1", [[Share(GpuUuid("GPU-a"), 1, 0)]], 0))

    await pods.replace([], known)

    assert {"new"} == hami.usage.uids()


async def test_a_watch_that_lags_moves_no_reservation() -> None:
    hami = verbs()
    hami.usage.reserve("u", Reservation("n2", [[Share(GpuUuid("GPU-b"), 5, 0)]], 0))
    metadata: Json = {"uid": "u", "namespace": "default", "name": "p"}
    pod: Json = {"metadata": metadata, "spec": {}, "status": {}}
    earlier = {"hami.io/vgpu-node": "n1", "hami.io/vgpu-devices-allocated": "GPU-a,NVIDIA,1,0:;"}

    hami.see_pod("MODIFIED", pod)
    hami.see_pod("MODIFIED", pod | {"metadata": metadata | {"annotations": earlier}})

    assert {} == hami.usage.loads("n1")
    assert [GpuUuid("GPU-b")] == list(hami.usage.loads("n2"))


def verbs() -> HamiVerbs:
    store = ObjectStore(ManualClock(), Seeded())
    return HamiVerbs(StoreCluster(store), ManualClock(), Seeded(), SchedulerSettings(), eager=True)


async def fill(rig: ExtenderRig) -> None:
    """Place `held`, so that `p` finds no room; the extender's watches know of it."""
    rig.create_pod("held", memory_mib=12000)
    await rig.filter("held")
    rig.create_pod("p", memory_mib=12000)
    await rig.until_fits("p", fits=False)
    async with asyncio.timeout(30):
        while rig.api.open_watches < 3:  # noqa: ASYNC110 -- the model tells nobody of its watches
            await asyncio.sleep(0)

"""A GPU that a container runtime would not find by its CDI name is not on offer."""

import asyncio

import msgspec
import pytest

from agent.cluster import NodeEvent
from agent.inventory import SPECIFICATIONS_DEADLINE, SPECIFICATIONS_PERIOD
from agent.ledger import Ledger
from agent.model import Condition, slice_id
from tests.app.front_node import BEFORE, SETTINGS, FrontNode, FrontPlaces, joined, running
from tests.app.test_black_hole import degraded
from tests.builders import a_gpu, a_health, a_row, a_share, a_uuid
from tests.fakes.driver import ScriptedDriver
from tests.services.at_work import at_work

G0, G1, G2 = ALL = [a_uuid(number) for number in range(3)]
SEEN = SPECIFICATIONS_PERIOD + 0.2
ROW = a_row(shares=(a_share(uuid=G1),), slice_ids=(slice_id(G1, 2),))
HOLDING = msgspec.structs.replace(BEFORE, ledger=Ledger((ROW,)))


def names(*gpus: str, kind: str = "nvidia.com/gpu") -> frozenset[str]:
    return frozenset(f"{kind}={gpu}" for gpu in gpus)


def places_of(*gpus: str) -> FrontPlaces:
    """A host whose specifications define these GPUs."""
    places = FrontPlaces()
    places.cdi.defined = names(*gpus)
    return places


def three(settings: str, places: FrontPlaces, state=BEFORE):
    driver = ScriptedDriver([a_gpu(index=number) for number in range(3)])
    return joined(driver, state, settings=f"{SETTINGS}allocation: {{{settings}}}\n", places=places)


def left_out(node: FrontNode) -> list[NodeEvent]:
    return [event for event in node.told if event.reason == "GpuLeftOut"]


@pytest.mark.parametrize(
    "strategy", ["cdi-cri", "cdi-annotations", "[envvar, cdi-cri]", "[cdi-annotations, cdi-cri]"]
)
async def test_of_three_gpus_the_one_that_nothing_defines_is_not_on_offer(strategy):
    async with running(three(f"deviceListStrategy: {strategy}", places_of(G0, G2))) as node:
        assert [G0, G2] == node.served
        assert ALL == list(node.groups), "its slices stay listed: the scheduler would keep it"
        assert {G0: (0, True), G1: (1, False), G2: (2, True)} == node.registered
        (event,) = left_out(node)
        assert f"GPU {G1} is not shared: no single CDI specification" in event.text
        assert "nvidia-ctk cdi generate" in event.text
        assert ["cdi"] == degraded(node)


async def test_what_is_said_of_its_health_is_true():
    async with running(three("deviceListStrategy: cdi-cri", places_of())) as node:
        await asyncio.sleep(60)

        assert [] == node.served
        for uuid in ALL:
            shared = node.shared(uuid)
            assert (Condition.OK, True) == (shared.health.condition, shared.health.serving)
            assert "no single CDI specification" in shared.plight
        assert ["GpuLeftOut"] * 3 == node.reasons


async def test_the_first_list_waits_for_the_specifications():
    """So that no slice is on offer for a moment that no container could use."""
    places = places_of(G1)
    places.cdi.slow = 0.5
    front = three("deviceListStrategy: cdi-cri", places)
    lists = []

    async def follow() -> None:
        async for listed in front.facts.slices.follow():
            lists.extend([[group.uuid for group in listed.groups if group.healthy]])

    async with at_work(follow), running(front):
        await asyncio.sleep(30)

    assert [[], [G1]] == lists, "the first is that of a cell without a list"


async def test_a_gpu_is_on_offer_soon_after_it_is_defined_and_no_longer_when_it_is_not():
    places = places_of()
    async with running(three("deviceListStrategy: cdi-annotations", places)) as node:
        for defined in ((G0,), (G0, G1), (G1,), (), ALL):
            places.cdi.defined = names(*defined)
            await asyncio.sleep(SEEN)

            assert list(defined) == node.served
        assert [] == degraded(node)


@pytest.mark.parametrize("strategy", ["envvar", "volume-mounts", "[envvar, volume-mounts]"])
async def test_without_a_cdi_strategy_nobody_looks(strategy):
    places = places_of()
    async with running(three(f"deviceListStrategy: {strategy}", places)) as node:
        await asyncio.sleep(60)

        assert ALL == node.served
        assert [] == places.cdi.asked


async def test_the_kind_and_the_directories_of_the_settings_count():
    places = places_of()
    places.cdi.defined = names(G1, kind="example.com/vgpu")
    settings = "deviceListStrategy: cdi-cri, cdiKind: example.com/vgpu, cdiSpecDirs: [/a, /b]"
    async with running(three(settings, places)) as node:
        assert [G1] == node.served
        assert {("/a", "/b")} == set(places.cdi.asked)


async def test_a_feature_whose_name_is_not_defined_takes_all():
    places = places_of(*ALL)
    async with running(three("deviceListStrategy: cdi-cri, gds: true", places)) as node:
        assert [] == node.served
        places.cdi.defined = names(*ALL) | {"nvidia.com/gds=all"}
        await asyncio.sleep(SEEN)

        assert ALL == node.served


@pytest.mark.parametrize("how", ["unreadable", "hanging"])
async def test_directories_that_cannot_be_read_say_nothing(how):
    places = places_of()
    if how == "unreadable":
        places.cdi.defined = None
    places.cdi.hanging = how == "hanging"
    async with running(three("deviceListStrategy: cdi-cri", places)) as node:
        await asyncio.sleep(SPECIFICATIONS_DEADLINE)
        assert ALL == node.served
        places.cdi.hanging = False
        places.cdi.defined = names(G0)
        await asyncio.sleep(2 * SEEN)

        assert [G0] == node.served


async def test_while_they_are_read_again_what_was_read_before_counts():
    places = places_of(G0)
    async with running(three("deviceListStrategy: cdi-cri", places)) as node:
        places.cdi.hanging = True
        places.cdi.was_asked.clear()
        await places.cdi.was_asked.wait()
        await node.front.state.commit(lambda ledger: ledger.put(ROW))
        await asyncio.sleep(0.1)

        assert [G0] == node.served


async def test_a_change_of_the_strategy_is_obeyed_at_once():
    places = places_of(G0)
    async with running(three("deviceListStrategy: envvar", places)) as node:
        edits = node.front.facts.edits
        assert ALL == node.served
        for strategies, served in ((("cdi-cri",), [G0]), (("envvar",), ALL)):
            edits.set(msgspec.structs.replace(edits.value, device_list_strategies=strategies))
            await asyncio.sleep(0.1)

            assert served == node.served


async def test_who_holds_a_slice_of_it_keeps_it_and_is_told_nothing():
    places = places_of(*ALL)
    async with running(three("deviceListStrategy: cdi-cri", places, HOLDING)) as node:
        before = node.groups[G1].ids
        places.cdi.defined = names(G0, G2)
        await asyncio.sleep(SEEN)

        assert [G0, G2] == node.served
        assert before == node.groups[G1].ids
        assert (ROW,) == node.front.state.ledger.value.rows
        assert ["GpuLeftOut"] == node.reasons
        places.cdi.defined = names(*ALL)
        await asyncio.sleep(SEEN)
        assert ["GpuLeftOut", "GpuInventoryChanged"] == node.reasons
        assert f"shared now: GPU 1 ({G1})" == node.told[-1].text


async def test_a_bad_gpu_that_is_also_undefined_is_called_bad():
    driver = ScriptedDriver([a_gpu(index=0)])
    ill = a_health(condition=Condition.BAD, text="XID 48")
    state = msgspec.structs.replace(BEFORE, health={G0: ill})
    settings = f"{SETTINGS}allocation: {{deviceListStrategy: cdi-cri}}\n"
    async with running(joined(driver, state, settings=settings, places=places_of())) as node:
        assert [] == node.served
        assert "is bad" in node.shared(G0).plight


async def test_a_gpu_that_the_settings_leave_out_is_not_missed():
    settings = f"deviceListStrategy: cdi-cri}}\nsharing: {{filterUUIDs: [{G1}]"
    async with running(three(settings, places_of(G0, G2))) as node:
        assert [G0, G2] == node.served == list(node.groups)
        assert [] == node.reasons == degraded(node)

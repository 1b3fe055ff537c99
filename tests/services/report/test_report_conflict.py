"""Another writer of the register annotation is put right a few times, then left and told."""

import asyncio
import json

from agent.cluster import REGISTER
from agent.report import CONFLICT, ReportState
from tests.builders import an_inventory
from tests.services.report.reporting import Reporting, reported

THEIRS = '[{"id":"GPU-theirs","count":1}]'


async def fight(room: Reporting, rounds: int) -> None:
    """The other writer comes back a second after each of our writes."""
    for count in range(rounds):
        room.api.edit_node({REGISTER: THEIRS.replace("1", str(count))})
        await asyncio.sleep(1)


async def test_five_rounds_are_put_right_without_a_word():
    async with reported() as room:
        await fight(room, 5)

        assert room.told(an_inventory())
        assert [] == room.events


async def test_the_sixth_round_ends_in_a_truce_that_is_told_once():
    async with reported() as room:
        await fight(room, 6)
        before = room.api.writes
        await fight(room, 100)

        assert before == room.api.writes
        assert ["ReportConflict"] == [event.reason for event in room.events]
        assert ReportState(reported=False, reason=CONFLICT) == room.state.value
        assert REGISTER in CONFLICT


async def test_a_truce_is_not_over_because_the_other_writer_once_wrote_our_text():
    async with reported() as room:
        ours = room.api.node.annotations[REGISTER]
        await fight(room, 6)
        room.api.edit_node({REGISTER: ours})
        await asyncio.sleep(1)
        await fight(room, 1)

        assert ReportState(reported=False, reason=CONFLICT) == room.state.value
        assert ["ReportConflict"] == [event.reason for event in room.events]


async def test_the_truce_ends_after_ten_minutes():
    async with reported() as room:
        await fight(room, 6)
        await asyncio.sleep(590)
        assert not room.told(an_inventory())
        await asyncio.sleep(10)

        assert room.told(an_inventory())
        assert room.state.value.reported


async def test_the_truce_ends_at_once_when_the_inventory_changes():
    loop = asyncio.get_running_loop()

    async with reported() as room:
        await fight(room, 6)
        began = loop.time()
        room.inventory.set(an_inventory(count=3, generation=2))
        await room.settled()

        assert began == loop.time()
        assert room.told(an_inventory(count=3))


async def test_after_a_truce_the_rounds_are_counted_anew():
    async with reported() as room:
        await fight(room, 6)
        room.inventory.set(an_inventory(count=3, generation=2))
        await room.settled()
        await fight(room, 5)

        assert room.told(an_inventory(count=3))
        assert 1 == len(room.events)


async def test_rare_edits_are_no_fight():
    async with reported() as room:
        for _ in range(20):
            room.api.edit_node({REGISTER: THEIRS})
            await asyncio.sleep(150)

        assert room.told(an_inventory())
        assert [] == room.events


async def test_a_node_that_is_created_again_and_again_is_no_fight():
    async with reported() as room:
        for _ in range(10):
            room.api.delete_node()
            room.api.create_node()
            await room.settled()

        assert [] == room.events
        assert (("node-created",), 10) in room.reporter.writes.items()


async def test_the_event_says_how_it_starts_again():
    async with reported() as room:
        await fight(room, 6)

        (event,) = room.events
        assert event.warning
        assert event.text == room.state.value.reason
        assert "stop the other device plugin" in event.text
        assert "the next try is in 10 minutes or when the GPUs change" in event.text


async def test_two_agents_on_one_node_do_not_fight_over_the_same_inventory():
    """One lists the GPUs in another order, as HAMi's plugin does at each scan."""
    async with reported() as room:
        text = room.says(REGISTER) or ""
        for _ in range(50):
            first, second = json.loads(room.says(REGISTER) or text)
            turned = [{**second, "devicepairscore": {}}, {**first, "devicepairscore": {}}]
            room.api.edit_node({REGISTER: json.dumps(turned)})
            await asyncio.sleep(30)

        assert 1 == room.api.writes
        assert [] == room.events

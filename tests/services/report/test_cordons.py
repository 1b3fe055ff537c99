"""A cordon that begins or ends is an Event, and so a change of the journal, whoever wrote it."""

import asyncio

from agent.cluster import CORDON, NodeEvent, NodeView
from agent.kit.cell import Cell
from agent.model import NO_INDEX
from agent.report import CordonEvents
from tests.builders import a_gpu, a_shared_gpu, a_uuid, an_inventory

G0, G1 = a_uuid(0), a_uuid(1)
GPUS = an_inventory(count=2)


def a_view(cordon: str | None) -> NodeView:
    return NodeView("n", "u", "1", {} if cordon is None else {CORDON: cordon})


async def said(*views: NodeView | None, inventory=GPUS) -> list[tuple[str, str]]:
    """Reason and text of the Events while the Node is seen like this, one view after another."""
    node: Cell[NodeView | None] = Cell(None)
    events: list[NodeEvent] = []
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(CordonEvents(node, Cell(inventory), events.append).run())
        for view in views:
            await asyncio.sleep(0)
            node.set(view)
            await asyncio.sleep(0.01)
        node.close()
    assert not any(event.warning for event in events)
    return [(event.reason, event.text) for event in events]


async def test_a_cordon_and_its_end_are_events_that_name_the_gpu():
    begun = (
        "GpuCordoned",
        f"GPU 1 ({G1}) is cordoned: HAMi's scheduler (2.10 and later) places no new pods",
    )
    ended = ("GpuUncordoned", f"GPU 1 ({G1}) is no longer cordoned")

    assert [begun, ended] == await said(a_view(None), a_view(G1), a_view(None))


async def test_what_was_cordoned_before_the_start_is_not_news():
    assert [] == await said(a_view(f"{G0},{G1}"))
    assert ["GpuUncordoned"] == [reason for reason, _ in await said(a_view(G0), a_view(""))]


async def test_a_node_that_is_away_for_a_while_is_no_change():
    assert [] == await said(a_view(G0), None, a_view(G0))


async def test_words_that_name_no_gpu_of_this_node_make_no_event():
    assert [] == await said(a_view(None), a_view("GPU-x,y"))


async def test_a_gpu_without_an_index_is_named_by_its_uuid():
    unplaced = an_inventory(gpus=[a_shared_gpu(gpu=a_gpu(index=NO_INDEX, uuid=G0))])

    ((_, text),) = await said(a_view(G0), a_view(None), inventory=unplaced)
    assert f"GPU {G0} is no longer cordoned" == text

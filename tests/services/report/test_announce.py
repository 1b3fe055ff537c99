"""Events about the Node: in order, best effort, bounded."""

import asyncio
from contextlib import AbstractAsyncContextManager
from functools import partial

import msgspec
import pytest
import structlog

from agent.cluster import CORDON, NodeEvent, NodeView
from agent.errors import ApiConflict, ApiError, ApiForbidden, ApiThrottled
from agent.kit.cell import Cell
from agent.report import LIMIT, NodeEventQueue, follow_cordons
from tests.builders import a_uuid, an_inventory
from tests.fakes.apiserver import EventSink
from tests.services.at_work import at_work


def event(text: str, reason: str = "GpuUnhealthy") -> NodeEvent:
    return NodeEvent(reason, text, warning=True)


def announcing(api: EventSink, notices: NodeEventQueue) -> AbstractAsyncContextManager[None]:
    return at_work(partial(notices.post_all, api.post_event))


@pytest.mark.parametrize(
    ("answers", "texts", "posted"),
    [
        ([], "ab", {1: ["a", "b"]}),
        ([ApiError("down")], "ab", {4.9: [], 0.2: ["a", "b"]}),
        ([ApiForbidden("no", status=403)], "ab", {1: ["b"]}),
        ([ApiConflict("no", status=409)], "ab", {1: ["b"]}),
        ([ApiThrottled("busy", status=429)], "ab", {4.9: [], 0.2: ["a", "b"]}),
        ([], "aaa", {1: ["a"]}),
    ],
    ids=["in order", "again", "forbidden", "a conflict", "throttled", "not twice in a row"],
)
async def test_events_are_posted(answers, texts, posted) -> None:
    api, notices = EventSink(*answers), NodeEventQueue()
    first, *others = texts
    notices.say(event(first))
    async with announcing(api, notices):
        for text in others:
            notices.say(event(text))
        for seconds, expected in posted.items():
            await asyncio.sleep(seconds)
            assert [one.text for one in api.posted] == expected


async def test_a_namespace_that_takes_no_events_holds_up_none_of_the_node() -> None:
    posted, notices = [], NodeEventQueue()

    async def post(one: NodeEvent) -> None:
        if one.pod:
            raise ApiError("failed calling webhook", status=500)
        posted.append(one.text)

    notices.say(NodeEvent("AllocationRefused", "no", warning=True, namespace="a", pod="p"))
    async with at_work(partial(notices.post_all, post)):
        notices.say(event("b"))
        await asyncio.sleep(6)

    assert ["b"] == posted
    assert ["no"] == [one.text for one in notices.waiting]


async def test_without_an_api_server_events_are_said_in_the_log() -> None:
    notices = NodeEventQueue()
    with structlog.testing.capture_logs() as said:
        async with at_work(partial(notices.post_all, None)):
            notices.say(event("a"))
            notices.say(msgspec.structs.replace(event("b"), warning=False))
            await asyncio.sleep(1)

    assert [("a", "warning"), ("b", "info")] == [(one["text"], one["log_level"]) for one in said]


async def test_thousands_of_events_that_are_refused_are_gone_soon_with_one_line_a_minute() -> None:
    api, notices = EventSink(*[ApiForbidden("may not", status=403)] * 2000), NodeEventQueue()
    with structlog.testing.capture_logs() as said:
        async with announcing(api, notices):
            for number in range(200):
                notices.say(event(str(number)))
            await asyncio.sleep(59)
            notices.say(event("late"))
            await asyncio.sleep(2)
            notices.say(event("later"))
            await asyncio.sleep(1)

    assert not notices.waiting
    lines = [one["others"] for one in said if one["event"] == "event.refused"]
    assert [0, 200] == lines


async def test_an_event_that_is_dropped_while_it_is_posted_takes_no_other_with_it() -> None:
    posted: list[str] = []

    async def post(one: NodeEvent) -> None:
        await asyncio.sleep(1)
        posted.append(one.text)

    notices = NodeEventQueue()
    notices.say(event("0"))
    async with at_work(partial(notices.post_all, post)):
        await asyncio.sleep(0.5)
        for number in range(1, LIMIT + 1):
            notices.say(event(str(number)))
        await asyncio.sleep(LIMIT + 1)

    assert [str(number) for number in range(LIMIT + 1)] == posted


# A cordon that begins or ends is an Event, and so a change of the journal, whoever wrote it.

G0, G1 = a_uuid(0), a_uuid(1)
GPUS = an_inventory(count=2)


def a_view(cordon: str | None) -> NodeView:
    return NodeView("n", "u", "1", {} if cordon is None else {CORDON: cordon})


async def said(*views: NodeView | None, inventory=GPUS) -> list[tuple[str, str]]:
    """Reason and text of the Events while the Node is seen like this, one view after another."""
    node: Cell[NodeView | None] = Cell(None)
    events: list[NodeEvent] = []
    async with at_work(partial(follow_cordons, node, Cell(inventory), events.append)):
        for view in views:
            await asyncio.sleep(0)
            node.set(view)
            await asyncio.sleep(0.01)
    assert not any(event.warning for event in events)
    return [(event.reason, event.text) for event in events]


async def test_a_cordon_and_its_end_are_events_that_name_the_gpu():
    begun = (
        "GpuCordoned",
        f"GPU 1 ({G1}) is cordoned: HAMi's scheduler (2.10 and later) places no new pods",
    )
    ended = ("GpuUncordoned", f"GPU 1 ({G1}) is no longer cordoned")

    assert [begun, ended] == await said(a_view(None), a_view(G1), a_view(None))


@pytest.mark.parametrize(
    ("views", "reasons"),
    [
        ([a_view(f"{G0},{G1}")], []),
        ([a_view(G0), a_view("")], ["GpuUncordoned"]),
        ([a_view(G0), None, a_view(G0)], []),
        ([a_view(None), a_view("GPU-x,y")], []),
        ([a_view(G0), a_view(f"{G0},{G1}")], ["GpuCordoned"]),
    ],
    ids=[
        "before the start",
        "its end",
        "a node that is away for a while",
        "no GPU of this node",
        "another one beside it",
    ],
)
async def test_what_was_known_before_or_names_no_gpu_is_no_event(views, reasons):
    assert reasons == [reason for reason, _ in await said(*views)]

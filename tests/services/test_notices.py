"""Events about the Node: in order, best effort, bounded."""

import asyncio
from functools import partial

import msgspec
import pytest
import structlog

from agent.cluster import CORDON, NodeCondition, NodeEvent, NodeView, Phase, PodTable
from agent.errors import ApiConflict, ApiError, ApiForbidden, ApiThrottled
from agent.kit.cell import Cell
from agent.ledger import Ledger
from agent.model import Condition, Inventory
from agent.report import LIMIT, NodeEventQueue, follow_cordons, follow_gpus, keep_condition
from tests.builders import (
    NOON,
    a_gpu,
    a_health,
    a_pod,
    a_pod_uid,
    a_row,
    a_share,
    a_shared_gpu,
    a_uuid,
    an_inventory,
)
from tests.fakes.apiserver import EventSink
from tests.fakes.clock import LoopClock
from tests.services.at_work import at_work


def event(text: str, reason: str = "GpuUnhealthy") -> NodeEvent:
    return NodeEvent(reason, text, warning=True)


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
    async with at_work(partial(notices.post_all, api.post_event)):
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
        async with at_work(partial(notices.post_all, api.post_event)):
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


# GPUs that change are told of once, and the Node's condition is written when it changes.


WELL = a_health()
BAD = a_health(condition=Condition.BAD, text="XID 48 [H-048]")


def holding(*healths, generation: int = 1) -> Inventory:
    gpus = [a_shared_gpu(gpu=a_gpu(index=n), health=one) for n, one in enumerate(healths)]
    return an_inventory(gpus=gpus, generation=generation)


A_NODE = NodeView("node-1", "the-uid", "1")


def keeping(written: list[NodeCondition], inventory: Cell[Inventory], node: Cell[NodeView | None]):
    """What keeps the Node's condition."""

    async def set_condition(condition: NodeCondition) -> None:
        written.append(condition)

    return at_work(partial(keep_condition, set_condition, inventory, node, LoopClock()))


async def test_a_node_that_is_created_again_gets_the_condition_again_and_a_changed_one_does_not():
    written, node = [], Cell[NodeView | None](None)
    async with keeping(written, Cell(holding(BAD)), node):
        changed = msgspec.structs.replace(A_NODE, resource_version="2")
        again = msgspec.structs.replace(A_NODE, uid="another")
        for seen, count in (
            (None, 0),
            (A_NODE, 1),
            (changed, 1),
            (None, 1),
            (changed, 1),
            (again, 2),
        ):
            node.set(seen)
            await asyncio.sleep(0.01)
            assert count == len(written)

    assert [True, True] == [one.status for one in written]


async def test_what_the_condition_says_may_change_and_it_is_so_since_it_was_so_first():
    written, inventory = [], Cell(Inventory())
    gone = a_shared_gpu(gpu=a_gpu(index=1), present=False, there=False)
    async with keeping(written, inventory, Cell(A_NODE)):
        inventory.set(an_inventory(gpus=(a_shared_gpu(), gone)))
        await asyncio.sleep(60)
        ill = a_shared_gpu(health=a_health(condition=Condition.BAD, since=NOON))
        inventory.set(an_inventory(gpus=(ill, gone), generation=2))
        await asyncio.sleep(60)

    first, second = written
    assert first.since == second.since
    assert first.message != second.message


@pytest.mark.parametrize(
    ("pods", "told"),
    [
        (None, ["one", "two"]),
        ([a_pod(uid=a_pod_uid(1), phase=Phase.FAILED), a_pod(uid=a_pod_uid(2))], ["two"]),
        ([a_pod(uid=a_pod_uid(1))], ["one"]),
    ],
    ids=["not listed yet", "one has ended", "one is gone"],
)
async def test_no_pod_that_is_gone_or_has_ended_is_told_about_its_gpu(pods, told):
    said: list[NodeEvent] = []
    shares = (a_share(uuid=a_uuid(0)),)
    rows = [
        a_row(pod_uid=a_pod_uid(number), pod=name, shares=shares)
        for number, name in ((1, "one"), (2, "two"))
    ]
    table = PodTable() if pods is None else PodTable({pod.uid: pod for pod in pods}, synced=True)
    inventory, ledger = Cell(holding(WELL)), Cell(Ledger(tuple(rows)))
    telling = partial(follow_gpus, inventory, ledger, Cell(table), Cell(()), said.append)
    async with at_work(telling):
        await asyncio.sleep(0.01)
        inventory.set(holding(BAD, generation=2))
        await asyncio.sleep(0.01)

    assert told == [event.pod for event in said if event.reason == "GpuDegradedForPod"]

"""Events about the Node: in order, best effort, bounded."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import structlog

from agent.cluster import NodeEvent
from agent.errors import ApiError, ApiForbidden
from agent.report import LIMIT, Announcer, NodeEventQueue, NoticeLog


class EventsApi:
    """Takes Events; `answers` are errors for the next ones."""

    def __init__(self, *answers: ApiError) -> None:
        self.answers = list(answers)
        self.posted: list[str] = []

    async def post_event(self, event: NodeEvent) -> None:
        if self.answers:
            raise self.answers.pop(0)
        self.posted.append(event.text)


def event(text: str, reason: str = "GpuUnhealthy") -> NodeEvent:
    return NodeEvent(reason, text, warning=True)


@asynccontextmanager
async def announcing(api: EventsApi, notices: NodeEventQueue) -> AsyncIterator[None]:
    announcer = Announcer(api, notices)  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as group:
        task = group.create_task(announcer.run())
        yield
        task.cancel()


async def test_events_are_posted_in_order() -> None:
    api, notices = EventsApi(), NodeEventQueue()
    notices.say(event("a"))
    async with announcing(api, notices):
        notices.say(event("b"))
        await asyncio.sleep(1)

    assert api.posted == ["a", "b"]
    assert notices.unposted.items() == ()  # whoever posts counts them


async def test_an_event_that_failed_is_posted_again_before_the_next() -> None:
    api, notices = EventsApi(ApiError("down")), NodeEventQueue()
    notices.say(event("a"))
    notices.say(event("b"))
    async with announcing(api, notices):
        await asyncio.sleep(4.9)
        assert api.posted == []
        await asyncio.sleep(0.2)

    assert api.posted == ["a", "b"]


async def test_an_event_that_the_server_refuses_is_dropped() -> None:
    api, notices = EventsApi(ApiForbidden("no", status=403)), NodeEventQueue()
    notices.say(event("a"))
    notices.say(event("b"))
    async with announcing(api, notices):
        await asyncio.sleep(1)

    assert api.posted == ["b"]


async def test_without_an_api_server_events_are_said_in_the_log_and_counted() -> None:
    notices = NodeEventQueue()
    with structlog.testing.capture_logs() as said:
        async with asyncio.TaskGroup() as group:
            logging = group.create_task(NoticeLog(notices).run())
            notices.say(event("a"))
            notices.say(msgspec.structs.replace(event("b"), warning=False))
            await asyncio.sleep(1)
            logging.cancel()

    assert [("a", "warning"), ("b", "info")] == [(one["text"], one["log_level"]) for one in said]
    assert ((("GpuUnhealthy", "logged"), 2),) == notices.unposted.items()


async def test_the_same_thing_is_not_said_twice_in_a_row() -> None:
    api, notices = EventsApi(), NodeEventQueue()
    for _ in range(3):
        notices.say(event("a"))
    async with announcing(api, notices):
        await asyncio.sleep(1)

    assert api.posted == ["a"]


async def test_a_full_line_drops_the_oldest() -> None:
    api, notices = EventsApi(), NodeEventQueue()
    for number in range(LIMIT + 2):
        notices.say(event(str(number)))
    async with announcing(api, notices):
        await asyncio.sleep(1)

    assert api.posted[0] == "2"
    assert (("GpuUnhealthy", "dropped"), 2) in notices.unposted.items()

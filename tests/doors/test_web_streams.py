"""The streams of the read API: how a reader hears of changes, and when a stream ends."""

import asyncio
import contextlib
import itertools
import json

import aiohttp
import msgspec
import pytest

from agent.core.node.readiness import Check
from agent.web import api, server
from agent.web.api import ReadApi
from agent.web.policy import ReaderPolicy
from agent.web.readers import Readers
from agent.web.server import Listeners, WebServer
from tests.doors.api_facts import ENTRY, facts, reading

pytestmark = pytest.mark.looptime(False)


async def events(answer):
    """The ids and data of a stream as they come."""
    found = {}
    async for line in answer.content:
        name, _, value = line.decode().strip().partition(": ")
        if name:
            found[name] = value
        elif "data" in found:
            yield found["id"], json.loads(found["data"])["data"]
            found = {}


async def test_a_stream_sends_each_change_once_and_ends_by_itself(monkeypatch):
    monkeypatch.setattr(api, "LOOK", 0.01)
    monkeypatch.setattr(api, "KEPT", 0.0)
    full = facts(checks=(Check("state", ok=False, text="full"),))
    # Where nothing can be said any more a stream is over, however slow all looks before were.
    looks = itertools.chain([facts(), facts(), full, full, full, None], itertools.repeat(full))
    async with (
        reading(lambda: next(looks)) as client,
        client.get("/api/v1/node?watch=1") as answer,
    ):
        assert "text/event-stream" == answer.content_type
        (first, node), (second, later) = [event async for event in events(answer)]
        assert (True, False) == (node["ready"], later["ready"])

        monkeypatch.setattr(api, "STREAM_SECONDS", 0.1)
        again = {"Last-Event-ID": second}
        async with client.get("/api/v1/node?watch=1", headers=again) as resumed:
            assert [] == [event async for event in events(resumed)]
    assert first != second


async def test_a_reader_who_wants_a_signal_alone_gets_no_more(monkeypatch):
    monkeypatch.setattr(api, "LOOK", 0.01)
    monkeypatch.setattr(api, "STREAM_SECONDS", 0.05)
    async with (
        reading(facts) as client,
        client.get("/api/v1/status?watch=etag") as answer,
    ):
        lines = (await answer.text()).splitlines()

    (etag,) = (line.removeprefix("id: ") for line in lines if line.startswith("id: "))
    assert [f"data: {etag}"] == [line for line in lines if line.startswith("data: ")]


async def test_there_are_never_more_streams_than_allowed(monkeypatch):
    monkeypatch.setattr(api, "STREAMS", 2)
    async with reading(facts) as client, contextlib.AsyncExitStack() as stack:
        for _ in range(2):
            answer = await stack.enter_async_context(client.get("/api/v1/node?watch=1"))
            assert 200 == answer.status
        async with client.get("/api/v1/node?watch=1") as answer:
            assert (503, True) == (answer.status, "2 streams" in await answer.text())
        async with client.get("/api/v1/node") as answer:
            assert 200 == answer.status


async def test_a_stream_whose_reader_left_is_given_up(monkeypatch):
    monkeypatch.setattr(api, "STREAMS", 1)
    monkeypatch.setattr(api, "LOOK", 0.01)
    monkeypatch.setattr(api, "KEPT", 0.0)
    ages = iter(range(10_000))
    changing = lambda: facts(refusals=(msgspec.structs.replace(ENTRY, pod=f"p{next(ages)}"),))  # noqa: E731
    async with reading(changing) as client:
        async with client.get("/api/v1/refusals?watch=1") as answer:
            await anext(events(answer))
        async with asyncio.timeout(4):
            while True:
                async with client.get("/api/v1/refusals?watch=1") as answer:
                    if answer.status == 200:
                        break


async def test_a_reader_who_left_makes_room_although_nothing_changes(monkeypatch):
    monkeypatch.setattr(api, "STREAMS", 1)
    monkeypatch.setattr(api, "LOOK", 0.01)
    async with reading(facts) as client:
        async with client.get("/api/v1/node?watch=1") as answer:
            await anext(events(answer))
        async with asyncio.timeout(4):
            while True:
                async with client.get("/api/v1/node?watch=1") as answer:
                    if answer.status == 200:
                        break


async def test_an_open_stream_does_not_keep_the_server_from_its_end(monkeypatch):
    monkeypatch.setattr(server, "STOP_TIMEOUT", 60.0)
    async with aiohttp.ClientSession() as client, asyncio.timeout(4):
        listeners = Listeners("127.0.0.1", 0)
        serving = WebServer(listeners, {}, api=ReadApi(facts, Readers(ReaderPolicy.LOCAL)))
        async with serving:
            url = f"http://127.0.0.1:{serving.port}/api/v1/node?watch=1"
            answer = await client.get(url)
            stream = events(answer)
            await anext(stream)
        assert [] == [event async for event in stream]


async def test_a_stream_that_fails_is_cut_and_holds_no_second_answer(monkeypatch):
    monkeypatch.setattr(api, "LOOK", 0.01)
    monkeypatch.setattr(api, "KEPT", 0.0)
    looks = iter([facts(), facts()])
    async with (
        reading(lambda: next(looks)) as client,
        client.get("/api/v1/node?watch=1") as answer,
    ):
        received = b""
        with contextlib.suppress(aiohttp.ClientPayloadError):
            async for part in answer.content.iter_any():
                received += part

    assert (True, False) == (b"node-1" in received, b"HTTP/1.1" in received)

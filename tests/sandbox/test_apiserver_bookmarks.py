"""Bookmarks of a quiet watch, on virtual time: a minute of silence costs nothing."""

import asyncio

from agent.sandbox.api_errors import Json
from tests.fakes.api_client import connected

WATCH = "/api/v1/pods?watch=true&fieldSelector=spec.nodeName%3Dnode-a"


def mark(stored: Json) -> Json:
    stored["metadata"]["labels"] = {"a": "b"}
    return stored


async def test_a_quiet_watch_gets_a_bookmark_of_what_passed_it_by() -> None:
    async with connected() as (server, client):
        path = f"{WATCH}&resourceVersion={server.store.version}&allowWatchBookmarks=1"
        async with client.watch(path) as frames:
            server.store.update("nodes", "", "node-b", mark)
            bookmark = await anext(frames)

        assert "BOOKMARK" == bookmark["type"]
        version = bookmark["object"]["metadata"]["resourceVersion"]
        assert str(server.store.version) == version


async def test_a_watch_gets_a_bookmark_two_seconds_before_its_end() -> None:
    async with connected() as (server, client):
        query = f"resourceVersion={server.store.version}&timeoutSeconds=45&allowWatchBookmarks=1"
        async with client.watch(f"{WATCH}&{query}") as frames:
            server.store.update("nodes", "", "node-b", mark)
            before = asyncio.get_running_loop().time()
            seen = [await anext(frames)]
            assert 40 <= asyncio.get_running_loop().time() - before < 44
            seen += [frame async for frame in frames]

        assert ["BOOKMARK"] == [frame["type"] for frame in seen]


async def test_the_time_of_a_watch_is_the_clients_to_choose() -> None:
    async with connected() as (server, client):
        path = f"{WATCH}&resourceVersion={server.store.version}&timeoutSeconds=45"
        before = asyncio.get_running_loop().time()
        async with client.watch(path) as frames:
            assert [] == [frame async for frame in frames]

        assert 45 <= asyncio.get_running_loop().time() - before < 60

"""Watches and faults of the API server model, over real HTTP."""

import aiohttp
import pytest

from agent.sandbox.api_errors import Json
from tests.fakes.api_client import NODE_A, connected

pytestmark = pytest.mark.looptime(False)

WATCH = "/api/v1/pods?watch=true&fieldSelector=spec.nodeName%3Dnode-a"


def mark(stored: Json) -> Json:
    count = int((stored["metadata"].get("annotations") or {"n": "-1"})["n"])
    stored["metadata"]["annotations"] = {"n": str(count + 1)}
    return stored


async def test_a_watch_without_a_version_begins_with_what_is_there() -> None:
    async with connected("t-node") as (server, client), client.watch(WATCH) as frames:
        first = await anext(frames)
        server.store.update("pods", "default", "pa", mark)
        second = await anext(frames)

        assert ["ADDED", "MODIFIED"] == [first["type"], second["type"]]
        assert {"n": "0"} == second["object"]["metadata"]["annotations"]
        assert 1 == server.api.journal.watches("system:node:node-a")


async def test_a_watch_continues_from_a_version_and_sees_only_its_selection() -> None:
    async with connected() as (server, client):
        since = server.store.version
        server.store.update("pods", "default", "pb", mark)
        server.store.bind("default", "free", "node-a")
        server.store.delete("pods", "default", "pa", grace=0)

        async with client.watch(f"{WATCH}&resourceVersion={since}") as frames:
            seen = [await anext(frames), await anext(frames), await anext(frames)]

        told = [(frame["type"], frame["object"]["metadata"]["name"]) for frame in seen]
        assert [("ADDED", "free"), ("MODIFIED", "pa"), ("DELETED", "pa")] == told


async def test_a_watch_of_a_second_has_no_time_for_a_bookmark() -> None:
    async with connected() as (server, client):
        path = f"{WATCH}&resourceVersion={server.store.version}&timeoutSeconds=1"

        async with client.watch(path + "&allowWatchBookmarks=true") as frames:
            assert [] == [frame async for frame in frames]


async def test_a_list_of_metadata_cannot_be_watched() -> None:
    async with connected() as (_, client):
        accept = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
        answer = await client.call("GET", f"{WATCH}&timeoutSeconds=1", accept=accept)

        assert (200, None) == (answer.code, answer.body or None)


async def test_ended_watches_can_be_continued() -> None:
    async with connected() as (server, client):
        path = f"{WATCH}&resourceVersion={server.store.version}"
        async with client.watch(path) as frames:
            server.store.update("pods", "default", "pa", mark)
            version = (await anext(frames))["object"]["metadata"]["resourceVersion"]
            server.api.end_watches()
            assert [] == [frame async for frame in frames]

        server.store.bind("default", "free", "node-a")
        async with client.watch(f"{WATCH}&resourceVersion={version}") as frames:
            assert "ADDED" == (await anext(frames))["type"]


async def test_watches_that_are_ended_get_the_bookmark_of_their_end() -> None:
    async with connected() as (server, client):
        path = f"{WATCH}&resourceVersion={server.store.version}&allowWatchBookmarks=true"
        async with client.watch(path) as frames:
            server.store.update("nodes", "", "node-b", mark)
            server.api.end_watches()
            seen = [frame async for frame in frames]

        assert [("BOOKMARK", "Pod")] == [(one["type"], one["object"]["kind"]) for one in seen]
        assert str(server.store.version) == seen[0]["object"]["metadata"]["resourceVersion"]


async def test_after_a_compaction_an_old_version_is_gone_in_a_frame() -> None:
    async with connected() as (server, client):
        path = f"{WATCH}&resourceVersion={server.store.version}"
        async with client.watch(path) as frames:
            server.api.forget_history()
            assert [] == [frame async for frame in frames]

        async with client.watch(path) as frames:
            seen = [frame async for frame in frames]

        assert ["ERROR"] == [frame["type"] for frame in seen]
        assert (410, "Expired") == (seen[0]["object"]["code"], seen[0]["object"]["reason"])


async def test_a_watch_that_falls_behind_the_history_is_told_so() -> None:
    async with connected() as (server, client):
        async with client.watch(f"{WATCH}&resourceVersion={server.store.version}") as frames:
            for _ in range(1100):
                server.store.update("pods", "default", "pb", mark)
            seen = [frame async for frame in frames]

        assert [("ERROR", 410)] == [(frame["type"], frame["object"]["code"]) for frame in seen]


async def test_a_throttled_client_is_told_when_to_come_again() -> None:
    async with connected() as (server, client):
        server.api.throttle(2, retry_after=7)

        for _ in range(2):
            answer = await client.get(NODE_A)
            assert (429, "TooManyRequests") == answer.failure
            assert "7" == answer.headers["Retry-After"]
        assert 200 == (await client.get(NODE_A)).code


async def test_an_outage_cuts_watches_and_refuses_connections_until_it_ends() -> None:
    async with connected() as (server, client):
        port = server.api.port
        async with client.watch(f"{WATCH}&resourceVersion={server.store.version}") as frames:
            await server.api.begin_outage()
            with pytest.raises(aiohttp.ClientError):
                await anext(frames)
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.get(NODE_A)

        await server.api.end_outage()

        assert 200 == (await client.get(NODE_A)).code
        assert port == server.api.port

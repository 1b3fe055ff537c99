"""What the API server model does that no test compares with the original, and its faults.

`tests/peers/test_apiserver.py` asks the model and the original the same.
"""

import asyncio
import json

import aiohttp
import pytest

from agent.sandbox.store import GoneError, ObjectStore
from tests.fakes.chance import Seeded
from tests.fakes.clock import ManualClock
from tests.peers.lab.control import NODE_PATH, NODE_USER
from tests.peers.lab.servers import (
    NODES,
    OTHER_NODE,
    OWN_POD,
    PODS,
    Server,
    marks,
    model_server,
    version,
)

OWN = f"{PODS}/{OWN_POD}"
OTHER = f"{NODES}/{OTHER_NODE}"
WATCH = "/api/v1/pods"
MINE = {"fieldSelector": "spec.nodeName=node-a"}


@pytest.fixture
async def server():
    async with model_server() as made:
        yield made


@pytest.mark.looptime(False)
async def test_every_request_is_counted_for_its_user(server: Server) -> None:
    assert server.model is not None
    server.model.asked.clear()
    await server.node.have("GET", NODE_PATH)
    denied = await server.node.ask("GET", OTHER)
    await server.admin.have("PATCH", f"{OWN}/status", marks(a="1"))

    assert 'nodes "node-b" is forbidden' in denied.body["message"]
    assert {(NODE_USER, "get", "nodes"): 2, ("admin", "patch", "pods"): 1} == server.model.asked


# Watches, and the faults that tests switch on.


async def test_a_watch_gets_a_bookmark_after_a_minute_of_silence_and_at_its_end(
    server: Server,
) -> None:
    """On virtual time: a minute of silence costs nothing."""
    assert server.model is not None
    loop = asyncio.get_running_loop()
    query = {"watch": "1", "allowWatchBookmarks": "1", "timeoutSeconds": "105", **MINE}
    query |= {"resourceVersion": str(server.model.store.version)}
    headers = {"Authorization": "Bearer t-admin"}
    async with (
        aiohttp.ClientSession(server.model.url, headers=headers) as session,
        session.get(WATCH, params=query) as answer,
    ):
        await server.admin.have("PATCH", OTHER, marks(a="1"))
        began = loop.time()
        seen = [(json.loads(line), loop.time() - began) async for line in answer.content]

    assert [("BOOKMARK", str(server.model.store.version))] * 2 == [
        (frame["type"], version(frame["object"])) for frame, _ in seen
    ]
    assert [60, 105] == [pytest.approx(at, abs=1.5) for _, at in seen]
    assert 105 == pytest.approx(loop.time() - began, abs=1.5)


# The object store by itself: what those who hold it in their process rely on.


def a_store(history: int = 100) -> ObjectStore:
    store = ObjectStore(ManualClock(), Seeded(), history)
    spec = {"nodeName": "n1", "terminationGracePeriodSeconds": 20}
    store.create("pods", {"metadata": {"name": "p"}, "spec": spec})
    return store


async def test_a_version_that_the_history_has_lost_is_gone_for_all_who_are_not_up_to_date() -> None:
    store = a_store(history=2)
    since = store.version
    for name in "abc":
        store.create("pods", {"metadata": {"name": name}, "spec": {}})
    with pytest.raises(GoneError, match="too old resource version: 2"):
        store.subscribe("pods", since)
    store.subscribe("pods", since + 1)

    current, since = store.subscribe("pods", store.version), store.version
    with pytest.raises(TimeoutError):  # who gives up its wait loses nothing
        async with asyncio.timeout(1):
            await anext(current)
    store.forget_history()
    with pytest.raises(GoneError):
        store.subscribe("pods", since - 1)
    store.create("pods", {"metadata": {"name": "d"}, "spec": {}})
    assert "d" == (await anext(current)).object["metadata"]["name"]

"""Lists and frames of any size: nobody's big pod hides the others from the agent."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agent.errors import ApiError, ApiGone
from agent.kube import client
from agent.kube.client import MOST, ApiRequest, KubeSession, fetch_list, path_of
from agent.kube.objects import KubeApi
from tests.builders import NODE
from tests.fakes.http import a_session, answering
from tests.fakes.kubeworld import NAMESPACE, RESOURCE, ModelWorld, model_world

pytestmark = pytest.mark.looptime(False)

MIB = 1024 * 1024
NODES = ApiRequest("list", "nodes", path_of("nodes"))
PLAIN = {"name": "main", "resources": {"limits": {RESOURCE: "1"}}}


@asynccontextmanager
async def a_cluster(folder: Path) -> AsyncIterator[ModelWorld]:
    async with asyncio.timeout(20), model_world(folder) as world:
        yield world


def add_pod(
    world: ModelWorld,
    name: str,
    annotations: dict[str, str] | None = None,
    container: dict[str, Any] | None = None,
) -> None:
    world.store.create(
        "pods",
        {
            "metadata": {"name": name, "namespace": NAMESPACE, "annotations": annotations or {}},
            "spec": {"nodeName": NODE, "containers": [container or PLAIN]},
        },
    )


def asked(session: KubeSession) -> int:
    return sum(count for (verb, *_), count in session.requests.items() if verb == "list")


def page(rest: str, *names: str) -> web.Response:
    metadata = {"resourceVersion": "7", "continue": rest}
    items = [{"metadata": {"uid": f"u-{name}", "name": name}} for name in names]
    body = json.dumps({"metadata": metadata, "items": items}, separators=(",", ":"))
    return web.Response(text=body)


def pods_of(session: KubeSession) -> KubeApi:
    return KubeApi(session, NODE, RESOURCE)


async def test_an_empty_list_may_have_null_for_items(tmp_path: Path):
    body = b'{"metadata":{"resourceVersion":"7"},"items":null}'
    async with a_session(answering(body), tmp_path) as session:
        assert ("7", []) == await fetch_list(session, NODES, bytes)


async def test_a_list_that_the_server_forgot_in_the_middle_is_gone(tmp_path: Path):
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if "continue" in request.query:
            return web.json_response({}, status=410)
        return page("t1", "a")

    async with a_session(answer, tmp_path) as session:
        with pytest.raises(ApiGone):
            await pods_of(session).list_pods()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"[]", "not a list of objects"),
        (b'{"metadata":' + b"[" * 100_000, "not a list of objects"),
        (b'{"metadata":{"resourceVersion":"7"},"items":[%s{}]}' % (b"{}," * 250_000), "not a list"),
        (b'{"metadata":{"resourceVersion":"7"},"items":[%s7]}' % (b"7," * 500_001), "not a list"),
        (b'{"metadata":{},"items":[]}', "no resourceVersion"),
        (b'{"metadata":{"resourceVersion":"7"},"items":[7]}', "not a JSON object"),
    ],
)
async def test_a_list_that_is_none_is_an_error(tmp_path: Path, body: bytes, text: str):
    async with a_session(answering(body), tmp_path) as session:
        with pytest.raises(ApiError, match=text):
            await pods_of(session).list_pods()


def endless(names: Callable[[int, int], Sequence[str]], tokens: Callable[[int], str]) -> Any:
    """A server whose page number N has `names(N, limit)` and the token `tokens(N)`."""
    numbers = itertools.count()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        number, limit = next(numbers), int(request.query.get("limit", 0))
        return page(tokens(number), *names(number, limit))

    return answer


def numbered(number: int, count: int) -> Sequence[str]:
    return [f"{number}-{at}" for at in range(count)]


TOKENS = "t{}".format


@pytest.mark.parametrize(
    "answer",
    [
        endless(lambda number, limit: (), TOKENS),
        endless(lambda number, limit: [f"a{number}"], TOKENS),
        endless(lambda number, limit: numbered(number, 2 * limit), TOKENS),
        endless(numbered, lambda _: "same"),
        endless(lambda number, limit: numbered(0, limit), TOKENS),
        endless(numbered, TOKENS),
        endless(lambda number, limit: [f"{n}{'x' * 10_000}" for n in range(limit)], TOKENS),
    ],
    ids=["empty", "one", "more than asked", "same token", "same objects", "full", "long names"],
)
async def test_a_list_without_end_is_given_up(tmp_path: Path, monkeypatch, answer: Any):
    monkeypatch.setattr(client, "LIST_LIMIT", 1 << 22)
    async with asyncio.timeout(20), a_session(answer, tmp_path) as session:
        for most in (MOST, 0):
            with pytest.raises(ApiError, match="the list has no end: after") as said:
                await fetch_list(session, NODES, bytes, most)

    assert "check the API server and the proxies before it" in str(said.value)


async def test_an_object_that_no_answer_may_hold_is_an_error(tmp_path: Path, monkeypatch):
    for limit in ("BODY_LIMIT", "PAGE_LIMIT"):
        monkeypatch.setattr(client, limit, 100)
    async with asyncio.timeout(20), a_session(answering(b" " * 200), tmp_path) as session:
        with pytest.raises(ApiError, match="the answer is longer than"):
            await fetch_list(session, NODES, bytes, MOST)


@pytest.mark.parametrize("size", [300, 20_000, 60_000])
async def test_a_page_is_not_asked_for_that_will_be_too_long(tmp_path: Path, size: int):
    async with asyncio.timeout(20), model_world(tmp_path, "admin") as world:
        for number in range(600):
            world.store.create(
                "nodes", {"metadata": {"name": f"n{number:04}", "annotations": {"x": "x" * size}}}
            )
        before = asked(world.session)
        _, listed = await fetch_list(world.session, NODES, len, MOST)
        tries = asked(world.session) - before

    assert 600 == len(listed)
    assert tries <= 3 + 2 * 600 * size / (client.PAGE_LIMIT // 8)


async def test_the_nodes_and_pods_of_a_great_cluster_are_listed(tmp_path: Path):
    most = 40_000
    # Three answers are short, as the API allows.
    starts = (0, 400, 900, 1000, *range(1500, most, 500))

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        number = int(request.query.get("continue", 0))
        start, end = starts[number], (*starts, most)[number + 1]
        token = str(number + 1) if end < most else ""
        return page(token, *(f"{at:05}" for at in range(start, end)))

    async with a_session(answer, tmp_path) as session:
        _, found = await fetch_list(session, NODES, len, MOST)

    assert most == len(found)


async def test_a_frame_as_long_as_any_object_is_read(tmp_path: Path):
    # What etcd takes at most, of a letter that JSON writes with six: as the real server writes it.
    text = "\x01" * (3 * MIB // 2)
    async with a_cluster(tmp_path) as world:
        found = await world.pod_api.list_pods()
        watch = world.pod_api.watch_pods(found.resource_version)
        await anext(watch)
        add_pod(world, "big", {"other": text, "hami.io/bind-phase": "allocating"})
        add_pod(world, "small")
        big, small = await anext(watch), await anext(watch)

        assert big.pod is not None
        assert small.pod is not None
        assert ["big", "small"] == [big.pod.name, small.pod.name]
        assert {"hami.io/bind-phase": "allocating"} == big.pod.annotations
        assert 9 * MIB < len(json.dumps(text))


async def test_after_big_pods_the_small_ones_do_not_come_one_by_one(tmp_path: Path):
    long = {"name": "main", "env": [{"name": "LONG", "value": "x" * 1_400_000}]}
    async with a_cluster(tmp_path) as world:
        for number in range(8):
            add_pod(world, f"big-{number}", container=long)
        for number in range(200):
            add_pod(world, f"small-{number}")
        before = asked(world.session)
        found = await world.pod_api.list_pods()
        requests = asked(world.session) - before

    assert 208 == len(found.pods)
    assert 20 >= requests

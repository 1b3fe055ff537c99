"""Lists and frames of any size: nobody's big pod hides the others from the agent."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
from aiohttp import web

from agent.core.errors import ApiError, ApiGone
from agent.host.kube import lists as lists_module
from agent.host.kube import session as session_module
from agent.host.kube.api import KubePods
from agent.host.kube.events import EventPoster
from agent.host.kube.session import KubeSession
from tests.builders import NODE
from tests.fakes.clock import ManualClock
from tests.fakes.http import a_session
from tests.fakes.kubeworld import NAMESPACE, RESOURCE, ModelWorld, model_world

pytestmark = pytest.mark.looptime(False)

MIB = 1024 * 1024
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


async def test_eight_pods_of_1_1_mb_hide_none(tmp_path: Path):
    long = {"name": "main", "env": [{"name": "LONG", "value": "x" * 1_100_000}]}
    async with a_cluster(tmp_path) as world:
        for number in range(8):
            add_pod(world, f"big-{number}", container=long)
        add_pod(world, "gpu", {"hami.io/bind-phase": "allocating"})
        first = await world.pod_api.list_pods()
        tries = asked(world.session)
        second = await world.pod_api.list_pods()

        assert {*(f"big-{number}" for number in range(8)), "gpu"} == {p.name for p in first.pods}
        assert first == second
        assert {"hami.io/bind-phase": "allocating"} == first.pods[-1].annotations
        # What was learnt is kept: nothing is read in vain again.
        assert 3 == asked(world.session) - tries


async def test_105_pods_with_255_kb_of_annotations_hide_none_and_are_not_kept(tmp_path: Path):
    async with a_cluster(tmp_path) as world:
        for number in range(105):
            text = "x" * 127_500
            add_pod(world, f"big-{number}", {"hami.io/bind-phase": text, "hami.io/other": text})
        add_pod(world, "gpu")
        found = await world.pod_api.list_pods()

    assert 106 == len(found.pods)
    assert 1024 == max(len(text) for pod in found.pods for text in pod.annotations.values())
    assert {"hami.io/bind-phase"} == {key for pod in found.pods for key in pod.annotations}


async def test_500_ordinary_pods_are_one_answer(tmp_path: Path):
    padding = {"name": "main", "env": [{"name": "A", "value": "x" * 6000}]}
    async with a_cluster(tmp_path) as world:
        for number in range(500):
            add_pod(world, f"pod-{number}", container=padding)
        found = await world.pod_api.list_pods()

        assert 500 == len(found.pods)
        assert 1 == asked(world.session)


async def test_small_answers_become_larger_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with a_cluster(tmp_path) as world:
        for number in range(200):
            add_pod(world, f"pod-{number:03}")
        add_pod(world, "a-big-one", {"other": "x" * 200_000})
        monkeypatch.setattr(lists_module, "PAGE_LIMIT", 200_000)
        await world.pod_api.list_pods()
        world.delete_pod("a-big-one")
        for _ in range(2):
            await world.pod_api.list_pods()
        before = asked(world.session)
        found = await world.pod_api.list_pods()

        assert 200 == len(found.pods)
        assert 1 == asked(world.session) - before


async def test_a_pod_that_no_server_should_hold_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lists_module, "PAGE_LIMIT", 50_000)
    monkeypatch.setattr(session_module, "BODY_LIMIT", 100_000)
    async with a_cluster(tmp_path) as world:
        for name in ("a", "b", "c"):
            add_pod(world, name)
        add_pod(world, "bb", {"other": "x" * 200_000})
        with structlog.testing.capture_logs() as log:
            found = await world.pod_api.list_pods()

    assert ["a", "b", "c"] == [pod.name for pod in found.pods]
    assert ["kube.object_too_long"] == [
        line["event"] for line in log if line["log_level"] == "error"
    ]


def page(rest: str, *names: str) -> web.Response:
    metadata = {"resourceVersion": "7", "continue": rest}
    items = [{"metadata": {"uid": f"u-{name}", "name": name}} for name in names]
    return web.json_response({"metadata": metadata, "items": items})


def pods_of(session: KubeSession) -> KubePods:
    return KubePods(session, NODE, RESOURCE, EventPoster(session, NODE, ManualClock()))


async def test_a_list_that_the_server_forgot_in_the_middle_begins_anew(tmp_path: Path):
    answers = [page("t1", "a"), web.json_response({}, status=410), page("t2", "a"), page("", "b")]
    tokens: list[str | None] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        tokens.append(request.query.get("continue"))
        return answers[len(tokens) - 1]

    async with a_session(answer, tmp_path) as session:
        found = await pods_of(session).list_pods()

    assert [None, "t1", None, "t2"] == tokens
    assert ("7", ["a", "b"]) == (found.resource_version, [pod.name for pod in found.pods])


async def test_a_list_that_is_forgotten_again_and_again_is_gone(tmp_path: Path):
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
        (b'{"metadata":{},"items":[]}', "no resourceVersion"),
        (b'{"metadata":{"resourceVersion":"7"},"items":[7]}', "not a JSON object"),
    ],
)
async def test_a_list_that_is_none_is_an_error(tmp_path: Path, body: bytes, text: str):
    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=body)

    async with a_session(answer, tmp_path) as session:
        with pytest.raises(ApiError, match=text):
            await pods_of(session).list_pods()


async def test_a_list_without_a_beginning_that_can_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=b" " * 2000)

    monkeypatch.setattr(lists_module, "PAGE_LIMIT", 1000)
    monkeypatch.setattr(session_module, "BODY_LIMIT", 1000)
    async with a_session(answer, tmp_path) as session:
        with pytest.raises(ApiError, match="longer than"):
            await pods_of(session).list_pods()


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


async def test_a_pod_as_long_as_any_object_is_found_listed_and_patched(tmp_path: Path):
    async with a_cluster(tmp_path) as world:
        long = {"name": "LONG", "value": "\x01" * (3 * MIB // 2)}
        add_pod(world, "big", container=PLAIN | {"env": [long]})
        add_pod(world, "small")
        listed = await world.pod_api.list_pods()
        got = await world.pod_api.get_pod(NAMESPACE, "big")
        assert got is not None
        await world.pod_api.annotate_pod(NAMESPACE, "big", got.uid, {"hami.io/a": "b"})

        assert got in listed.pods
        assert 2 == len(listed.pods)
        assert "b" == world.pod_annotations("big")["hami.io/a"]

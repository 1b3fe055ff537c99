"""A watch ends, breaks, falls silent or talks nonsense: each is told apart."""

import asyncio
import json
import os
from pathlib import Path

import pytest
import structlog
from aiohttp import web

from agent.errors import ApiError
from agent.kube import client
from agent.kube.client import KubeSession
from agent.kube.objects import KubeApi
from tests.builders import NODE
from tests.fakes.http import a_session, stream, streaming
from tests.fakes.kubeworld import RESOURCE

BOOKMARK = b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"7"}}}\n'
OPEN, KEEPALIVE_TIMER = "01", "02"
"""The state of a connection, and the kind of a timer, as /proc/net/tcp writes them."""
pytestmark = pytest.mark.looptime(False)


def pods_of(session: KubeSession) -> KubeApi:
    return KubeApi(session, NODE, RESOURCE)


def timers_of(port: int, server: int) -> list[tuple[str, float]]:
    """Which timer of the kernel runs for the connection between the ports, and the seconds left."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text("ascii").splitlines()]
    ends = (f":{port:04X}", f":{server:04X}")
    timers = [
        row[5].split(":") for row in rows if (row[1][-5:], row[2][-5:]) == ends and row[3] == OPEN
    ]
    return [(kind, int(left, 16) / os.sysconf("SC_CLK_TCK")) for kind, left in timers]


async def watch(pods: KubeApi, found: list[str]) -> None:
    """Add the version of each change until the watch ends."""
    async for change in pods.watch_pods("1"):
        found.append(change.resource_version)  # noqa: PERF401 -- those before an error count


async def versions(pods: KubeApi) -> list[str]:
    """What the watch says until it ends."""
    found: list[str] = []
    await watch(pods, found)
    return found


async def test_a_watch_asks_for_an_end_and_bookmarks_and_its_own_pods(tmp_path: Path):
    asked = {}

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        asked.update(request.query)
        return await stream(request)

    async with a_session(answer, tmp_path) as session:
        assert ["1"] == await versions(pods_of(session))

    assert {
        "watch": "1",
        "fieldSelector": f"spec.nodeName={NODE}",
        "resourceVersion": "1",
        "allowWatchBookmarks": "true",
        "timeoutSeconds": "300",
    } == asked


async def test_the_kernel_asks_whether_an_idle_watch_still_has_its_server(tmp_path: Path):
    timers = list[tuple[str, float]]()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(BOOKMARK)
        await asyncio.sleep(0.1)
        assert request.transport is not None
        ends = (request.transport.get_extra_info(name)[1] for name in ("peername", "sockname"))
        timers.extend(timers_of(*ends))
        return response

    async with a_session(answer, tmp_path) as session:
        await versions(pods_of(session))

    ((kind, left),) = timers
    assert KEEPALIVE_TIMER == kind
    assert 5 < left <= 10


async def test_a_silent_watch_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client, "SILENCE", 0.1)

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        await stream(request, BOOKMARK)
        await asyncio.Event().wait()
        raise AssertionError

    async with a_session(answer, tmp_path) as session:
        assert ["1", "7"] == await versions(pods_of(session))


async def test_a_watch_that_is_cut_is_an_error(tmp_path: Path):
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = await stream(request, BOOKMARK)
        assert request.transport is not None
        request.transport.abort()
        return response

    async with a_session(answer, tmp_path) as session:
        with pytest.raises(ApiError, match="no answer"):
            await versions(pods_of(session))


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (b"nonsense\n", "no type or no object"),
        (b"[]\n", "no type or no object"),
        (b'{"type":"ADDED"}\n', "no type or no object"),
        (b'{"type":7,"object":{}}\n', "no type or no object"),
        (b'{"type":"A","object":7}\n', "not a JSON object"),
        (b'{"object":{}}\n', "no type or no object"),
        (b'{"type":"ERROR","object":{"code":500,"message":"etcd"}}\n', "answered 500: etcd"),
    ],
)
async def test_a_bad_frame_is_an_error(tmp_path: Path, frame: bytes, text: str):
    async with a_session(streaming(frame), tmp_path) as session:
        with pytest.raises(ApiError, match=text):
            await versions(pods_of(session))


async def test_a_pod_without_a_name_is_said_once_and_costs_no_other_one(tmp_path: Path):
    odd = {"metadata": {"uid": "u", "resourceVersion": "8"}}
    well = {"metadata": {"uid": "v", "name": "v", "resourceVersion": "9"}}
    frames = (json.dumps({"type": "ADDED", "object": one}).encode() + b"\n" for one in (odd, well))
    frame, answers = b"".join(frames), [[odd, well], [odd, well], [odd]]

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if "watch" in request.query:
            return await stream(request, frame)
        found = {"metadata": {"resourceVersion": "7"}, "items": answers.pop(0)}
        return web.json_response(found)

    with structlog.testing.capture_logs() as logs:
        async with a_session(answer, tmp_path) as session:
            pods = pods_of(session)
            lists = [[pod.name for pod in (await pods.list_pods()).pods] for _ in range(2)]
            changes = [change async for change in pods.watch_pods("7")]
            # As an empty list it would mean that every pod is gone.
            with pytest.raises(ApiError, match=r"pod u: .* must both be texts"):
                await pods.list_pods()

    assert [["v"], ["v"]] == lists
    assert [("7", None), ("8", None), ("9", "v")] == [
        (change.resource_version, change.pod and change.pod.name) for change in changes
    ]
    assert 1 == sum(one["event"] == "kube.object_skipped" for one in logs)


A_NODE = b'{"type":"ADDED","object":{"metadata":{"name":"n","uid":"u"}}}\n'


@pytest.mark.parametrize(
    ("frames", "shown"),
    [((A_NODE, BOOKMARK, BOOKMARK), ["n"]), ((BOOKMARK, BOOKMARK, A_NODE, BOOKMARK), [None, "n"])],
)
async def test_only_a_bookmark_before_every_node_says_that_there_is_none(
    tmp_path: Path, frames: tuple[bytes, ...], shown: list[str | None]
):
    async with a_session(streaming(*frames), tmp_path) as session:
        found = [node async for node in KubeApi(session, NODE).watch_node()]

    assert shown == [node and node.name for node in found]


async def test_frames_are_found_wherever_the_bytes_are_cut(tmp_path: Path):
    text = BOOKMARK + b"\n" + BOOKMARK.replace(b"7", b"8") + BOOKMARK.replace(b"7", b"9")
    for size in (1, 7, 60, 200):
        parts = (text[at : at + size] for at in range(0, len(text), size))
        async with a_session(streaming(*parts), tmp_path) as session:
            assert ["1", "7", "8", "9"] == await versions(pods_of(session))


async def test_a_line_that_no_object_needs_ends_the_watch_and_is_not_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(client, "BODY_LIMIT", len(BOOKMARK))
    found: list[str] = []

    async with a_session(streaming(BOOKMARK, *(b" " * 60,) * 9), tmp_path) as session:
        with pytest.raises(ApiError, match=f"more than {len(BOOKMARK)} bytes"):
            await watch(pods_of(session), found)

    assert ["1", "7"] == found

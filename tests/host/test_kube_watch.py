"""A watch ends, breaks, falls silent or talks nonsense: each is told apart."""

import asyncio
import os
from pathlib import Path

import pytest
import structlog
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import ApiError, ApiGone
from agent.kube import api as watch_module
from agent.kube.api import KubeNode, KubePods, WatchLines, WatchTimes
from agent.kube.client import ApiRequest, KubeSession
from agent.kube.events import EventPoster
from tests.builders import NODE
from tests.fakes.clock import ManualClock
from tests.fakes.http import a_session, stream, streaming
from tests.fakes.kubeworld import RESOURCE

WATCH = ApiRequest("watch", "pods", "/api/v1/pods")
BOOKMARK = b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"7"}}}\n'
GONE = b'{"type":"ERROR","object":{"code":410,"message":"too old"}}\n'
OPEN, KEEPALIVE_TIMER = "01", "02"
"""The state of a connection, and the kind of a timer, as /proc/net/tcp writes them."""
pytestmark = pytest.mark.looptime(False)


def pods_of(session: KubeSession, pace: WatchTimes | None = None) -> KubePods:
    poster = EventPoster(session, NODE, ManualClock())
    return KubePods(session, NODE, RESOURCE, poster, pace or WatchTimes())


def timers_of(port: int, server: int) -> list[tuple[str, float]]:
    """Which timer of the kernel runs for the connection between the ports, and the seconds left."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text("ascii").splitlines()]
    ends = (f":{port:04X}", f":{server:04X}")
    timers = [
        row[5].split(":") for row in rows if (row[1][-5:], row[2][-5:]) == ends and row[3] == OPEN
    ]
    return [(kind, int(left, 16) / os.sysconf("SC_CLK_TCK")) for kind, left in timers]


async def versions(pods: KubePods) -> list[str]:
    """What the watch says until it ends."""
    return [change.resource_version async for change in pods.watch_pods("1")]


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


async def test_a_silent_watch_is_over(tmp_path: Path):
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        await stream(request, BOOKMARK)
        await asyncio.Event().wait()
        raise AssertionError

    async with a_session(answer, tmp_path) as session:
        assert ["1", "7"] == await versions(pods_of(session, WatchTimes(silence=0.1)))


async def test_a_watch_that_outlives_its_time_is_over(tmp_path: Path):
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = await stream(request)
        while True:
            await response.write(BOOKMARK)
            await asyncio.sleep(0.01)

    async with a_session(answer, tmp_path) as session:
        pods = pods_of(session, WatchTimes(shortest=0.1, longest=0.1, grace=0.1))

        assert {"1", "7"} == set(await versions(pods))


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
        (b"nonsense\n", "not a JSON object"),
        (b"[]\n", "not a JSON object"),
        (b'{"type":"ADDED"}\n', "no type or no object"),
        (b'{"type":7,"object":{}}\n', "no type or no object"),
        (b'{"type":"A","object":7}\n', "no type or no object"),
        (b'{"object":{}}\n', "no type or no object"),
        (b'{"type":"ADDED","object":{}}\n', "no resourceVersion"),
        (b'{"type":"ERROR","object":{"code":500,"message":"etcd"}}\n', "answered 500: etcd"),
    ],
)
async def test_a_bad_frame_is_an_error(tmp_path: Path, frame: bytes, text: str):
    async with a_session(streaming(frame), tmp_path) as session:
        with pytest.raises(ApiError, match=text):
            await versions(pods_of(session))


async def test_gone_in_a_frame_or_as_a_status_is_gone(tmp_path: Path):
    answers = iter([200, 410])

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        return await stream(request, GONE) if next(answers) == 200 else web.Response(status=410)

    async with a_session(answer, tmp_path) as session:
        for _ in range(2):
            with pytest.raises(ApiGone):
                await versions(pods_of(session))


async def test_a_pod_that_cannot_be_read_does_not_blind_us_for_the_others(tmp_path: Path):
    odd = b'{"type":"ADDED","object":{"metadata":{"resourceVersion":"6"}}}\n'

    async with a_session(streaming(odd, BOOKMARK), tmp_path) as session:
        assert ["1", "6", "7"] == await versions(pods_of(session))


async def test_a_node_without_a_uid_is_an_error(tmp_path: Path):
    async with a_session(
        streaming(b'{"type":"ADDED","object":{"metadata":{}}}\n'), tmp_path
    ) as session:
        watch = KubeNode(session, NODE).watch_node()
        await anext(watch)
        with pytest.raises(ApiError, match=r"metadata\.uid"):
            await anext(watch)


@given(st.lists(st.binary(max_size=5)), st.randoms(use_true_random=False))
def test_lines_are_found_wherever_the_bytes_are_cut(parts, chance):
    text = b"\n".join(part.replace(b"\n", b"") for part in parts) + b"\n"
    lines, found, place = WatchLines(WATCH), [], 0
    while place < len(text):
        size = chance.randint(1, 4)
        found += lines.feed(text[place : place + size])
        place += size

    assert [line for line in text.split(b"\n") if line.strip()] == found


def test_a_line_that_no_object_needs_is_passed_over_and_not_collected(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(watch_module, "LINE_LIMIT", 100)
    lines = WatchLines(WATCH)
    assert [b"x" * 100, b"y"] == lines.feed(b"x" * 100 + b"\ny\n" + b"z" * 50)

    with structlog.testing.capture_logs() as log:
        assert [] == lines.feed(b"z" * 51) == lines.feed(b"z" * 500)
        assert [b"a", b"b"] == lines.feed(b"zz\na\nb\nc")
        assert [b"cd"] == lines.feed(b"d\n")

    assert ["kube.frame_too_long"] == [line["event"] for line in log]

"""Lists and watches: of any size, cut, silent or nonsense; nobody's big pod hides the others."""

import asyncio
import itertools
import json
import os
from pathlib import Path

import pytest
import structlog
from aiohttp import web

from agent.errors import ApiError, ApiGone
from agent.kube import client
from agent.kube.client import MOST, ApiRequest, fetch_list, path_of
from agent.kube.objects import KubeApi
from tests.builders import NODE
from tests.fakes.http import answering, stream, streaming
from tests.fakes.kubeworld import RESOURCE

pytestmark = [pytest.mark.looptime(False), pytest.mark.timeout(30)]

MIB = 1024 * 1024
NODES = ApiRequest("list", "nodes", path_of("nodes"))


def pods_of(session):
    return KubeApi(session, NODE, RESOURCE)


def page(rest, *names):
    """An answer with so many objects, which promises more after the token `rest`."""
    metadata = {"resourceVersion": "7", "continue": rest}
    items = [{"metadata": {"uid": f"u-{name}", "name": name}} for name in names]
    return web.Response(
        text=json.dumps({"metadata": metadata, "items": items}, separators=(",", ":"))
    )


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"metadata":{"resourceVersion":"7"},"items":null}', "version 7"),
        (b"[]", "not a list of objects"),
        (b'{"metadata":' + b"[" * 100_000, "not a list of objects"),
        (b'{"metadata":{"resourceVersion":"7"},"items":[%s{}]}' % (b"{}," * 250_000), "not a list"),
        (b'{"metadata":{"resourceVersion":"7"},"items":[%s7]}' % (b"7," * 500_001), "not a list"),
        (b'{"metadata":{},"items":[]}', "no resourceVersion"),
        (b'{"metadata":{"resourceVersion":"7"},"items":[7]}', "not a JSON object"),
    ],
)
async def test_a_list_that_is_none_is_an_error_and_an_empty_one_may_be_null(serve, body, text):
    session = await serve(answering(body))
    try:
        said = f"version {(await pods_of(session).list_pods()).resource_version}"
    except ApiError as error:
        said = str(error)

    assert text in said


async def test_a_list_that_the_server_forgot_in_the_middle_is_gone(serve):
    async def answer(request):
        is_later = "continue" in request.query
        return web.json_response({}, status=410) if is_later else page("t1", "a")

    with pytest.raises(ApiGone):
        await pods_of(await serve(answer)).list_pods()


TOKENS = "t{}".format
ENDLESS = {
    "empty": (lambda number, limit: (), TOKENS),
    "one": (lambda number, limit: (f"a{number}",), TOKENS),
    "more than asked": (lambda number, limit: map(str, range(2 * limit)), TOKENS),
    "same token": (lambda number, limit: map(str, range(limit)), lambda _: "same"),
    "full": (lambda number, limit: map(str, range(limit)), TOKENS),
    "long names": (lambda number, limit: (f"{n}{'x' * 10_000}" for n in range(limit)), TOKENS),
}
"""The names and the token of page N of a server that always promises more."""


@pytest.mark.parametrize(("names", "tokens"), ENDLESS.values(), ids=ENDLESS)
async def test_a_list_without_end_is_given_up(serve, monkeypatch, names, tokens):
    monkeypatch.setattr(client, "LIST_LIMIT", 1 << 22)
    numbers = itertools.count()

    async def answer(request):
        number = next(numbers)
        return page(tokens(number), *names(number, int(request.query.get("limit", 3))))

    session = await serve(answer)
    for most in (MOST, 0):
        with pytest.raises(ApiError, match=r"the list has no end: after .* check the API server"):
            await fetch_list(session, NODES, bytes, most)
    # A token that comes again is no new page.
    assert tokens(0) != tokens(1) or next(numbers) <= 4


async def test_an_object_that_no_answer_may_hold_is_an_error(serve, monkeypatch):
    for limit in ("BODY_LIMIT", "PAGE_LIMIT"):
        monkeypatch.setattr(client, limit, 100)
    with pytest.raises(ApiError, match="the answer is longer than"):
        await fetch_list(await serve(answering(b" " * 200)), NODES, bytes, MOST)


@pytest.mark.parametrize(("big", "small"), [((600, 300), 0), ((600, 60_000), 0), ((8, MIB), 200)])
async def test_a_page_is_not_asked_for_that_will_be_too_long_and_small_ones_come_together(
    serve, big, small
):
    number, size = big
    lengths, asked = [size] * number + [0] * small, []

    async def answer(request):
        start, limit = (int(request.query.get(name, 0)) for name in ("continue", "limit"))
        end = min(start + limit, len(lengths))
        asked.append(end)
        # Each name stands in its object twice.
        names = ("x" * (length // 2) for length in lengths[start:end])
        return page(str(end) * (end < len(lengths)), *names)

    _, listed = await fetch_list(await serve(answer), NODES, len, MOST)

    assert number + small == len(listed)
    most = 3 + 2 * number * size / (client.PAGE_LIMIT // 8)
    assert len(asked) <= min(most, 20 if small else most)


async def test_the_nodes_and_pods_of_a_great_cluster_are_listed(serve):
    # Three answers are short, as the API allows.
    starts = (0, 400, 900, 1000, *range(1500, 40_001, 500))

    async def answer(request):
        number = int(request.query.get("continue", 0))
        start, end = starts[number : number + 2]
        return page(str(number + 1) * (end < 40_000), *(f"{at:05}" for at in range(start, end)))

    _, found = await fetch_list(await serve(answer), NODES, len, MOST)

    assert 40_000 == len(found)


async def test_a_frame_as_long_as_any_object_is_read(world):
    # What etcd takes at most, of a letter that JSON writes with six: as the real server writes it.
    text = "\x01" * (3 * MIB // 2)
    found = await world.pod_api.list_pods()
    watch = world.pod_api.watch_pods(found.resource_version)
    await anext(watch)
    world.create_pod("big", annotations={"other": text, "hami.io/bind-phase": "allocating"})
    world.create_pod("small")
    big, small = (await anext(watch)).pod, (await anext(watch)).pod

    assert ["big", "small"] == [big.name, small.name]
    assert {"hami.io/bind-phase": "allocating"} == big.annotations
    assert 9 * MIB < len(json.dumps(text))


# A watch ends, breaks, falls silent or talks nonsense: each is told apart.

BOOKMARK = b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"7"}}}\n'


async def watch(session, found):
    """Add the version of each change until the watch ends."""
    async for change in pods_of(session).watch_pods("1"):
        found.append(change.resource_version)
    return found


def timer_of(*ports):
    """The timer that the kernel runs for the open connection from port to port, and its seconds."""
    ends = [f":{port:04X}" for port in ports]
    rows = [row.split() for row in Path("/proc/net/tcp").read_text("ascii").splitlines()]
    ours = (row for row in rows if row[3] == "01" and [row[1][-5:], row[2][-5:]] == ends)
    ((kind, left),) = (row[5].split(":") for row in ours)
    return kind, int(left, 16) / os.sysconf("SC_CLK_TCK")


async def test_a_watch_asks_for_an_end_bookmarks_its_own_pods_and_whether_the_server_is_there(
    serve,
):
    query, timers = {}, []

    async def answer(request):
        query.update(request.query)
        response = await stream(request, BOOKMARK)
        await asyncio.sleep(0.1)
        ends = (request.transport.get_extra_info(name)[1] for name in ("peername", "sockname"))
        timers.append(timer_of(*ends))
        return response

    assert ["1", "7"] == await watch(await serve(answer), [])

    selector = f"spec.nodeName={NODE}"
    wanted = {"fieldSelector": selector, "resourceVersion": "1", "timeoutSeconds": "300"}
    assert {"watch": "1", "allowWatchBookmarks": "true", **wanted} == query
    ((kind, left),) = timers
    assert ("02", True) == (kind, 5 < left <= 10)  # keepalive


@pytest.mark.parametrize("is_cut", [False, True])
async def test_a_silent_watch_is_over_and_one_that_is_cut_is_an_error(serve, monkeypatch, is_cut):
    monkeypatch.setattr(client, "SILENCE", 0.1)

    async def answer(request):
        response = await stream(request, BOOKMARK)
        if is_cut:
            request.transport.abort()
            return response
        return await asyncio.Event().wait()

    session = await serve(answer)
    if is_cut:
        with pytest.raises(ApiError, match="no answer"):
            await watch(session, [])
    else:
        assert ["1", "7"] == await watch(session, [])


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
async def test_a_bad_frame_is_an_error(serve, frame, text):
    with pytest.raises(ApiError, match=text):
        await watch(await serve(streaming(frame)), [])


async def test_a_pod_without_a_name_is_said_once_and_costs_no_other_one(serve):
    odd = {"metadata": {"uid": "u", "resourceVersion": "8"}}
    well = {"metadata": {"uid": "v", "name": "v", "resourceVersion": "9"}}
    frames = (json.dumps({"type": "ADDED", "object": one}).encode() + b"\n" for one in (odd, well))
    frame, answers = b"".join(frames), [[odd, well], [odd, well], [odd]]

    async def answer(request):
        if "watch" in request.query:
            return await stream(request, frame)
        return web.json_response({"metadata": {"resourceVersion": "7"}, "items": answers.pop(0)})

    pods = pods_of(await serve(answer))
    with structlog.testing.capture_logs() as logs:
        lists = [[pod.name for pod in (await pods.list_pods()).pods] for _ in range(2)]
        changes = [change async for change in pods.watch_pods("7")]
        # As an empty list it would mean that every pod is gone.
        with pytest.raises(ApiError, match=r"pod u: .* must both be texts"):
            await pods.list_pods()

    assert [["v"], ["v"]] == lists
    found = [(change.resource_version, change.pod and change.pod.name) for change in changes]
    assert [("7", None), ("8", None), ("9", "v")] == found
    assert 1 == sum(one["event"] == "kube.object_skipped" for one in logs)


A_NODE = b'{"type":"ADDED","object":{"metadata":{"name":"n","uid":"u"}}}\n'


@pytest.mark.parametrize(
    ("frames", "shown"),
    [((A_NODE, BOOKMARK, BOOKMARK), ["n"]), ((BOOKMARK, BOOKMARK, A_NODE, BOOKMARK), [None, "n"])],
)
async def test_only_a_bookmark_before_every_node_says_that_there_is_none(serve, frames, shown):
    session = await serve(streaming(*frames))

    assert shown == [node and node.name async for node in KubeApi(session, NODE).watch_node()]


async def test_a_line_that_no_object_needs_ends_the_watch_and_is_not_collected(serve, monkeypatch):
    monkeypatch.setattr(client, "BODY_LIMIT", len(BOOKMARK))
    found = []
    with pytest.raises(ApiError, match=f"more than {len(BOOKMARK)} bytes"):
        await watch(await serve(streaming(BOOKMARK, *(b" " * 60,) * 9)), found)

    assert ["1", "7"] == found

"""Actions through the unix socket: for root and the agent's own user, and only there."""

import asyncio
import json
import os

import aiohttp
import pytest
from aiohttp import web

from agent.health.watch import Recheck
from agent.model import NO_INDEX, Condition, Probe, ProbeOutcome
from agent.web import api
from agent.web.api import Actions
from agent.web.server import Listeners, WebServer
from tests.builders import G1, a_gpu, a_health, a_shared_gpu

pytestmark = pytest.mark.looptime(False)

ILL = a_health(condition=Condition.BAD, cause="xid", text="XID 48 [H-048]")


GPUS = [
    (label, a_shared_gpu(gpu=a_gpu(uuid=uuid)))
    for label, uuid in (("0", G1), ("1", G1), ("2", "GPU-gone"))
]


async def recheck(name, *, was_reset):
    if name not in {"0", G1}:
        return None
    probe = Probe(G1, ProbeOutcome.PASSED)
    missing = () if was_reset else ("a reset",)
    return Recheck(a_gpu(index=0, uuid=G1), probe, a_health(), ILL, serving=False, missing=missing)


async def nobody(*_, **__):
    return None


def actions(ask=recheck, gpus=GPUS, left_out=""):
    return Actions(ask, nobody, lambda: gpus, lambda name: left_out if name == "1" else "")


async def post(tmp_path, path, method="POST", served=None):
    socket = tmp_path / "api.sock"
    pages = {"/livez": lambda _: web.Response(text="ok")}
    connector = aiohttp.UnixConnector(str(socket))
    answer_to = (served or actions()).answer
    async with (
        WebServer(Listeners(port=None, socket_path=socket), pages, answer_to),
        aiohttp.ClientSession("http://agent", connector=connector) as client,
        client.request(method, path) as answer,
    ):
        return answer.status, await answer.text(), answer.headers["Content-Type"]


@pytest.mark.parametrize("name", ["0", G1])
async def test_a_gpu_is_asked_by_index_or_uuid(tmp_path, name):
    status, text, kind = await post(tmp_path, f"/api/v1/gpus/{name}:recheck")

    assert 200 == status
    assert kind.startswith("application/json")
    for words in ('"Recheck"', '"bad"', '"serving": false', '"a reset"', '"passed"', '"ok"'):
        assert words in text


@pytest.mark.parametrize(("index", "told"), [(3, "3"), (NO_INDEX, "null")])
async def test_an_index_that_nobody_knows_is_told_as_none(tmp_path, index, told):
    async def ask(*_, **__):
        probe = Probe(G1, ProbeOutcome.PASSED)
        return Recheck(a_gpu(index=index, uuid=G1), probe, ILL, ILL, serving=False)

    _, text, _ = await post(tmp_path, f"/api/v1/gpus/{G1}:recheck", served=actions(ask))

    assert f'"gpu": {told},' in text


async def test_all_gpus_are_asked_at_once_and_one_that_left_meanwhile_is_left_out(tmp_path):
    all_asked = asyncio.Barrier(3)

    async def ask(name, **how):
        await all_asked.wait()  # nobody is answered before each was asked
        return await recheck(name, **how)

    async with asyncio.timeout(30):
        status, text, _ = await post(tmp_path, "/api/v1/gpus/all:recheck", served=actions(ask))
    document = json.loads(text)

    assert (200, "RecheckAll") == (status, document["kind"])
    assert [G1, G1] == [one["uuid"] for one in document["data"]["gpus"]]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (
            "/api/v1/gpus/9:recheck",
            "No shared GPU is named 9; shared GPUs: 0, 1, 2, or all.",
        ),
        ("/api/v1/gpus/GPU%208%1b:recheck", "No shared GPU is named GPU 8\ufffd"),
        ("/api/v1/gpus/0:explode", "No such action. There is: /api/v1/gpus/GPU:recheck"),
        ("/api/v1/gpus/..%2F:recheck", "No such action"),
        ("/livez", "No such action"),
    ],
)
async def test_what_is_not_there_is_not_found(tmp_path, path, words):
    status, text, _ = await post(tmp_path, path)

    assert 404 == status
    assert words in text


async def test_that_it_was_reset_is_told(tmp_path):
    _, text, _ = await post(tmp_path, "/api/v1/gpus/0:was-reset")

    assert [] == json.loads(text)["data"]["missing"]


@pytest.mark.parametrize("name", ["1", "all"])
async def test_where_no_gpu_is_shared_the_agent_is_to_be_stopped(tmp_path, name):
    served = actions(nobody, (), "it is in MIG mode")
    status, text, _ = await post(tmp_path, f"/api/v1/gpus/{name}:release", served=served)

    assert (409, True) == (status, "stop the agent for work on" in text)


@pytest.mark.parametrize(
    ("action", "way"),
    [("recheck", "."), ("release", "; `hami-agent release all` releases it too.")],
)
async def test_a_gpu_that_is_here_and_not_shared_is_told_so_with_the_reason(tmp_path, action, way):
    served = actions(nobody, left_out="it is in MIG mode")
    status, text, _ = await post(tmp_path, f"/api/v1/gpus/1:{action}", served=served)
    absent, _, _ = await post(tmp_path, f"/api/v1/gpus/9:{action}", served=served)

    assert (409, 404) == (status, absent)
    assert f"GPU 1 is not shared: it is in MIG mode{way}\n" == text


async def test_pages_are_served_beside_actions(tmp_path):
    assert (200, "ok") == (await post(tmp_path, "/livez", "GET"))[:2]
    assert 405 == (await post(tmp_path, "/livez", "PUT"))[0]


async def test_somebody_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(api, "peer_uid", lambda _: os.geteuid() + 1)

    assert 403 == (await post(tmp_path, "/api/v1/gpus/0:recheck"))[0]


async def test_there_are_no_actions_over_tcp():
    async with (
        WebServer(Listeners("127.0.0.1", 0), {}, actions().answer) as server,
        aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as client,
        client.post("/api/v1/gpus/0:recheck") as answer,
    ):
        assert 404 == answer.status

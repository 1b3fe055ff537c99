"""The action that changes limits: what is asked of the service, and each answer."""

import json
import os

import aiohttp
import msgspec
import pytest

from agent.core.errors import StateError
from agent.core.usage.limit_answer import LimitAnswer
from agent.core.usage.live_limits import LimitRefused, LimitWish
from agent.web import actions
from agent.web.actions import Actions
from agent.web.limits import LimitDoor
from agent.web.server import Listeners, WebServer
from tests.builders import G1, a_share
from tests.unit.core.usage.limit_scene import a_limited_row

pytestmark = pytest.mark.looptime(False)

ROW = a_limited_row(1, a_share(memory_mib=0))
AFTER = msgspec.structs.replace(ROW, live_limits=(a_share(memory_mib=4000, core_percent=0),))


class Limits:
    """Answers each wish alike and remembers it."""

    def __init__(self, answer: LimitAnswer | Exception) -> None:
        self.answer = answer
        self.wishes: list[LimitWish] = []

    async def limit(self, wish: LimitWish) -> LimitAnswer:
        self.wishes.append(wish)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def post(tmp_path, target, limits=None):
    asked = limits or Limits(LimitAnswer(ROW, AFTER))
    socket = tmp_path / "api.sock"
    served = Actions({}, LimitDoor(asked.limit, lambda: {G1: "0"}))
    async with (
        WebServer(Listeners(port=None, socket_path=socket), {}, served),
        aiohttp.ClientSession("http://a", connector=aiohttp.UnixConnector(str(socket))) as client,
        client.post(target) as answer,
    ):
        return answer.status, await answer.text()


@pytest.mark.parametrize(
    ("target", "wish"),
    [
        ("p1:limit?memoryMib=12288", LimitWish("p1", memory_mib=12288)),
        ("ml/p1:limit?cores=0&gpu=3", LimitWish("p1", "ml", gpu="3", core_percent=0)),
        ("p1:limit?reset=true&container=a", LimitWish("p1", container="a", reset=True)),
        (
            "p1:limit?memoryMib=1&cores=100&reset=false",
            LimitWish("p1", memory_mib=1, core_percent=100),
        ),
    ],
)
async def test_the_service_is_asked_for_exactly_that(tmp_path, target, wish):
    limits = Limits(LimitAnswer(ROW, AFTER))

    status, _ = await post(tmp_path, f"/api/v1/pods/{target}", limits)

    assert (200, [wish]) == (status, limits.wishes)


async def test_the_answer_has_each_gpu_as_it_is_as_it_was_and_as_it_was_answered(tmp_path):
    _, text = await post(tmp_path, "/api/v1/pods/p1:limit?memoryMib=4000&cores=0")
    document = json.loads(text)
    (gpu,) = document["data"].pop("gpus")

    assert ("hami-agent/v1", "Limit") == (document["apiVersion"], document["kind"])
    assert gpu == {
        "gpu": "0",
        "uuid": G1,
        "memoryMib": 4000,
        "cores": 0,
        "wasMemoryMib": 10_000,
        "wasCores": 30,
        "answeredMemoryMib": 10_000,
        "answeredCores": 30,
    }
    assert {"changed": True, "reset": False, "obstacle": ""}.items() <= document["data"].items()
    assert document["data"]["notes"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (LimitRefused("GPU 0 is full; end a pod."), 409),
        (LimitRefused("No pod p1 holds a GPU.", unknown=True), 404),
        (StateError("the disk is full"), 503),
    ],
)
async def test_a_refusal_is_told_as_it_is(tmp_path, error, status):
    found, text = await post(tmp_path, "/api/v1/pods/p1:limit?cores=1", Limits(error))

    assert status == found
    assert str(error) in text


@pytest.mark.parametrize(
    ("target", "status", "words"),
    [
        ("p1:limit", 400, "Give memoryMib, cores or both; or reset=true alone."),
        ("p1:limit?reset=true&cores=1", 400, "or reset=true alone"),
        ("p1:limit?reset=yes", 400, "or reset=true alone"),
        ("p1:limit?memoryMib=0", 400, "memoryMib must be a whole number of MiB"),
        ("p1:limit?memoryMib=12Gi", 400, "memoryMib must be"),
        ("p1:limit?memoryMib=99999999999", 400, "MiB, 1 to 2147483647."),
        ("p1:limit?cores=101", 400, "cores must be a whole number of percent"),
        ("p1:limit?core=1", 400, "There is no parameter core; there are: container, gpu"),
        ("a/b/p1:limit?cores=1", 404, "There is: /api/v1/pods/[NAMESPACE/]POD:limit"),
        ("p1:unlimit?cores=1", 404, "No such action."),
    ],
)
async def test_what_makes_no_sense_is_not_asked(tmp_path, target, status, words):
    limits = Limits(LimitAnswer(ROW, AFTER))

    found, text = await post(tmp_path, f"/api/v1/pods/{target}", limits)

    assert (status, []) == (found, limits.wishes)
    assert words in text


async def test_only_root_and_the_agent_change_limits_and_nobody_over_tcp(tmp_path, monkeypatch):
    limits = Limits(LimitAnswer(ROW, AFTER))
    monkeypatch.setattr(actions, "peer_uid", lambda _: os.geteuid() + 1)
    target = "/api/v1/pods/p1:limit?cores=1"
    served = Actions({}, LimitDoor(limits.limit, dict))

    status, _ = await post(tmp_path, target, limits)
    async with (
        WebServer(Listeners("127.0.0.1", 0), {}, served) as server,
        aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as client,
        client.post(target) as answer,
    ):
        assert (403, 404) == (status, answer.status)
    assert [] == limits.wishes

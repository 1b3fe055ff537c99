"""The read API: what each document says, who may read it, and what it costs."""

import datetime as dt
import itertools
from typing import cast

import msgspec
import pytest
from aiohttp import web

from agent.cluster import CORDON, MUTEX_LOCK, NodeView
from agent.model import NO_INDEX, Cause, Condition, GpuSample, Sampled
from agent.status import ContainerHistory, StatusDocument, open_envelope
from agent.web import api
from agent.web.api import Readers
from agent.web.policy import ReaderPolicy
from tests.builders import G1, NOON, a_gpu, a_health, a_shared_gpu, an_inventory
from tests.doors.api_facts import ENTRY, facts, reading

pytestmark = pytest.mark.looptime(False)


async def data(path, **parts):
    """The data of one document."""
    async with reading(lambda: facts(**parts)) as client, client.get(f"/api/v1/{path}") as answer:
        assert 200 == answer.status, await answer.text()
        return (await answer.json())["data"]


async def test_the_whole_status_can_be_read_back():
    async with reading(facts) as client, client.get("/api/v1/status") as answer:
        found, at = open_envelope(await answer.read(), "Status", StatusDocument)

    assert NOON == at
    assert ("node-1", "1.2.3", True) == (found.node.name, found.node.version, found.node.ready)
    assert [("state", True, ""), ("api", False, "down")] == [
        (check.name, check.ok, check.text) for check in found.node.checks
    ]
    (gpu,) = found.gpus
    assert (3, G1, "ok", True, 2, 1, 3000, 30) == (
        gpu.index,
        gpu.uuid,
        gpu.condition,
        gpu.serving,
        gpu.slices,
        gpu.slices_held,
        gpu.promised_mib,
        gpu.promised_cores,
    )
    (held,) = found.allocations or ()
    assert [("3", 3000, 30)] == [(one.gpu, one.memory_mib, one.cores) for one in held.shares]
    assert ["HA-2005"] == [entry.reason for entry in found.refusals or ()]


async def test_a_gpu_says_what_is_wrong_with_it_and_what_to_do():
    health = msgspec.structs.replace(
        a_health(condition=Condition.BAD, serving=False),
        cause=Cause.XID,
        text="off the bus [H-079]",
        action="reset",
        runbook="H-079",
    )
    shared = a_shared_gpu(gpu=a_gpu(uuid=G1, index=3), health=health)
    gpu = await data("gpus/3", inventory=an_inventory(gpus=[shared]))

    assert ("bad", False, "xid", "reset", "H-079", "off the bus [H-079]") == tuple(
        gpu[key] for key in ("condition", "serving", "cause", "action", "runbook", "text")
    )
    assert gpu == await data(f"gpus/{G1}", inventory=an_inventory(gpus=[shared]))


async def test_lock_and_cordon_come_from_the_node():
    lock = "2026-09-01T11:59:00Z,ns,pod"
    node = NodeView("node-1", "u", "1", {MUTEX_LOCK: lock, CORDON: f"GPU-x, {G1}"})

    assert {"since": "2026-09-01T11:59:00Z", "holder": "ns/pod"} == (await data("node", node=node))[
        "lock"
    ]
    assert [True] == [gpu["cordoned"] for gpu in await data("gpus", node=node)]
    strange = msgspec.structs.replace(node, annotations={MUTEX_LOCK: "x,y"})
    assert {"since": None, "holder": "x,y"} == (await data("node", node=strange))["lock"]


async def test_the_history_is_thirty_means_of_thirty_seconds():
    ages = {1: 40, 10: 60, 35: 80, 10_000: 99}
    samples = [
        Sampled(NOON - dt_seconds(age), GpuSample(G1, percent, None, 1024))
        for age, percent in ages.items()
    ]
    (gpu,) = await data("gpus", history=lambda _: samples)

    history = gpu["history"]
    assert (30, 30, "2026-09-01T12:00:30Z") == (
        history["periodSeconds"],
        len(history["gpuPercent"]),
        history["until"],
    )
    assert [None, 80, 50, None] == history["gpuPercent"][-4:]
    assert [None, 1024, 1024, None] == history["usedMib"][-4:]


def dt_seconds(seconds):
    return dt.timedelta(seconds=seconds)


async def test_settings_have_their_origin():
    assert [{"key": "web.port", "value": 9394, "origin": "default", "pending": False}] == (
        await data("settings")
    )


async def test_a_list_is_answered_whole_whatever_is_asked_of_it():
    entries = tuple(msgspec.structs.replace(ENTRY, pod=f"p{number}") for number in range(600))
    found = await data("refusals?limit=2&continue=4", refusals=entries)

    assert [entry.pod for entry in entries] == [entry["pod"] for entry in found]


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("nothing", 404, "/api/v1/status"),
        ("node/x", 404, "/api/v1/status"),
        ("gpus/9", 404, "No GPU of this node is named 9"),
        ("gpus/%1b%5b2J", 404, "\N{REPLACEMENT CHARACTER}[2J"),
    ],
)
async def test_what_is_not_there_is_said_in_a_sentence(path, status, said):
    async with reading(facts) as client, client.get(f"/api/v1/{path}") as answer:
        assert status == answer.status
        assert said in await answer.text()


async def test_an_agent_that_still_loads_says_so():
    async with reading(lambda: None) as client, client.get("/api/v1/status") as answer:
        assert (503, True) == (
            answer.status,
            "This agent stands by; ask again when it serves." in await answer.text(),
        )


@pytest.mark.parametrize("path", ["status", "refusals", "gpus/3"])
async def test_what_did_not_change_is_not_sent_again(path, monkeypatch):
    monkeypatch.setattr(api, "KEPT", 0.0)
    looks = itertools.count()
    promised = lambda: a_shared_gpu(gpu=a_gpu(uuid=G1, index=3), registered_mib=next(looks) // 3)  # noqa: E731
    made = lambda: facts(inventory=an_inventory(gpus=[promised()]))  # noqa: E731
    async with reading(made) as client:
        async with client.get(f"/api/v1/{path}") as answer:
            known = {"If-None-Match": answer.headers["ETag"]}
        async with client.get(f"/api/v1/{path}", headers=known) as answer:
            assert (304, b"") == (answer.status, await answer.read())
        async with client.head(f"/api/v1/{path}", headers={"If-None-Match": '"x"'}) as answer:
            assert 200 == answer.status
        async with client.get(f"/api/v1/{path}", headers=known) as answer:
            assert (304 if path == "refusals" else 200) == answer.status


@pytest.mark.parametrize("path", ["status", "allocations", "gpus", "gpus/3"])
async def test_many_readers_cost_one_look_whatever_they_ask(path, monkeypatch):
    looks = []

    def made():
        looks.append(1)
        return facts()

    monkeypatch.setattr(api, "KEPT", 60.0)
    async with reading(made) as client:
        for first in range(5):
            async with client.get(f"/api/v1/{path}?continue={first}&limit={first}") as answer:
                assert 200 == answer.status

    assert 1 == len(looks)


async def test_a_gpu_without_an_index_is_not_named_none():
    unknown = an_inventory(gpus=[a_shared_gpu(gpu=a_gpu(uuid=G1, index=NO_INDEX))])
    async with reading(lambda: facts(inventory=unknown)) as client:
        async with client.get("/api/v1/gpus/None") as answer:
            assert 404 == answer.status
        async with client.get(f"/api/v1/gpus/{G1}") as answer:
            assert 200 == answer.status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
async def test_over_tcp_nothing_is_changed(method):
    async with reading(facts) as client, client.request(method, "/api/v1/gpus/3") as answer:
        assert 405 == answer.status


async def test_a_browser_that_was_led_here_by_another_name_reads_nothing():
    async with reading(facts) as client:
        for host, status in {
            "evil.example": 403,
            "evil.example:9394": 403,
            "localhost:9394": 200,
            "127.0.0.1": 200,
            "[::1]:9394": 200,
        }.items():
            async with client.get("/api/v1/node", headers={"Host": host}) as answer:
                assert status == answer.status, host


class FakePeer:
    """A request from an address."""

    path = "/api/v1/node"

    def __init__(self, peer):
        self.headers = {"Host": "10.0.0.7:9394"}
        self.transport = self
        self._peer = peer

    def get_extra_info(self, name):
        return self._peer if name == "peername" else None


@pytest.mark.parametrize(
    ("peer", "policy", "refused"),
    [
        (("10.0.0.9", 1), ReaderPolicy.LOCAL, True),
        (("::ffff:10.0.0.9", 1, 0, 0), ReaderPolicy.LOCAL, True),
        (("fe80::1%eth0", 1, 0, 0), ReaderPolicy.LOCAL, True),
        (("10.0.0.9", 1), ReaderPolicy.ALL, False),
        ("", ReaderPolicy.LOCAL, False),
    ],
)
def test_from_elsewhere_only_those_read_whom_the_setting_lets(peer, policy, refused):
    answer = Readers(policy).refused(cast("web.BaseRequest", FakePeer(peer)))

    assert refused == (answer is not None)
    if answer is not None:
        assert (403, True) == (answer.status, "web.readers: all" in (answer.text or ""))


async def test_what_containers_used_lately_is_a_list_of_its_own():
    """Means of 30 s, as for GPUs. A GPU that the container has no number of is not in it."""
    past = [
        Sampled(NOON - dt.timedelta(seconds=age), GpuSample(G1, percent, used_mib=mib))
        for age, mib, percent in ((50, 100, 10), (45, 300, 30), (5, 800, 40))
    ]
    async with (
        reading(lambda: facts(past=lambda _: {G1: past})) as client,
        client.get("/api/v1/container-history") as answer,
    ):
        (found,), _ = open_envelope(
            await answer.read(), "ContainerHistories", tuple[ContainerHistory, ...]
        )

    assert ("team-a", "train-0", "main", "3", G1) == (
        *(found.namespace, found.pod, found.container),
        *(found.gpu, found.uuid),
    )
    assert (30, (200, 800), (20, 40)) == (
        found.history.period_seconds,
        tuple(filter(None, found.history.used_mib)),
        tuple(filter(None, found.history.gpu_percent)),
    )


async def test_without_samples_there_is_no_history():
    async with reading(facts) as client, client.get("/api/v1/container-history") as answer:
        assert [] == (await answer.json())["data"]

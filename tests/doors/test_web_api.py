"""The read API: what each document says, who may read it, and what it costs."""

import asyncio
import datetime as dt
import itertools
import json
import os
import types
from typing import cast

import aiohttp
import msgspec
import pytest
import structlog
from aiohttp import web

from agent.allocate.room import promised
from agent.app import web as app_web
from agent.app.agent import NodeAgent
from agent.app.web import GpuActions
from agent.cluster import NodeView, Phase, PodTable, Role
from agent.health.watch import GpuRelease, Recheck
from agent.kit.cell import Cell
from agent.ledger import Decider, JournalEntry, KubeletEpoch, Ledger
from agent.model import (
    Condition,
    GpuFault,
    Inventory,
    Probe,
    ProbeOutcome,
    SliceGroup,
    SliceList,
    slice_id,
)
from agent.node import Check
from agent.status import (
    NodeStatus,
    SettingStatus,
    StatusDocument,
    StatusFacts,
    gpus_of,
    open_envelope,
    status_of,
)
from agent.web import server
from agent.web.server import reading_pages, refuse_reader, serve_port, serve_socket
from tests.builders import (
    EPOCH,
    G1,
    G2,
    NOON,
    a_container,
    a_container_use,
    a_gpu,
    a_gpu_use,
    a_health,
    a_pod,
    a_pod_uid,
    a_row,
    a_share,
    a_shared_gpu,
    a_uuid,
    an_inventory,
)
from tests.doors.metrics_page import facts as cells_of
from tests.doors.metrics_page import series
from tests.doors.page_facts import busy
from tests.doors.web_client import FakePeer, client_of
from tests.recorded import golden
from tests.unit.core.allocation.plain_scene import a_plain_row

pytestmark = pytest.mark.looptime(False)


async def documents() -> str:
    """Those of a busy node, an entry a line."""
    node = busy(gpus=4, each=1)
    refusals, changes = node.refusals()[:2], node.changes()[:4]
    entries = {"refusals": lambda: refusals, "changes": lambda: changes}
    node = msgspec.structs.replace(node, settings=lambda: busy().settings()[:4], **entries)
    lines = []
    async with reading(lambda: node) as client:
        for part in ("status", "settings"):
            async with client.get(f"/api/v1/{part}") as answer:
                made = await answer.json()
            kind, data = f"{made['apiVersion']} {made['kind']}", made["data"]
            lines.append(f"{kind} {made['generatedAt']}")
            for name, value in data.items() if isinstance(data, dict) else [("", data)]:
                lines += [name] * bool(name)
                lines += [
                    json.dumps(one) for one in (value if isinstance(value, list) else [value])
                ]
        async with client.get("/api/v1/status") as answer:
            found, _ = open_envelope(await answer.read(), "Status", StatusDocument)
    assert (4, 4, 2, 4) == tuple(
        len(part or ()) for part in (found.gpus, found.allocations, found.refusals, found.changes)
    )
    return "".join(f"{line}\n" for line in lines)


async def test_each_document_of_a_busy_node():
    found = await documents()

    assert golden("api.txt", found) == found


@pytest.mark.parametrize("path", ["nothing", "node/x"])
async def test_what_is_not_there_is_answered_with_what_is(path):
    async with reading(facts) as client, client.get(f"/api/v1/{path}") as answer:
        assert (404, True) == (answer.status, "/api/v1/status" in await answer.text())


@pytest.mark.parametrize("path", ["/api/v1/status", "/", "/api/v1/settings"])
async def test_what_did_not_change_is_not_sent_again(path, monkeypatch):
    monkeypatch.setattr(server, "KEPT", 0.0)
    looks = itertools.count()
    promised = lambda: a_shared_gpu(gpu=a_gpu(uuid=G1, index=3), registered_mib=next(looks) // 3)  # noqa: E731
    made = lambda: facts(inventory=an_inventory(gpus=[promised()]))  # noqa: E731
    async with reading(made) as client:
        async with client.get(path) as answer:
            known = {"If-None-Match": f'"x", {answer.headers["ETag"]}'}
        async with client.get(path, headers=known) as answer:
            assert (304, b"") == (answer.status, await answer.read())
        async with client.head(path, headers={"If-None-Match": '"x"'}) as answer:
            assert 200 == answer.status
        async with client.get(path, headers=known) as answer:
            assert (304 if path.endswith("settings") else 200) == answer.status


@pytest.mark.parametrize("path", ["/api/v1/status", "/"])
async def test_many_readers_cost_one_look_and_have_all_whatever_they_ask(path, monkeypatch):
    looks = []
    entries = tuple(msgspec.structs.replace(ENTRY, pod=f"p{number}") for number in range(600))

    def made():
        looks.append(1)
        return facts(refusals=lambda: entries)

    assert 0.5 == server.KEPT
    monkeypatch.setattr(server, "KEPT", 60.0)
    async with reading(made) as client:
        for first in range(5):
            async with client.get(f"{path}?continue={first}&limit={first}") as answer:
                assert 200 == answer.status
                text = await answer.text()
                assert path == "/" or all(f'"pod":"{one.pod}"' in text for one in entries)

    assert 1 == len(looks)


@pytest.mark.parametrize("path", ["/api/v1/status", "/"])
async def test_a_browser_that_was_led_here_by_another_name_reads_nothing(path):
    async with reading(facts) as client:
        for host, status in {
            "evil.example": 403,
            "evil.example:9394": 403,
            "localhost:9394": 200,
            "127.0.0.1": 200,
            "[::1]:9394": 200,
        }.items():
            async with client.get(path, headers={"Host": host}) as answer:
                assert (status, path == "/" and status == 200) == (
                    answer.status,
                    "script-src" in answer.headers["Content-Security-Policy"],
                ), host


OURS = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


@pytest.mark.parametrize(
    ("peer", "policy", "refused"),
    [
        (("10.0.0.9", 1), "local", True),
        (("::ffff:10.0.0.9", 1, 0, 0), "local", True),
        (("fe80::1%eth0", 1, 0, 0), "local", True),
        (("10.0.0.9", 1), "all", False),
        ("", "local", False),
        *((((address, 1, 0, 0)), "local", False) for address in OURS),
    ],
)
def test_from_elsewhere_only_those_read_whom_the_setting_lets(peer, policy, refused):
    host = "localhost:9394" if peer and peer[0] in OURS else "10.0.0.7:9394"
    answer = refuse_reader(cast("web.BaseRequest", FakePeer(peer, host=host)), policy)

    assert refused == (answer is not None)
    if answer is not None:
        assert (403, "text/plain") == (answer.status, answer.content_type)
        for words in ("kubectl port-forward", "web.readers: all", "NetworkPolicy"):
            assert words in (answer.text or "")


ILL = a_health(condition=Condition.BAD, cause="xid", text="XID 48 [H-048]")


GPUS = tuple(
    a_shared_gpu(gpu=a_gpu(uuid=uuid, index=n)) for n, uuid in enumerate((G1, G2, "GPU-gone"))
)


async def recheck(name, *, was_reset):
    if name not in {"0", G1, G2}:
        return None
    uuid = G1 if name == "0" else name
    probe = Probe(uuid, ProbeOutcome.PASSED)
    missing = () if was_reset else ("a reset",)
    return Recheck(a_gpu(uuid=uuid), probe, a_health(), ILL, serving=False, missing=missing)


async def nobody(*_, **__):
    return None


def actions(ask=recheck, gpus=GPUS, left_out="", release=nobody, rows=()):
    """Those of an agent that asks so and shares these GPUs."""
    faults = (GpuFault("1", left_out),) if left_out else ()
    agent = types.SimpleNamespace(
        health=types.SimpleNamespace(recheck=ask, release=release),
        state=types.SimpleNamespace(ledger=Cell(Ledger(rows))),
        keeper=types.SimpleNamespace(left_out=Cell(faults)),
        facts=types.SimpleNamespace(inventory=Cell(Inventory(gpus=gpus)), pods=Cell(PodTable())),
    )
    return GpuActions(cast("NodeAgent", agent))


async def post(tmp_path, path, method="POST", served=None):
    socket = tmp_path / "api.sock"
    pages = {"/livez": lambda _: web.Response(text="ok")}
    connector = aiohttp.UnixConnector(str(socket))
    answer_to = (served or actions()).answer
    async with (
        serve_socket(pages, socket, answer_to),
        aiohttp.ClientSession("http://agent", connector=connector) as client,
        client.request(method, path) as answer,
    ):
        return answer.status, await answer.text(), answer.headers["Content-Type"]


@pytest.mark.parametrize("name", ["0", G1])
async def test_a_gpu_is_asked_by_index_or_uuid(tmp_path, name):
    status, text, kind = await post(tmp_path, f"/api/v1/gpus/{name}:recheck")

    assert (200, "application/json") == (status, kind)
    for words in ('"Recheck"', '"bad"', '"serving":false', '"a reset"', '"passed"', '"ok"'):
        assert words in text
    assert '"since":"2026-09-01T12:00:00Z"' in text
    _, text, _ = await post(tmp_path, f"/api/v1/gpus/{name}:was-reset")
    assert [] == json.loads(text)["data"]["missing"]


async def test_all_gpus_are_asked_at_once_and_one_that_left_meanwhile_is_left_out(tmp_path):
    all_asked = asyncio.Barrier(3)

    async def ask(name, **how):
        await all_asked.wait()  # nobody is answered before each was asked
        return await recheck(name, **how)

    async with asyncio.timeout(30):
        status, text, _ = await post(tmp_path, "/api/v1/gpus/all:recheck", served=actions(ask))
    document = json.loads(text)

    assert (200, "RecheckAll") == (status, document["kind"])
    assert [G1, G2] == [one["uuid"] for one in document["data"]["gpus"]]


ALONE = (nobody, (), "it is in MIG mode")
SOME = (nobody, GPUS, "it is in MIG mode")


@pytest.mark.parametrize(
    ("path", "made", "status", "words"),
    [
        ("gpus/9:recheck", (), 404, "is named 9; shared GPUs: 0, 1, 2, or all."),
        ("gpus/GPU%208%1b:recheck", (), 404, "No shared GPU is named GPU 8\ufffd"),
        ("gpus/0:explode", (), 404, "No such action. There is: /api/v1/gpus/GPU:recheck"),
        ("gpus/..%2F:recheck", (), 404, "No such action"),
        ("../../livez", (), 404, "No such action"),
        ("gpus/1:release", ALONE, 409, "stop the agent for work on"),
        ("gpus/all:release", ALONE, 409, "stop the agent for work on"),
        ("gpus/1:recheck", SOME, 409, "GPU 1 is not shared: it is in MIG mode.\n"),
        (
            *("gpus/1:release", SOME, 409),
            "GPU 1 is not shared: it is in MIG mode; `hami-agent release all` releases it too.\n",
        ),
        ("gpus/9:release", SOME, 404, "No shared GPU is named 9"),
    ],
)
async def test_what_cannot_be_done_is_said_with_what_can(tmp_path, path, made, status, words):
    found, text, _ = await post(tmp_path, f"/api/v1/{path}", served=actions(*made))

    assert (status, True) == (found, words in text)


@pytest.mark.parametrize("obstacle", ["", "a call has not come back"])
async def test_a_release_names_who_still_has_the_gpu(tmp_path, obstacle):
    async def release(_):
        return GpuRelease((G1,), obstacle=obstacle)

    rows = (a_row(shares=(a_share(uuid=G1),)), a_row(pod="other", shares=(a_share(uuid=G2),)))
    served = actions(release=release, rows=rows)
    status, text, _ = await post(tmp_path, "/api/v1/gpus/0:release", served=served)

    found = {"gpus": [G1], "labels": ["0"], "heldBy": ["team-a/train-0"], "released": not obstacle}
    assert (200, found | {"obstacle": obstacle}) == (status, json.loads(text)["data"])


async def test_somebody_else_is_refused_and_one_line_a_minute_tells_it(tmp_path, monkeypatch):
    monkeypatch.setattr(app_web, "peer_uid", lambda _: os.geteuid() + 1)
    served = actions()

    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            assert 403 == (await post(tmp_path, "/api/v1/gpus/0:recheck", served=served))[0]

    assert 1 == [line["event"] for line in logs].count("web.action_refused")


async def test_there_are_no_actions_over_tcp():
    async with (
        serve_port({}, "127.0.0.1", 0) as port,
        aiohttp.request("POST", f"http://127.0.0.1:{port}/api/v1/gpus/0:recheck") as answer,
    ):
        assert 404 == answer.status


GPU = a_shared_gpu(gpu=a_gpu(index=0), registered_mib=81559)
INIT, MAIN = a_container(name="init", role=Role.INIT), a_container()
PAST = tuple(
    msgspec.structs.replace(one, has_run=True, succeeded=one.role is Role.INIT)
    for one in (INIT, MAIN)
)
RUNS, OTHER = a_pod(phase=Phase.RUNNING), a_pod(uid=a_pod_uid(3), phase=Phase.RUNNING)
PAST_INIT = a_pod(containers=PAST, phase=Phase.RUNNING)
SHARES = (a_share(uuid=a_uuid(0), memory_mib=70000),)
ROW, OF_INIT = a_row(shares=SHARES), a_row(container="init", role=Role.INIT, shares=SHARES)
PLAIN = msgspec.structs.replace(a_plain_row(), shares=SHARES)
BESIDE = a_row(
    pod_uid=a_pod_uid(9), pod="other", shares=(a_share(uuid=a_uuid(0), memory_mib=60000),)
)
SEEN = {
    "it runs": (RUNS, ROW, False),
    "it is being admitted": (a_pod(), ROW, False),
    "it was deleted": (None, ROW, True),
    "it was deleted, and one of its name is there": (OTHER, ROW, True),
    "it was deleted before the watch broke": (None, ROW, True, {"stale": True}),
    "it succeeded": (a_pod(phase=Phase.SUCCEEDED), ROW, True),
    "it failed": (a_pod(phase=Phase.FAILED), ROW, True),
    "the pods are not known yet": (None, ROW, False, {"synced": False}),
    "its init phase goes on": (a_pod(containers=(INIT, MAIN)), OF_INIT, False),
    "its init phase is over": (PAST_INIT, OF_INIT, True),
    "the kubelet decides": (None, PLAIN, False),
}
"""The pod and row of one container of 70,000 MiB, and whether it has ended."""


def table_of(pod, *, synced=True, stale=False):
    """The pod, beside another one that runs."""
    pods = (a_pod(uid=a_pod_uid(9), name="other", phase=Phase.RUNNING), *([pod] if pod else []))
    return PodTable({one.uid: one for one in pods if synced}, (), synced=synced, stale=stale)


def document(row, table):
    inventory = an_inventory(gpus=[GPU])
    use = a_container_use(a_gpu_use(a_uuid(0)))
    ledger = Ledger((row, BESIDE))
    return status_of(facts(ledger=ledger, pods=table, inventory=inventory, used=lambda _: use))


@pytest.mark.parametrize("seen", SEEN.values(), ids=SEEN)
async def test_what_has_ended_is_told_and_the_sum_is_the_one_that_the_next_pod_meets(seen):
    """tests/golden has how the faces show it."""
    pod, row, ended, *more = seen
    table, mib = table_of(pod, **dict(*more)), 60000 if ended else 130000
    cells = cells_of(an_inventory(gpus=[GPU]), rows=(row, BESIDE), pods=table)
    found = document(row, table)

    assert mib == promised(Ledger((row, BESIDE)), table, GPU).memory_mib
    assert {("", "0"): mib * 2**20} == await series(cells, "hami_agent_memory_allocated_bytes")
    assert mib == found.gpus[0].promised_mib

    (one,) = (each for each in found.allocations if each.shares[0].memory_mib == 70000)
    served = await series(cells, "hami_agent_container_memory_allocated_bytes")
    assert ended == one.ended == (one.shares[0].used_mib is None)
    is_named = row.holder is not None and not ended
    assert is_named == (70000 * 2**20 in served.values())

    # That nothing keeps its limits is said while it runs.
    off = pod and msgspec.structs.replace(pod, runtime_class="kata")
    unkept = {
        one.pod for one in document(row, table_of(off, **dict(*more))).allocations if one.unkept
    }
    knows = row.key.pod_uid in table.pods
    assert ({row.pod} if knows and not ended else set()) == unkept


ASTRAY = a_row(shares=(a_share(uuid=G1),), slice_ids=(slice_id(G2, 0),))
BARE = msgspec.structs.replace(a_row(container="taken", shares=()), slice_ids=ASTRAY.slice_ids)


def plain_rows(*shares):
    """The kubelet asked again with the ids of an answer that it had not booked."""
    one = a_row(shares=shares, slice_ids=(slice_id(G1, 0),))
    return tuple(
        msgspec.structs.replace(
            one, key=msgspec.structs.replace(one.key, container=name), decided_by=Decider.KUBELET
        )
        for name in ("first", "again")
    )


@pytest.mark.parametrize(
    ("rows", "held"),
    [
        # The kubelet booked a slice of another GPU than the container works on.
        ((ASTRAY,), [1, 0]),
        ((ASTRAY, BARE), [1, 1]),
        # A slice that two rows of plain mode have counts once.
        (plain_rows(), [1, 0]),
        (plain_rows(a_share(uuid=G1)), [1, 0]),
    ],
)
def test_a_slice_counts_once_for_the_gpu_that_the_container_works_on(rows, held):
    gpus = [a_shared_gpu(gpu=a_gpu(uuid=uuid)) for uuid in (G1, G2)]
    found = facts(inventory=an_inventory(gpus=gpus), ledger=Ledger(rows))

    assert held == [gpu.slices_held for gpu in gpus_of(found)]


@pytest.mark.parametrize(
    ("confirmed", "kubelet", "said"),
    [
        (True, EPOCH, True),
        (True, msgspec.structs.replace(EPOCH, inode=8), False),
        (False, EPOCH, False),
        (True, None, None),
    ],
)
def test_an_answer_is_recorded_if_the_present_kubelet_has_it(confirmed, kubelet, said):
    ledger = Ledger((a_row(confirmed=confirmed),))
    (one,) = status_of(facts(ledger=ledger, kubelet=kubelet)).allocations or ()

    assert said is one.confirmed


@pytest.mark.parametrize(("seconds", "said"), [(89, None), (91, False)])
def test_until_the_agent_has_read_a_new_kubelet_it_says_nothing_of_earlier_answers(seconds, said):
    since = NOON - dt.timedelta(seconds=seconds)
    new = KubeletEpoch(8, int(since.timestamp()) * 1_000_000_000)
    rows = tuple(
        a_row(pod=pod, confirmed=True, answered_at=at)
        for pod, at in (("before", since - dt.timedelta(hours=1)), ("later", NOON))
    )
    before, later = status_of(facts(ledger=Ledger(rows), kubelet=new)).allocations or ()

    assert (said, False) == (before.confirmed, later.confirmed)


ENTRY = JournalEntry(NOON, "HA-2005", "there is no lock", namespace="ns", pod="late")


def facts(**parts) -> StatusFacts:
    shared = a_shared_gpu(gpu=a_gpu(uuid=G1, index=3))
    basis = StatusFacts(
        now=NOON,
        about=NodeStatus(name="node-1", version="1.2.3", started_at=NOON, split_count=10),
        checks=(Check("state", ok=True), Check("api", ok=False, text="down", required=False)),
        node=NodeView("node-1", "u", "1"),
        inventory=an_inventory(gpus=[shared]),
        slices=SliceList(1, (SliceGroup(G1, (slice_id(G1, 0), slice_id(G1, 1)), True, 0),)),
        ledger=Ledger((a_row(shares=(a_share(),)),)),
        newest=lambda _: None,
        used=lambda _: None,
        changes=tuple,
        refusals=lambda: (ENTRY,),
        journal_since=lambda: NOON,
        settings=lambda: (SettingStatus(key="web.port", value=9394, origin="default"),),
        kubelet=EPOCH,
    )
    return msgspec.structs.replace(basis, **parts)


def reading(made, policy="local"):
    """A client of a server whose facts are `made()`."""
    return client_of(reading_pages(made, policy))

"""`doctor` beside a running agent: each fault is one line, and no other is.

tests/unit/core/node/test_doctor.py has what is said of each fact. Here the facts are looked up.
"""

import asyncio
import datetime as dt
import json
from collections.abc import Awaitable, Callable

import pytest

from agent.cluster import HANDSHAKE, MUTEX_LOCK, REGISTER
from agent.kit.timing import SystemClock
from agent.sandbox.apiserver import WRITES
from agent.sandbox.kubelet.podloop import NodeReporter
from agent.sandbox.lab.cluster import NODE, RESOURCE, SandboxCluster
from agent.sandbox.scheduler.verbs import encode_node_lock
from tests.process.agent_process import comes, offers, run
from tests.process.doctored_node import ACCOUNT, SLICES, a_node, doctored, edit, faults, token_of

pytestmark = [
    pytest.mark.process,
    pytest.mark.looptime(False),
    pytest.mark.timeout(120),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("no_log"),
]
WRONG, NOTE = "wrong", "note"


async def test_where_nothing_is_wrong_no_line_is(well: SandboxCluster):
    ended = await asyncio.to_thread(run, "doctor", *well.command()[1:], "-o", "json")

    findings = json.loads(ended.stdout)["data"]["findings"]
    assert ([], 0, "") == (faults(findings), ended.returncode, ended.stderr)
    assert {"P-OFFER", "P-AGENT", "P-PLUGIN", "P-RIGHTS", "P-REPORT", "P-PRELOAD"} <= {
        one["id"] for one in findings
    }


# Faults of a node, one at a time.


async def others_wrote_on_the_node(node: SandboxCluster) -> None:
    """Fewer slices than registered, a lock that stays, a node that the scheduler dropped."""
    await end_scheduler(node)
    since = SystemClock().now() - dt.timedelta(seconds=400)
    limits = {"resources": {"limits": {RESOURCE: "1"}}}
    spec = {"schedulerName": "none", "containers": [{"name": "main", **limits}]}
    node.store.create("pods", {"metadata": {"name": "late", "namespace": "demo"}, "spec": spec})
    lock = encode_node_lock(since, "demo", "late")
    edit(node, annotations={HANDSHAKE: "Deleted_2026-11-20 10:00:00", MUTEX_LOCK: lock})

    def fewer(stored):
        stored["status"]["allocatable"][RESOURCE] = "12"
        return stored

    node.store.update("nodes", "", NODE, fewer)


async def a_gpu_is_released(node: SandboxCluster) -> None:
    socket = str(node.places.run / "api.sock")
    ended = await asyncio.to_thread(run, "release", "0", "--socket", socket)
    assert (0, "") == (ended.returncode, ended.stderr)
    await half_is_offered(node)


async def half_is_offered(node: SandboxCluster) -> None:
    """To kube-scheduler, and to HAMi's."""
    assert await offers(node, SLICES // 2)
    # HAMi's form leaves out what is false.
    assert await comes(lambda: node.node_annotations()[REGISTER].count('"health":true') == 1)


async def end_scheduler(node: SandboxCluster) -> None:
    """It would take notice of what is seeded."""
    (task,) = [
        one for one in node.tasks._tasks if "SchedulerModel.run" in one.get_coro().__qualname__
    ]
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize(
    ("fault", "expected", "said", "code"),
    [
        (
            others_wrote_on_the_node,
            [("P-OFFER", WRONG), ("P-REPORT", WRONG), ("P-LOCK", WRONG)],
            "held by demo/late for 6 min",
            1,
        ),
        (a_gpu_is_released, [("P-GPU", NOTE)], "is released: an operator released it", 0),
    ],
)
async def test_a_fault_is_found_alone(
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[SandboxCluster], Awaitable[None]],
    expected: list[tuple[str, str]],
    said: str,
    code: int,
):
    async with a_node("sharing: {splitCount: 10}\n") as node:
        if fault is others_wrote_on_the_node:
            # The next report of the kubelet would undo what is seeded.
            monkeypatch.setattr(NodeReporter, "_report", lambda *_: None)
        await fault(node)
        ended, findings = await doctored(node)

    assert (expected, code) == (faults(findings), ended)
    assert [] != [one for one in findings if said in one["said"]]


def requests_of(node: SandboxCluster, user: str) -> dict[bool, int]:
    """How many requests the user made, those for a change apart; a review changes nothing."""
    counts = {True: 0, False: 0}
    for (who, verb, resource), count in node.api.journal.counts.items():
        if who == user:
            counts[verb in WRITES and "reviews" not in resource] += count
    return counts


def settled(node: SandboxCluster) -> dict[str, str]:
    """The Node's annotations but the handshake, which the scheduler writes again and again."""
    return {key: text for key, text in node.node_annotations().items() if key != HANDSHAKE}


async def test_nothing_is_changed_and_only_what_is_wanted_is_looked_at(well: SandboxCluster):
    flags, before = token_of(well, ACCOUNT), requests_of(well, ACCOUNT)
    notes, files = settled(well), sorted(well.places.root.rglob("*"))

    _, few = await doctored(well, "--only", "paths,library", *flags)
    assert {"paths", "library"} == {one["group"] for one in few}
    assert before == requests_of(well, ACCOUNT)
    await doctored(well, *flags)

    assert notes == settled(well)
    assert before[True] == requests_of(well, ACCOUNT)[True]
    assert before[False] < requests_of(well, ACCOUNT)[False]
    assert files == sorted(well.places.root.rglob("*"))

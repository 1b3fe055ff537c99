"""`doctor` beside a running agent: nothing on a node that is well, and each fault alone.

tests/unit/core/node/test_doctor.py has what is said of each fact. Here the facts are looked up.
"""

import asyncio
import datetime as dt
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.cluster import HANDSHAKE, MUTEX_LOCK, REGISTER
from agent.kit.timing import SystemClock
from agent.sandbox.apiserver import WRITES
from agent.sandbox.apiserver_requests import ACCOUNT_PREFIX
from agent.sandbox.kubelet.podloop import NodeReporter
from agent.sandbox.lab.cluster import NODE, RESOURCE, SandboxCluster, kubeconfig, open_cluster
from agent.sandbox.scheduler.verbs import encode_node_lock
from tests.process.agent_process import PATIENCE, comes, copied_settings, options, run, started

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(120)]

ACCOUNT = f"{ACCOUNT_PREFIX}kube-system:hami-agent"
SLICES = 20


@pytest.fixture
async def node() -> AsyncIterator[SandboxCluster]:
    """A node on which an agent serves and nothing is wrong."""
    hami = Path(__file__).with_name("device-config.yaml")
    async with open_cluster(options("--device-config", str(hami), gpus=2)) as opened:
        cluster = await started(opened, SLICES)
        edit(cluster, "labels", gpu="on")
        pid = cluster.agent.pid

        def is_at_rest() -> bool:
            copy, doors = copied_settings(cluster), cluster.log.of("web.listening", pid)
            labels = copy.labels if copy is not None else None
            reported = {REGISTER, HANDSHAKE} <= cluster.node_annotations().keys()
            return reported and len(doors) == 2 and "gpu" in (labels or {})

        assert await comes(is_at_rest)
        yield cluster


def edit(cluster: SandboxCluster, key: str, **more: str) -> None:
    def change(node):
        node["metadata"][key] = {**node["metadata"].get(key, {}), **more}
        return node

    cluster.store.update("nodes", "", NODE, change)


async def doctored(node: SandboxCluster, *flags: str) -> tuple[int, list[dict]]:
    """The exit code, and what `doctor` found that does not follow from something else."""
    words = ("doctor", *node.command()[1:], *flags, "-o", "json")
    ended = await asyncio.to_thread(run, *words)
    found = json.loads(ended.stdout)["data"]["findings"]
    return ended.returncode, [one for one in found if "(follows from " not in one["said"]]


def faults(findings: list[dict]) -> set[str]:
    return {f"{one['id']} {one['verdict']}" for one in findings if one["verdict"] != "ok"}


async def test_nothing_is_wrong_where_all_is_well_and_nothing_is_changed_by_looking(node):
    node.api.tokens[ACCOUNT] = ACCOUNT
    path = node.places.root / "other-kubeconfig"
    path.write_text(kubeconfig(node.api.url, ACCOUNT))
    files = sorted(node.places.root.rglob("*"))

    def requests() -> set[tuple[str, ...]]:
        return {
            (verb, resource) for who, verb, resource in node.api.journal.counts if who == ACCOUNT
        }

    def settled() -> dict[str, str]:
        """The scheduler writes the handshake again and again."""
        return {key: text for key, text in node.node_annotations().items() if key != HANDSHAKE}

    before = settled()
    flags = ("--kubeconfig", str(path))
    _, few = await doctored(node, "--only", "paths,library", *flags)
    assert {"paths", "library"} == {one["group"] for one in few}
    assert not requests()
    code, findings = await doctored(node, *flags)

    assert (0, set()) == (code, faults(findings))
    ids = {"P-OFFER", "P-AGENT", "P-PLUGIN", "P-RIGHTS", "P-REPORT", "P-PRELOAD"}
    assert ids <= {one["id"] for one in findings}
    assert not {what for verb, what in requests() if verb in WRITES and "reviews" not in what}
    assert requests()
    assert (before, files) == (settled(), sorted(node.places.root.rglob("*")))


async def test_what_others_wrote_on_the_node_and_a_released_gpu_are_found(node, monkeypatch):
    """Fewer slices than registered, a lock that stays, a node that the scheduler dropped."""
    ended = await asyncio.to_thread(
        run, "release", "0", "--socket", str(node.places.run / "api.sock")
    )
    assert (0, "") == (ended.returncode, ended.stderr)
    assert await node.until(lambda: node.allocatable() == SLICES // 2, PATIENCE)
    # HAMi's form leaves out what is false.
    assert await comes(lambda: node.node_annotations()[REGISTER].count('"health":true') == 1)
    assert {"P-GPU note"} == faults((await doctored(node))[1])

    # The next report of the kubelet would undo what is seeded, and the scheduler take notice.
    monkeypatch.setattr(NodeReporter, "_report", lambda *_: None)
    (task,) = [one for one in node.tasks._tasks if "SchedulerModel.run" in str(one.get_coro())]
    task.cancel()
    await asyncio.wait([task])
    limits = {"resources": {"limits": {RESOURCE: "1"}}}
    spec = {"schedulerName": "none", "containers": [{"name": "main", **limits}]}
    node.store.create("pods", {"metadata": {"name": "late", "namespace": "demo"}, "spec": spec})
    lock = encode_node_lock(SystemClock().now() - dt.timedelta(seconds=400), "demo", "late")
    edit(node, "annotations", **{HANDSHAKE: "Deleted_2026-11-20 10:00:00", MUTEX_LOCK: lock})

    def fewer(stored):
        stored["status"]["allocatable"][RESOURCE] = "2"
        return stored

    node.store.update("nodes", "", NODE, fewer)
    code, found = await doctored(node)

    wanted = {"P-GPU note", "P-OFFER wrong", "P-REPORT wrong", "P-LOCK wrong"}
    assert (1, wanted) == (code, faults(found))
    assert [one for one in found if "held by demo/late for 6 min" in one["said"]]

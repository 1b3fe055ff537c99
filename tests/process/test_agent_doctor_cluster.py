"""`doctor` beside a running agent: each fault that the API server shows is one line alone."""

import asyncio
import datetime as dt

import pytest

from agent.cluster import HANDSHAKE, MUTEX_LOCK, REGISTER
from agent.hami.pod import encode_node_lock
from agent.host.process import SystemClock
from agent.sandbox.kubelet.podloop import NodeReporter
from agent.sandbox.lab.cluster import NODE, RESOURCE, SandboxCluster
from tests.process.doctored_node import (
    a_node,
    doctored,
    edit,
    faults,
    line,
    token_of,
)

pytestmark = [
    pytest.mark.process,
    pytest.mark.looptime(False),
    pytest.mark.timeout(120),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("no_log"),
]


async def test_rights_that_are_missing(well: SandboxCluster):
    code, findings = await doctored(well, *token_of(well, "stranger"))

    assert [("P-RIGHTS", "wrong")] == [one for one in faults(findings) if one[1] != "unknown"]
    assert "patch nodes, list pods" in line(findings, "P-RIGHTS")["said"]
    unseen = [one["said"] for one in findings if one["verdict"] == "unknown"]
    assert any("P-OFFER" in said for said in unseen)
    assert any("P-LOCK" in said for said in unseen)
    assert 1 == code


async def no_scheduler(cluster: SandboxCluster) -> None:
    """End the scheduler: it would take notice of what is seeded."""
    (task,) = [
        one for one in cluster.tasks._tasks if "SchedulerModel.run" in one.get_coro().__qualname__
    ]
    task.cancel()
    await asyncio.wait([task])


async def test_what_others_wrote_on_the_node(monkeypatch: pytest.MonkeyPatch):
    """Fewer slices than registered, a lock that stays, a node that the scheduler dropped."""
    async with a_node() as cluster:
        await no_scheduler(cluster)
        # The next report of the kubelet would undo what is seeded.
        monkeypatch.setattr(NodeReporter, "_report", lambda *_: None)
        since = SystemClock().now() - dt.timedelta(seconds=400)
        cluster.store.create("pods", _waiting_pod())
        lock = encode_node_lock(since, "demo", "late")
        edit(cluster, annotations={HANDSHAKE: "Deleted_2026-11-20 10:00:00", MUTEX_LOCK: lock})

        def fewer(node):
            node["status"]["allocatable"][RESOURCE] = "12"
            return node

        cluster.store.update("nodes", "", NODE, fewer)
        code, findings = await doctored(cluster)

    assert [("P-OFFER", "wrong"), ("P-HANDSHAKE", "wrong"), ("P-LOCK", "wrong")] == faults(findings)
    offer = line(findings, "P-OFFER")
    assert "12, and the register annotation has 20 healthy slices" == offer["said"]
    assert "pods stay Pending" in offer["means"]
    assert "places no pod on this node" in line(findings, "P-HANDSHAKE")["means"]
    assert "held by pod demo/late for 40" in line(findings, "P-LOCK")["said"]
    assert 1 == code


async def test_a_report_that_no_scheduler_has_read():
    async with a_node() as cluster:
        await no_scheduler(cluster)
        annotations = cluster.node_annotations()
        rest = {key: text for key, text in annotations.items() if key != HANDSHAKE}
        managed = {"manager": "hami-agent", "time": "2026-11-20T10:00:00Z", "fieldsV1": {}}
        managed["fieldsV1"] = {"f:metadata": {"f:annotations": {f"f:{REGISTER}": {}}}}

        def older(node):
            node["metadata"] |= {"annotations": rest, "managedFields": [managed]}
            return node

        cluster.store.update("nodes", "", NODE, older)
        code, findings = await doctored(cluster)

    assert [("P-HANDSHAKE", "note")] == faults(findings)
    assert (
        "no scheduler has read the present report, which is "
        in (line(findings, "P-HANDSHAKE")["said"])
    )
    assert 0 == code


def _waiting_pod() -> dict:
    limits = {"resources": {"limits": {RESOURCE: "1"}}}
    spec = {"schedulerName": "none", "containers": [{"name": "main", **limits}]}
    return {"metadata": {"name": "late", "namespace": "demo"}, "spec": spec}


async def test_another_writer_that_wrote_what_the_agent_would_write():
    keys = {"f:metadata": {"f:annotations": {f"f:{REGISTER}": {}}}}
    other = {"manager": "other", "time": "2026-11-20T10:00:00Z", "fieldsV1": keys}
    async with a_node() as cluster:
        edit(cluster, managedFields=[other])
        code, findings = await doctored(cluster)

    assert ([], 0) == (faults(findings), code)
    said = "other wrote it at 2026-11-20T10:00:00Z, and the agent would write the same"
    assert [said] == [one["said"] for one in findings if one["id"] == "P-WRITER"]


async def test_a_clock_that_is_ahead(well: SandboxCluster):
    well.api.ahead = 30.0
    code, findings = await doctored(well)
    well.api.ahead = 0.0

    assert [("P-CLOCK", "note")] == faults(findings)
    assert "s ahead of this node's" in line(findings, "P-CLOCK")["said"]
    assert 0 == code


async def test_without_an_api_server_the_rest_is_checked_and_it_is_said_what_was_not(
    well: SandboxCluster,
):
    nowhere = well.places.root / "none"
    code, findings = await doctored(well, "--kubeconfig", str(nowhere))
    groups = ("--only", "driver,library,paths,agent")
    rest, _ = await doctored(well, "--kubeconfig", str(nowhere), *groups)

    assert {"unknown"} == {verdict for _, verdict in faults(findings)}
    assert {"P-OFFER", "P-NODE", "P-RIGHTS", "P-LABEL"} == {point for point, _ in faults(findings)}
    assert ["ok"] == [one["verdict"] for one in findings if one["id"] == "P-KUBELET"]
    assert (5, 0) == (code, rest)

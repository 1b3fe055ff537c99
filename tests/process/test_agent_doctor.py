"""`doctor` beside a running agent: nothing on a node that is well, and each fault alone.

tests/unit/core/node/test_doctor.py has what is said of each fact. Here the facts are looked up.
"""

import asyncio
import datetime as dt
import json
from pathlib import Path

import pytest

from agent.cluster import HANDSHAKE, MUTEX_LOCK, REGISTER
from agent.kit.timing import SystemClock
from agent.sandbox.kubelet.podloop import KubeletPodLoop
from agent.sandbox.lab.cluster import NODE, RESOURCE, SandboxCluster, open_cluster
from agent.sandbox.scheduler.verbs import encode_node_lock
from tests.process.agent_process import PATIENCE, comes, copied_settings, options, run, started

SLICES = 20
READS = {"get", "list", "watch"}
HAMI = Path(__file__).with_name("device-config.yaml")


def is_at_rest(node: SandboxCluster) -> bool:
    """The start is over: it has reported, both doors are open, and the settings are copied."""
    copy, doors = copied_settings(node), node.log.of("web.listening", node.agent.pid)
    reported = {REGISTER, HANDSHAKE} <= node.node_annotations().keys()
    return reported and len(doors) == 2 and copy is not None and "gpu" in (copy.labels or {})


async def doctored(node: SandboxCluster) -> tuple[int, set[str], list[dict]]:
    """The exit code, the faults that do not follow from another, and all that `doctor` found."""
    ended = await asyncio.to_thread(run, "doctor", *node.command()[1:], "-o", "json")
    found = json.loads(ended.stdout)["data"]["findings"]
    own = [one for one in found if one["verdict"] != "ok" and "(follows from " not in one["said"]]
    return ended.returncode, {f"{one['id']} {one['verdict']}" for one in own}, found


async def shown(node: SandboxCluster, what: str) -> None:
    """Wait until the agent says it: its watches lag, and its answers are up to 0.5 s old."""
    words = ("status", "-o", "json", "--socket", str(node.places.run / "api.sock"))
    async with asyncio.timeout(PATIENCE):
        while what not in (await asyncio.to_thread(run, *words)).stdout:
            pass


def edit(node: SandboxCluster, **metadata: dict[str, str]) -> None:
    def change(stored):
        for key, more in metadata.items():
            stored["metadata"][key] = {**stored["metadata"].get(key, {}), **more}
        if "annotations" in metadata:
            stored["status"]["allocatable"][RESOURCE] = "2"
        return stored

    node.store.update("nodes", "", NODE, change)


@pytest.mark.process
@pytest.mark.looptime(False)
@pytest.mark.timeout(120)
async def test_nothing_is_wrong_where_all_is_well_and_each_fault_is_found_and_nothing_is_changed(
    monkeypatch,
):
    async with open_cluster(options("--device-config", str(HAMI), gpus=2)) as opened:
        node = await started(opened, SLICES)
        edit(node, labels={"gpu": "on"})
        assert await comes(lambda: is_at_rest(node))
        before, files = node.api.asked.copy(), sorted(node.places.root.rglob("*"))
        code, faults, found = await doctored(node)
        asked = node.api.asked - before

        assert (0, set()) == (code, faults)
        ids = {"P-OFFER", "P-AGENT", "P-PLUGIN", "P-RIGHTS", "P-REPORT", "P-PRELOAD"}
        assert ids <= {one["id"] for one in found}
        written = {resource for user, verb, resource in asked if verb not in READS}
        assert {"selfsubjectaccessreviews"} == {what for what in written if what != "nodes/status"}
        assert files == sorted(node.places.root.rglob("*"))

        words = ("release", "0", "--socket", str(node.places.run / "api.sock"))
        assert 0 == (await asyncio.to_thread(run, *words)).returncode
        assert await node.until(lambda: node.allocatable() == SLICES // 2, PATIENCE)
        # HAMi's form leaves out what is false.
        assert await comes(lambda: node.node_annotations()[REGISTER].count('"health":true') == 1)
        await shown(node, "H-RELEASED")
        assert (0, {"P-GPU note"}) == (await doctored(node))[:2]

        # Fewer slices than registered, a lock that stays, a node that the scheduler dropped.
        # The next report of the kubelet would undo it, and the scheduler take notice.
        monkeypatch.setattr(KubeletPodLoop, "_write_node", lambda *_: None)
        (task,) = [one for one in node.tasks._tasks if "SchedulerModel.run" in str(one.get_coro())]
        task.cancel()
        await asyncio.wait([task])
        limits = {"resources": {"limits": {RESOURCE: "1"}}}
        spec = {"schedulerName": "none", "containers": [{"name": "main", **limits}]}
        node.store.create("pods", {"metadata": {"name": "late", "namespace": "demo"}, "spec": spec})
        lock = encode_node_lock(SystemClock().now() - dt.timedelta(seconds=400), "demo", "late")
        edit(node, annotations={HANDSHAKE: "Deleted_2026-11-20 10:00:00", MUTEX_LOCK: lock})
        await shown(node, "demo/late")
        code, faults, found = await doctored(node)

    wanted = {"P-GPU note", "P-OFFER wrong", "P-REPORT wrong", "P-LOCK wrong"}
    assert (1, wanted) == (code, faults)
    assert [one for one in found if "held by demo/late for 6 min" in one["said"]]

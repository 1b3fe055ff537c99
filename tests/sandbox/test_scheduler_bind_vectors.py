"""Bind and node lock against what HAMi v2.10's own code answered."""

import asyncio
import datetime as dt
import re
from typing import Any

import pytest

from agent.model import GpuUuid, Share
from agent.sandbox.api_errors import ConflictError, Json
from agent.sandbox.scheduler.cluster import StoreCluster
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.usage import Reservation
from agent.sandbox.scheduler.verbs import BindError, HamiVerbs
from agent.sandbox.store import ObjectStore
from tests.fakes.chance import Seeded
from tests.fakes.clock import START, ManualClock
from tests.fakes.scheduler_vectors import Case, build_pod, load_cases

CASES = load_cases("bind")
LOCK = "hami.io/mutex.lock"
ONE_GPU = [{"name": "c0", "limits": {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000"}}]


class RefusingStore(ObjectStore):
    """A store whose bindings are refused, as in the vector BI."""

    def bind(
        self, namespace: str, name: str, node_name: str, *, uid: str | None = None, **_more: object
    ) -> Json:
        raise ConflictError("apiserver said no")


def resolve(lock: str) -> str:
    """Fill in `<now-6m0s>`."""

    def fill(found: re.Match[str]) -> str:
        ago = dt.timedelta(minutes=int(found[1] or 0), seconds=int(found[2] or 0))
        return (START - ago).strftime("%Y-%m-%dT%H:%M:%SZ")

    return re.sub(r"<now(?:-(?:(\d+)m)?(\d+)s)?>", fill, lock)


def build_store(case: Case) -> ObjectStore:
    kind = RefusingStore if case["id"] == "BI" else ObjectStore
    store = kind(ManualClock(), Seeded())
    if case["id"] != "BJ":
        lock = resolve(case["lock_before"])
        store.create(
            "nodes", {"metadata": {"name": "n1", "annotations": {LOCK: lock} if lock else {}}}
        )
    if case["id"] != "BK":
        init = case["id"] == "BL"
        spec: Case = {"initContainers": ONE_GPU, "containers": [{"name": "c", "limits": {}}]}
        store.create("pods", build_pod(spec if init else {"containers": ONE_GPU}))
    store.create("pods", build_pod({"containers": []}, "other"))
    return store


async def bind(store: ObjectStore) -> tuple[str, bool]:
    """The error of the bind ("" for none), and whether the pod's shares still count."""
    found = store.select("pods", fields={"metadata.name": "p"})
    uid = found[0]["metadata"]["uid"] if found else "uid-of-p"
    settings = SchedulerSettings().quick()
    hami = HamiVerbs(StoreCluster(store), ManualClock(), Seeded(), settings, eager=False)
    hami.usage.reserve(uid, Reservation("n1", [[Share(GpuUuid("GPU-aaaa"), 1000, 0)]], 0))
    for resource in ("nodes", "pods"):
        for obj in store.select(resource):
            hami._seen.see(resource, "ADDED", obj)
    error = ""
    async with asyncio.TaskGroup() as group:
        sending = group.create_task(hami.run())
        try:
            await hami.bind("default", "p", uid, "n1")
        except BindError as failure:
            error = str(failure)
        await asyncio.sleep(1)  # Events are sent beside the verbs
        sending.cancel()
    return error, uid in hami.usage


def lock_of(store: ObjectStore) -> str | None:
    lock: str | None = store.get("nodes", "", "n1")["metadata"]["annotations"].get(LOCK)
    return lock


def annotations_of(store: ObjectStore) -> dict[str, Any]:
    marks: dict[str, Any] = store.get("pods", "default", "p")["metadata"]["annotations"]
    return {
        key: "<unix seconds>" if value == str(int(START.timestamp())) else value
        for key, value in marks.items()
    }


@pytest.mark.parametrize("case_id", sorted(CASES))
async def test_a_pod_is_bound_as_by_hami(case_id: str) -> None:
    case = CASES[case_id]
    store = build_store(case)
    before = lock_of(store) if case_id != "BJ" else None

    error, still_counts = await bind(store)

    assert case["Error"] == error
    assert case["usage_still_cached"] == still_counts
    assert case["events"] == [
        f"{event['type']} {event['reason']} {event['message']}" for event in store.select("events")
    ]
    if "lock_after" in case:
        after = case["lock_after"]
        expected = before if after == "unchanged" else after and resolve(after)
        assert expected == lock_of(store)
    if case_id != "BK":
        assert case["pod_annotations"] == annotations_of(store)


@pytest.mark.parametrize("case_id", ["BA", "BC", "BD", "BE", "BL"])
async def test_a_bound_pod_has_its_node(case_id: str) -> None:
    store = build_store(CASES[case_id])

    await bind(store)

    assert "n1" == store.get("pods", "default", "p")["spec"]["nodeName"]

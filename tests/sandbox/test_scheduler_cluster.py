"""The scheduler's port: the object store and a real API server keep the same promises."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.kube.client import Connection, KubeSession
from agent.sandbox.apiserver import ApiServerModel
from agent.sandbox.apiserver_requests import merge_patch
from agent.sandbox.lab.cluster import kubeconfig
from agent.sandbox.scheduler.cluster import SchedulerCluster, StoreCluster
from agent.sandbox.store import (
    AlreadyExistsError,
    ConflictError,
    Json,
    NotFoundError,
    ObjectStore,
    StatusError,
    TooManyRequestsError,
)
from tests.fakes.chance import NoChance, Seeded
from tests.fakes.clock import ManualClock
from tests.peers.lab.extender import KubeCluster

pytestmark = pytest.mark.looptime(False)
KINDS = ["store", "server"]
EVENT: Json = {"metadata": {"name": "e", "namespace": "default"}, "count": 1}
MARK = {"metadata": {"annotations": {"a": "1"}}}


@contextlib.asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[ApiServerModel, KubeCluster]]:
    api = ApiServerModel(filled(), {"t": "admin"})
    await api.start()
    (folder / "kubeconfig").write_text(kubeconfig(api.url, "t"))
    session = KubeSession(Connection(folder / "kubeconfig"), NoChance())
    try:
        yield api, KubeCluster(session)
    finally:
        await session.close()
        await api.stop()


@contextlib.asynccontextmanager
async def a_port(kind: str, folder: Path) -> AsyncIterator[tuple[ObjectStore, SchedulerCluster]]:
    if kind == "store":
        store = filled()
        yield store, StoreCluster(store)
        return
    async with served(folder) as (api, cluster):
        yield api.store, cluster


def binding(uid: str, name: str = "p") -> Json:
    return {"metadata": {"name": name, "uid": uid}, "target": {"name": "n1"}}


def filled() -> ObjectStore:
    store = ObjectStore(ManualClock(), Seeded())
    store.create("nodes", {"metadata": {"name": "n1"}})
    store.create("pods", {"metadata": {"name": "p"}, "spec": {"containers": []}})
    return store


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_there_is_read_written_and_bound(tmp_path: Path, kind: str) -> None:
    async with a_port(kind, tmp_path) as (store, cluster):
        node = store.get("nodes", "", "n1")
        uid = store.get("pods", "default", "p")["metadata"]["uid"]
        version = node["metadata"]["resourceVersion"]

        read = await cluster.request("get", "nodes", "", "n1")
        patched = await cluster.request("patch", "nodes", "", "n1", MARK, version=version)
        await cluster.request("create", "events", "default", "e", EVENT)
        await cluster.request("bind", "pods", "default", "p", binding(uid))

        assert (node, {"a": "1"}) == (read, patched["metadata"]["annotations"])
        assert 1 == store.get("events", "default", "e")["count"]
        assert "n1" == store.get("pods", "default", "p")["spec"]["nodeName"]


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_gone_or_another_is_refused(tmp_path: Path, kind: str) -> None:
    async with a_port(kind, tmp_path) as (store, cluster):
        uid = store.get("pods", "default", "p")["metadata"]["uid"]
        store.create("events", EVENT)
        store.update("nodes", "", "n1", lambda node: merge_patch(node, MARK))
        for verb, body in (("get", None), ("patch", MARK), ("bind", binding(uid, "q"))):
            with pytest.raises(NotFoundError):
                await cluster.request(verb, "pods", "default", "q", body)
        with pytest.raises(ConflictError, match="the object has been modified"):
            await cluster.request("patch", "nodes", "", "n1", MARK, version="2")
        with pytest.raises((AlreadyExistsError, ConflictError)):
            await cluster.request("create", "events", "default", "e", EVENT)
        with pytest.raises(ConflictError):
            await cluster.request("bind", "pods", "default", "p", binding("another"))
        store.bind("default", "p", "n1")
        with pytest.raises(ConflictError, match="already assigned"):
            await cluster.request("bind", "pods", "default", "p", binding(uid))


async def test_a_server_that_throttles_or_is_away_is_a_refusal_too(tmp_path: Path) -> None:
    async with served(tmp_path) as (api, cluster):
        api.throttle(1)
        with pytest.raises(TooManyRequestsError):
            await cluster.request("get", "nodes", "", "n1")

        await api.begin_outage()
        with pytest.raises(StatusError, match="no answer from the API server"):
            await cluster.request("get", "nodes", "", "n1")

"""The API server model as kubectl uses it: a token in the path, and the kinds that there are."""

import json
import random

import aiohttp
import pytest

from agent.host.process import SystemClock
from agent.sandbox.apiserver import ApiServerModel
from agent.sandbox.apiserver_access import ADMIN
from agent.sandbox.store import KINDS, ObjectStore

pytestmark = pytest.mark.looptime(False)

TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"
TOKEN = "secret"  # noqa: S105 -- the model's
KINDS_OF_BODY = {"PATCH": "application/merge-patch+json"}
POD = {"metadata": {"name": "a", "namespace": "demo"}, "spec": {"containers": []}}


@pytest.fixture
async def server():
    store = ObjectStore(SystemClock(), random.Random(1))  # noqa: S311 -- a model's
    model = ApiServerModel(store, {TOKEN: ADMIN})
    await model.start()
    yield model
    await model.stop()


async def asked(server, path, method="GET", body=None):
    """Status and document, as kubectl asks: with no token in the headers."""
    async with (
        aiohttp.ClientSession() as session,
        session.request(
            method,
            f"{server.url}{path}",
            headers={
                "Accept": TABLE,
                "Content-Type": KINDS_OF_BODY.get(method, "application/json"),
            },
            data=body,
        ) as answer,
    ):
        return answer.status, await answer.json()


async def test_a_token_in_the_path_speaks_for_its_user(server):
    path = f"/as/{TOKEN}/api/v1/namespaces/demo/pods"
    made, _ = await asked(server, f"{path}?fieldManager=k", "POST", json.dumps(POD))
    status, found = await asked(server, f"{path}?limit=500&fieldSelector=metadata.name%3Da")

    assert (201, 200) == (made, status)
    assert ["a"] == [pod["metadata"]["name"] for pod in found["items"]]


async def test_a_selector_may_say_what_is_not_wanted_as_for_the_pods_of_a_described_node(server):
    path = f"/as/{TOKEN}/api/v1/namespaces/demo/pods"
    for name, phase in (("a", "Running"), ("b", "Succeeded"), ("c", "Failed")):
        metadata = {"name": name, "namespace": "demo"}
        pod = {**POD, "metadata": metadata, "status": {"phase": phase}}
        await asked(server, path, "POST", json.dumps(pod))
        await asked(server, f"{path}/{name}/status", "PATCH", json.dumps(pod))
    query = "status.phase!%3DSucceeded,status.phase!%3DFailed,metadata.namespace%3Ddemo"
    status, found = await asked(server, f"{path}?fieldSelector={query}")

    assert 200 == status, found
    assert ["a"] == [pod["metadata"]["name"] for pod in found["items"]]


async def test_without_a_known_token_nobody_is_let_in(server):
    for path in ("/api/v1/pods", "/as/guessed/api/v1/pods", "/as/", "/as//api/v1/pods"):
        assert 401 == (await asked(server, path))[0]


async def test_a_client_is_told_what_there_is(server):
    _, versions = await asked(server, f"/as/{TOKEN}/api?timeout=32s")
    _, groups = await asked(server, f"/as/{TOKEN}/apis")
    _, found = await asked(server, f"/as/{TOKEN}/api/v1")

    assert (["v1"], []) == (versions["versions"], groups["groups"])
    assert dict(KINDS) == {one["name"]: one["kind"] for one in found["resources"]}
    assert ["nodes", "namespaces"] == [
        one["name"] for one in found["resources"] if not one["namespaced"]
    ]

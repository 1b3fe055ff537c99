"""The extender's HTTP door: what is no call, TLS, and the end."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agent.sandbox.extender.server import LIMIT
from tests.fakes.extender_rig import a_cluster, extended, server_side
from tests.fakes.scheduler_cluster import LOCK

pytestmark = pytest.mark.looptime(False)

POD = {"metadata": {"name": "p", "namespace": "d", "uid": "u"}, "spec": {"containers": []}}


async def test_it_says_that_it_is_there(tmp_path: Path) -> None:
    async with extended(tmp_path) as rig:
        assert (200, "") == await rig.get("/healthz")


async def test_it_is_ready_once_nodes_and_pods_are_listed(tmp_path: Path) -> None:
    async with a_cluster(tmp_path) as rig:
        await rig.api.begin_outage()
        async with rig.extending():
            assert (200, "") == await rig.get("/healthz")
            assert (503, "nodes and pods are not listed yet\n") == await rig.get("/readyz")

            await rig.api.end_outage()
            rig.create_pod("p")
            assert "" == (await rig.filter("p"))["Error"]  # waits for the lists

            assert (200, "") == await rig.get("/readyz")


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/filter", b"{", "the body is no JSON object"),
        ("/filter", b"\xff", "the body is no JSON object"),
        ("/filter", [], "the body is no JSON object"),
        ("/filter", {"Pod": 1}, "the body has another shape"),
        ("/filter", {"Pod": {"metadata": {}, "spec": {}}}, "at `$.metadata`"),
        ("/filter", {"Pod": POD | {"spec": {"containers": 1}}}, "at `$.spec.containers`"),
        ("/filter", {"Pod": POD, "NodeNames": [1]}, "at `$.nodenames[0]`"),
        ("/filter", {"Pod": POD, "Nodes": {"items": [{}]}}, "at `$.items[0]`"),
        ("/filter", b" " * (LIMIT + 1), f"the body is longer than {LIMIT} bytes"),
        ("/bind", {"PodName": "p"}, "missing required field `podnamespace`"),
        ("/webhook", {"apiVersion": "v1"}, "missing required field `request`"),
        ("/webhook", {"apiVersion": "v1", "request": {}}, "missing required field `uid`"),
    ],
)
async def test_what_cannot_be_read_is_refused_in_one_sentence(
    tmp_path: Path, path: str, body: Any, told: str
) -> None:
    async with extended(tmp_path) as rig:
        status, text = await rig.post(path, body)

        assert 400 == status
        assert text.startswith(f"{path}: the body ")
        assert told in text
        assert 1 == text.count("\n")
        assert (200, "") == await rig.get("/healthz")


async def test_other_paths_and_methods_are_refused(tmp_path: Path) -> None:
    async with extended(tmp_path) as rig:
        assert (404, "there is no /prioritize here\n") == await rig.post("/prioritize", {})
        assert (405, "/filter takes POST only\n") == await rig.get("/filter")


async def test_it_speaks_tls_with_the_certificate_it_was_given(tmp_path: Path) -> None:
    async with a_cluster(tmp_path) as rig:
        rig.create_pod("p")
        async with rig.extending(tls=server_side("one")):
            assert ["n1"] == (await rig.filter("p"))["NodeNames"]


async def ask(caller: aiohttp.ClientSession, url: str, args: Any) -> Any:
    async with caller.post(url, json=args) as answer:
        return await answer.json()


async def test_an_answer_that_was_begun_is_finished_before_the_end(tmp_path: Path) -> None:
    async with a_cluster(tmp_path) as rig, aiohttp.ClientSession() as caller:
        uid = rig.create_pod("p")["metadata"]["uid"]
        args = {"PodName": "p", "PodNamespace": "default", "PodUID": uid, "Node": "n1"}
        async with asyncio.TaskGroup() as group, rig.extending():
            await rig.filter("p")
            binding = group.create_task(ask(caller, rig.address + "/bind", args))
            await rig.until_node(lambda: LOCK in rig.node())

        assert {"Error": ""} == binding.result()
        assert "n1" == rig.pod("p")["spec"]["nodeName"]


async def test_a_body_may_have_keys_that_nobody_reads(tmp_path: Path) -> None:
    async with extended(tmp_path) as rig:
        body = json.dumps({"Pod": POD, "NodeNames": ["n1"], "Extra": {}}).encode()

        status, answer = await rig.post("/filter", body)

        assert (200, ["n1"]) == (status, answer["NodeNames"])

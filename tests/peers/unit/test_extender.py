"""The extender of the lab, over the model of the API server."""

import asyncio
import base64
import json
import ssl
from pathlib import Path

import aiohttp
import pytest

from agent import cluster as annotations
from agent.sandbox.apiserver import ApiServerModel
from agent.sandbox.lab.cluster import free_port, kubeconfig
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.webhook import admit_pod
from agent.sandbox.store import Json, ObjectStore
from tests.fakes.chance import Seeded
from tests.fakes.clock import ManualClock
from tests.fakes.scheduler_cluster import REGISTER, register_of
from tests.peers.lab.extender import serve

pytestmark = pytest.mark.looptime(False)
TLS = Path(__file__).parents[2] / "vectors" / "tls"
NEW = {
    "metadata": {"name": "p"},
    "spec": {"containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": 1}}}]},
}


async def test_a_pod_is_admitted_filtered_and_bound_as_kube_scheduler_asks(tmp_path: Path) -> None:
    store = ObjectStore(ManualClock(), Seeded())
    metadata = {"name": "n1", "annotations": {REGISTER: register_of("GPU-a")}}
    store.create("nodes", {"metadata": metadata, "status": {"allocatable": {"nvidia.com/gpu": 10}}})
    pod = store.create("pods", admit_pod(NEW, SchedulerSettings()))
    api, port = ApiServerModel(store, {"t": "admin"}), free_port()
    await api.start()
    (tmp_path / "kubeconfig").write_text(kubeconfig(api.url, "t"))
    trust = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=TLS / "one.crt"))
    served = asyncio.Event()
    async with (
        aiohttp.ClientSession(f"https://127.0.0.1:{port}", connector=trust) as http,
        asyncio.TaskGroup() as group,
    ):
        files = (str(TLS / "one.crt"), str(TLS / "one.key"))
        serving = group.create_task(serve(tmp_path / "kubeconfig", port, *files, served))
        await served.wait()

        request = {"uid": "1", "object": NEW}
        asked: Json = {"apiVersion": "admission.k8s.io/v1", "request": request}
        review = await (await http.post("/webhook", json=asked)).json()
        asked = {"Pod": pod, "Nodes": None, "NodeNames": ["n1", "n2"]}
        filtered = await (await http.post("/filter", json=asked)).json()
        asked = {"PodName": "p", "PodNamespace": "default", "PodUID": "", "Node": "n1"}
        refused = await (await http.post("/bind", json=asked)).json()
        asked["PodUID"] = pod["metadata"]["uid"]
        bound = await (await http.post("/bind", json=asked)).json()
        serving.cancel()
    await api.stop()

    (change,) = json.loads(base64.b64decode(review["response"]["patch"]))
    assert review["response"]["allowed"]
    assert ("/spec", "hami-scheduler") == (change["path"], change["value"]["schedulerName"])
    assert (["n1"], "") == (filtered["NodeNames"], filtered["Error"])
    assert refused["Error"]
    assert {"Error": ""} == bound
    placed = store.get("pods", "default", "p")
    assert "n1" == placed["spec"]["nodeName"]
    assert annotations.ALLOCATED in placed["metadata"]["annotations"]

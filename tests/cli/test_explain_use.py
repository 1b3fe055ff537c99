"""`explain` of a running pod says what the pod uses of what it holds, if its agent says so."""

import contextlib
import datetime as dt
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from agent.host.process import SystemClock
from agent.status import AllocationStatus, NodeStatus, ShareStatus, StatusDocument, envelope
from tests.fakes.explain_rig import TOKEN, ExplainRig, a_gpu, explain_rig
from tests.fakes.kubeworld import KUBECONFIG

pytestmark = pytest.mark.looptime(False)
OFF = {"name": "CUDA_DISABLE_CONTROL", "value": "1"}
HELD = "main: GPU 3 (GPU-a), 8,192 MiB, 20 % of the cores"


@contextlib.asynccontextmanager
async def a_running_pod(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: web.Response
) -> AsyncIterator[ExplainRig]:
    """Pod `p` on node `n1`, whose agent gives this answer through the API server's proxy."""
    async with explain_rig(tmp_path, capsys) as rig, aiohttp.ClientSession() as client:

        async def serve(request: web.BaseRequest) -> web.Response:
            if "/proxy/" in request.path:
                return answer
            url = f"{rig.model.url}{request.path_qs}"
            async with client.get(url, headers={**request.headers}) as passed:
                return web.Response(
                    body=await passed.read(),
                    status=passed.status,
                    content_type="application/json",
                )

        rig.node("n1", a_gpu("GPU-a", 3))
        rig.holder("p", "n1", "GPU-a", 8192, 20)
        labels = {"app.kubernetes.io/name": "hami-agent"}
        rig.store.create(
            "pods",
            {
                "metadata": {"name": "agent-x", "namespace": "kube-system", "labels": labels},
                "spec": {
                    "nodeName": "n1",
                    "volumes": [{"hostPath": {"path": "/var/lib/kubelet/device-plugins"}}],
                },
            },
        )
        runner = web.ServerRunner(web.Server(serve))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        rig.kubeconfig.write_text(KUBECONFIG.format(server=url, token=TOKEN), encoding="utf-8")
        try:
            yield rig
        finally:
            await runner.cleanup()


def a_status(used_mib: int | None = None) -> web.Response:
    """What the agent answers about the pod, with this use of its share."""
    last = SystemClock().now() - dt.timedelta(hours=2)
    share = ShareStatus(gpu="3", uuid="GPU-a", memory_mib=8192, cores=20, used_mib=used_mib)
    held = AllocationStatus("default", "p", "main", (share,), last_kernel=last)
    other = AllocationStatus("other", "p", "main", (share,))
    found = StatusDocument(node=NodeStatus(name="n1"), gpus=(), allocations=(other, held))
    return web.Response(body=envelope("Status", found, last))


async def test_a_running_pod_is_told_with_what_it_uses_and_its_last_kernel(tmp_path, capsys):
    async with a_running_pod(tmp_path, capsys, a_status(used_mib=2048)) as rig:
        answer = await rig.explain("p")

    assert 0 == answer.code
    used = "; it uses 2,048 MiB, its last kernel ran 2 h ago"
    assert [f"{HELD}{used}"] == answer.gate("running")["facts"]


async def test_a_use_that_the_agent_does_not_know_is_left_out(tmp_path, capsys):
    async with a_running_pod(tmp_path, capsys, a_status()) as rig:
        assert [HELD] == (await rig.explain("p")).gate("running")["facts"]


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"runtimeClassName": "gvisor"}, "HAMi-core does not work under the runtime class gvisor"),
        ({"runtimeClassName": "kata-qemu"}, "HAMi-core does not work under the runtime class kata"),
        ({"containers": [{"name": "main", "env": [OFF]}]}, "CUDA_DISABLE_CONTROL keeps HAMi-core"),
    ],
    ids=["gVisor", "Kata", "switched off"],
)
async def test_limits_that_nothing_keeps_are_told_as_not_kept(tmp_path, capsys, spec, why):
    async with a_running_pod(tmp_path, capsys, a_status(used_mib=2048)) as rig:
        rig.edit_pod("p", {"spec": spec})
        (fact,) = (await rig.explain("p")).gate("running")["facts"]

    assert fact.startswith(f"{HELD}, not kept: {why}")
    assert "; it uses 2,048 MiB" in fact


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (web.Response(status=403, text="forbidden"), "the agent was not read: "),
        (web.Response(text="[]"), "the agent was not read: the answer is no Status"),
    ],
    ids=["refused", "no status"],
)
async def test_without_the_agents_answer_the_reason_stands_below_what_is_held(
    tmp_path, capsys, answer, why
):
    async with a_running_pod(tmp_path, capsys, answer) as rig:
        found = await rig.explain("p")

    held, unread = found.gate("running")["facts"]
    assert (0, HELD) == (found.code, held)
    assert f"what it uses of that is not known: {why}" in unread

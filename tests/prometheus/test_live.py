"""A real Prometheus scrapes a real agent: its page, the dashboard and the alerts."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.sandbox.lab.cluster import RESOURCE, SandboxCluster, fetch
from tests.builders import a_pod_uid
from tests.process.agent_process import run
from tests.prometheus.lab.expressions import alerts, panels, selectors
from tests.prometheus.lab.node import open_node
from tests.prometheus.lab.server import Prometheus, open_prometheus, own_job, promtool

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]


@contextlib.asynccontextmanager
async def scraped(folder: Path) -> AsyncIterator[tuple[SandboxCluster, Prometheus]]:
    """An agent of two GPUs that serves a busy pod, and the Prometheus that scrapes it."""
    async with (
        open_node({"first": (512, 20)}, "metrics: {hami: current}\n") as (cluster, target),
        open_prometheus(folder, own_job(target)) as prometheus,
    ):
        assert await prometheus.until("min(hami_agent_ready) == 1")
        assert await prometheus.until('hami_agent_degraded{reason="report"} == 0')
        assert await prometheus.until("hami_agent_container_idle_seconds")
        yield cluster, prometheus


async def found(prometheus: Prometheus) -> set[str]:
    """The alerts whose expressions have a result."""
    return {rule["alert"] for rule in alerts() if await prometheus.query(rule["expr"])}


async def test_every_expression_has_data_and_a_lost_gpu_is_the_only_alert(tmp_path):
    async with scraped(tmp_path) as (cluster, prometheus):
        read = {one for rule in alerts() for one in selectors(rule["expr"])}
        assert len(read) > len(alerts())
        assert [] == [one for one in sorted(read) if not await prometheus.until(one)]
        assert set() == await found(prometheus)

        socket = ("--socket", str(cluster.places.hardware_socket))
        done = await asyncio.to_thread(run, "simulate", "xid", "79", "--gpu", "1", *socket)
        assert 0 == done.returncode
        assert await prometheus.until("hami_agent_gpu_served == 0")
        assert {"HamiAgentGpuUnhealthy"} == await found(prometheus)
        # The XID makes it bad, and the first probe after that finds it lost.
        assert await prometheus.until('ALERTS{alertstate="firing", condition="lost"}')
        (alert,) = await prometheus.alerts()
        assert ("1", "sandbox", "warning") == tuple(
            alert["labels"][name] for name in ("gpu", "node", "severity")
        )
        assert "GPU 1 of sandbox is lost" in alert["annotations"]["description"]
        assert alert["labels"]["runbook"] in alert["annotations"]["summary"]

        # What is counted of a GPU is there since the XID.
        shown = list(panels())
        assert len(shown) > 20
        assert [] == [one for one in shown if not await prometheus.until(one[1])]


async def test_of_two_busy_containers_the_one_beyond_its_compute_limit_is_told(tmp_path):
    (rule,) = (one for one in alerts() if one["alert"] == "HamiAgentComputeLimitExceeded")
    async with (
        open_node({"greedy": (512, 80), "modest": (512, 20)}, gpus=1) as (_, target),
        open_prometheus(tmp_path, own_job(target)) as prometheus,
    ):
        told = await prometheus.until(rule["expr"])

        assert [("greedy", 0.8)] == [(one["metric"]["pod"], float(one["value"][1])) for one in told]


async def test_in_plain_mode_holders_are_named_and_nothing_is_alarmed(tmp_path):
    names = {"namespace": "team-a", "pod": "train-0", "container": "main"}
    wish = {"name": "main", "resources": {"limits": {RESOURCE: "2"}}}
    metadata = {"uid": a_pod_uid(1), "namespace": "team-a", "name": "train-0"}
    settings = "plain: {memoryLimits: true}\n"
    async with open_node({}, settings, "--scheduler", "none") as (cluster, target):
        admitted = await cluster.kubelet.admit(
            {"metadata": metadata, "spec": {"containers": [wish]}}
        )
        assert admitted.admitted
        running = cluster.kubelet.node.pods[a_pod_uid(1)].running
        assert await cluster.until(lambda: "main" in running, 30.0)
        async with open_prometheus(tmp_path, own_job(target)) as prometheus:
            held = await prometheus.until(
                "sum by (namespace, pod, container) (hami_agent_container_slices_allocated)"
            )

            assert [(names, "2")] == [(one["metric"], one["value"][1]) for one in held]
            assert await prometheus.query("hami_agent_container_memory_allocated_bytes")
            assert set() == await found(prometheus)


async def test_promtool_has_no_complaint_about_the_page(tmp_path):
    async with scraped(tmp_path) as (cluster, prometheus):
        text = (await fetch(cluster.web_address or "", "/metrics")).text
        done = promtool("check", "metrics", text=text)

        assert (0, "", "") == (done.returncode, done.stdout, done.stderr)
        for name in (
            *("hami_agent_container_memory_allocated_bytes", "hami_vgpu_memory_used_bytes"),
            *("hami_agent_container_memory_used_bytes", "hami_host_gpu_utilization_ratio"),
        ):
            assert f"{name}{{" in text

        # Series that name pods keep their labels beside those of the target.
        (one,) = await prometheus.query("hami_agent_container_slices_allocated")
        assert ("demo", "first", "main", "sandbox") == tuple(
            one["metric"][name] for name in ("namespace", "pod", "container", "node")
        )

        cluster.places.config.write_text("nonsense: 1\n")
        assert await prometheus.until('hami_agent_degraded{reason="settings"} == 1')
        assert {"HamiAgentSettingsRejected"} == await found(prometheus)

        await cluster.agent.kill()
        assert await prometheus.until("up == 0")
        assert "HamiAgentDown" in await found(prometheus)

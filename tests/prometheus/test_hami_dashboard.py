"""HAMi's own dashboard has data from the agents, by the scrape that HAMi's monitor had."""

import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from agent.sandbox.lab.cluster import SandboxCluster, open_cluster, scrape
from agent.sandbox.scenario.facts import is_running
from agent.sandbox.scenario.stage import Wish, Workload
from tests.process.agent_process import PATIENCE, options, started
from tests.prometheus.lab.hami import (
    asked,
    choices,
    legacy_names,
    open_scheduler,
    series_of,
    served_by_agents,
)
from tests.prometheus.lab.regions import use_gpu
from tests.prometheus.lab.server import NODE, Json, Prometheus, open_prometheus

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

PODS = [f"busy-{n}" for n in range(5)]


@contextlib.asynccontextmanager
async def watched(folder: Path) -> AsyncIterator[tuple[SandboxCluster, Prometheus]]:
    """A node whose five containers are busy, scraped as HAMi's monitor and scheduler were."""
    async with open_cluster(options(gpus=2)) as cluster:
        cluster.places.config.write_text("metrics: {hami: both}\n")
        await started(cluster, slices=20)
        for number, pod in enumerate(PODS):
            cluster.submit(Workload(pod, "", (Wish("main", 1, 1024),)).pod())
            assert await cluster.until(partial(is_running, cluster, pod), PATIENCE)
            use_gpu(cluster, pod, used=100 * number, percent=10 * number)
        assert await cluster.until(lambda: cluster.web_address is not None, PATIENCE)
        agent = cluster.web_address or ""
        uuids = [
            labels["uuid"]
            for name, labels, _ in await scrape(agent)
            if name == "hami_agent_gpu_info"
        ]
        async with (
            open_scheduler(NODE, uuids) as scheduler,
            open_prometheus(
                folder,
                job("hami-device-plugin-monitor", agent.removeprefix("http://")),
                job("hami-scheduler", scheduler),
            ) as prometheus,
        ):
            yield cluster, prometheus


def job(name: str, target: str) -> Json:
    """A scrape without honor_labels and without labels of the target."""
    return {"job_name": name, "static_configs": [{"targets": [target]}]}


async def test_each_expression_about_what_the_monitor_served_has_data(tmp_path: Path):
    agents = served_by_agents()
    ours = [one for one in asked() if series_of(one[1]) & agents]
    assert len(ours) == 7
    async with watched(tmp_path) as (_, prometheus):
        assert [] == [one for one in ours if not await prometheus.until(one[1])]
        assert [] == [
            (series, label)
            for series, label in choices()
            if not await prometheus.until(f'{series}{{{label}!=""}}')
        ]

        everyone = await prometheus.until("count(hami_vgpu_memory_used_bytes) == 5")
        assert ["5"] == [one["value"][1] for one in everyone]
        shown = await prometheus.query("hami_container_device_utilization_ratio")
        assert dict(zip(PODS, range(0, 50, 10), strict=True)) == {
            one["metric"]["pod"]: int(one["value"][1]) for one in shown
        }
        (full,) = await prometheus.query(
            '100 * hami_vgpu_memory_used_bytes{pod="busy-4"} / hami_vgpu_memory_limit_bytes'
        )
        assert 100 * 712 / 1024 == float(full["value"][1])
        # The older names have data, too.
        assert 7 == len(legacy_names())
        assert [] == [one for one in legacy_names() if not await prometheus.until(one)]
        assert await prometheus.until("count(Device_memory_desc_of_container) == 5")


def test_what_only_the_scheduler_serves_is_never_served_by_the_agents():
    agents = served_by_agents()
    theirs = {name for _, one in asked() if not series_of(one) & agents for name in series_of(one)}

    assert {"hami_gpu_memory_limit_bytes", "hami_gpu_shared_count"} < theirs
    assert all(name.startswith(("hami_gpu_", "hami_node_")) for name in theirs)

"""HAMi's own dashboard has data from the agents, by the scrape that HAMi's monitor had."""

import pytest

from agent.sandbox.lab.cluster import scrape
from tests.prometheus.lab.hami import asked, choices, open_scheduler, served_by_agents
from tests.prometheus.lab.node import open_node
from tests.prometheus.lab.server import NODE, Json, open_prometheus

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

PODS = {f"busy-{n}": (100 * n, 10 * n) for n in range(5)}


def job(name: str, target: str) -> Json:
    """A scrape without honor_labels and without labels of the target."""
    return {"job_name": name, "static_configs": [{"targets": [target]}]}


async def test_each_expression_about_what_the_monitor_served_has_data(tmp_path):
    agents = served_by_agents()
    ours = [expression for expression, series in asked() if series & agents]
    legacy = [name for name in agents if not name.startswith("hami_")]
    assert (7, 7) == (len(ours), len(legacy))
    async with open_node(PODS, "metrics: {hami: both}\n") as (_, target):
        page = await scrape(f"http://{target}")
        uuids = [labels["uuid"] for name, labels, _ in page if name == "hami_agent_gpu_info"]
        monitor = job("hami-device-plugin-monitor", target)
        async with (
            open_scheduler(NODE, uuids) as scheduler,
            open_prometheus(tmp_path, monitor, job("hami-scheduler", scheduler)) as prometheus,
        ):
            wanted = [*ours, *choices(), *legacy]
            assert [] == [one for one in wanted if not await prometheus.until(one)]
            for name in ("hami_vgpu_memory_used_bytes", "Device_memory_desc_of_container"):
                assert await prometheus.until(f"count({name}) == 5")
            shown = await prometheus.query("hami_container_device_utilization_ratio")
            assert {pod: percent for pod, (_, percent) in PODS.items()} == {
                one["metric"]["pod"]: int(one["value"][1]) for one in shown
            }
            (full,) = await prometheus.query(
                '100 * hami_vgpu_memory_used_bytes{pod="busy-4"} / hami_vgpu_memory_limit_bytes'
            )
            assert 100 * 712 / 1024 == float(full["value"][1])


def test_what_only_the_scheduler_serves_is_never_served_by_the_agents():
    theirs = frozenset().union(*(one for _, one in asked() if not one & served_by_agents()))

    assert {"hami_gpu_memory_limit_bytes", "hami_gpu_shared_count"} < theirs
    assert all(name.startswith(("hami_gpu_", "hami_node_")) for name in theirs)

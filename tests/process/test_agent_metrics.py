"""The metrics page of a real agent is what METRICS.md says, and counts nothing twice."""

import asyncio
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent.sandbox.lab.cluster import SandboxCluster, open_cluster
from agent.sandbox.lab.web import fetch, scrape
from agent.sandbox.scenario.facts import is_running
from agent.sandbox.scenario.workloads import Wish, Workload
from deploy.metrics import described, sentence
from tests.process.agent_process import PATIENCE, options, started

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(90)]


async def test_every_metric_of_an_agent_at_work_is_documented_and_there_once():
    async with open_cluster(options(gpus=2)) as cluster:
        await started(cluster, slices=20)
        cluster.submit(Workload("first", "", (Wish("main", 1, 1024),)).pod())
        assert await cluster.until(lambda: is_running(cluster, "first"), PATIENCE)
        assert await cluster.until(lambda: cluster.web_address is not None, PATIENCE)
        text = (await fetch(cluster.web_address or "", "/metrics")).text

        names = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
        assert len(names) == len(set(names))
        assert {"hami_agent_slices", "hami_agent_allocations_total"} <= set(names)
        assert differences(text) == []


def differences(page: str) -> list[str]:
    """Where the page and METRICS.md say different things."""
    documented = {
        one.name: one
        for one in described()
        if one.name.startswith("hami_") or not one.is_hamis  # the legacy names are not asked for
    }
    families = {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in text_string_to_metric_families(page)
        if not family.name.startswith("python_gc")
    }
    found = sorted(documented.keys() ^ families.keys())
    for name in documented.keys() & families.keys():
        listed, served = documented[name], families[name]
        labels = {frozenset(sample.labels) - {"le"} for sample in served.samples}
        if labels - {frozenset(listed.labels)}:
            found.append(f"{name}: labels {labels}")
        if (listed.kind, listed.meaning) != (served.type, sentence(served.documentation)):
            found.append(f"{name}: {served.type}: {served.documentation}")
    return found


async def test_where_pods_may_not_be_named_none_is():
    async with open_cluster(options(gpus=2)) as cluster:
        cluster.places.config.write_text("metrics: {containers: false}\n")
        await started(cluster, slices=20)
        cluster.submit(Workload("first", "", (Wish("main", 1, 1024),)).pod())
        assert await cluster.until(lambda: is_running(cluster, "first"), PATIENCE)
        assert await cluster.until(lambda: cluster.web_address is not None, PATIENCE)
        found = await scrape(cluster.web_address or "")

        assert 1 == sum(value for name, _, value in found if name == "hami_agent_slices_allocated")
        assert [] == [labels for _, labels, _ in found if {"pod", "namespace"} & set(labels)]


async def counted(cluster: SandboxCluster, reason: str) -> list[tuple[str, str]]:
    """Where Events with that reason are counted, and as what."""
    return [
        (name, labels["outcome"])
        for name, labels, _ in await scrape(cluster.web_address or "")
        if labels.get("reason") == reason and not name.endswith("_created")
    ]


async def test_an_event_about_the_node_is_counted_once():
    async with open_cluster(options(gpus=2)) as cluster:
        await started(cluster, slices=20)
        (cluster.places.hook / "vgpu" / "libvgpu.so").unlink()
        assert await cluster.until(lambda: bool(cluster.store.select("events")), PATIENCE)
        assert await cluster.until(lambda: cluster.web_address is not None, PATIENCE)
        async with asyncio.timeout(PATIENCE):
            while not await counted(cluster, "NothingOffered"):  # noqa: ASYNC110 -- another process
                await asyncio.sleep(0.05)

        assert [("hami_agent_events_total", "create")] == await counted(cluster, "NothingOffered")

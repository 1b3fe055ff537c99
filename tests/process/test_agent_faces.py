"""The metrics page of a real agent is what METRICS.md says, and counts nothing twice."""

import asyncio
import json
import re
import struct
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent.hami.region import V1_2
from agent.sandbox.lab.cluster import SandboxCluster, fetch, open_cluster, scrape
from agent.sandbox.scenario.facts import is_running, pod_facts
from agent.sandbox.scenario.stage import Wish, Workload
from deploy.metrics import described, sentence
from tests.hami_regions import region_file
from tests.host.region_dirs import FILE, poke
from tests.process.agent_process import ENVIRON, PATIENCE, ROOT, comes, options, run, started

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


# `status` and the read API beside a real agent: what happened is what they say.


async def status(cluster: SandboxCluster, *arguments: str) -> tuple[int | None, str]:
    """Run the verb against the agent's socket: exit code and output."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agent", "status", *arguments),
        *("--socket", str(cluster.places.run / "api.sock")),
        cwd=ROOT,
        env={**ENVIRON, "COLUMNS": "100"},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    return process.returncode, out.decode()


async def test_a_pod_a_lost_gpu_and_the_settings_are_all_in_one_answer():
    async with open_cluster(options(gpus=2)) as cluster:
        await started(cluster, slices=20)
        cluster.submit(Workload("first", "", (Wish("main", 1, 1024, 30),)).pod())
        assert await cluster.until(lambda: is_running(cluster, "first"), PATIENCE)
        assert await cluster.until((cluster.places.run / "api.sock").is_socket, PATIENCE)
        cluster.hardware.xid("0", 79)
        assert await cluster.until(lambda: cluster.allocatable() == 10, PATIENCE)

        code, out = await status(cluster, "-o", "json")
        found = json.loads(out)["data"]
        assert 0 == code
        assert [("first", "main", 1024, 30)] == [
            (one["pod"], one["container"], share["memoryMib"], share["cores"])
            for one in found["allocations"]
            for share in one["shares"]
        ]
        assert {"lost", "bad"} & {gpu["condition"] for gpu in found["gpus"]}
        assert "GpuUnhealthy" in {entry["reason"] for entry in found["changes"]}
        assert "first" in (await status(cluster, "--by", "pod"))[1]
        assert "XID 79" in (await status(cluster))[1]

        page = await fetch(cluster.web_address or "", "/api/v1/settings")
        settings = {one["key"]: one for one in json.loads(page.text)["data"]}
        assert (10, "default") == tuple(
            settings["sharing.splitCount"][key] for key in ("value", "origin")
        )


# What the agent knows to log in with is told nowhere.


async def test_no_token_is_in_a_log_line_or_a_page():
    async with open_cluster(options("--log-level", "debug")) as opened:
        kubeconfig = json.loads(opened.places.kubeconfig.read_text())
        (user,) = kubeconfig["users"]
        token = user["user"]["token"]
        assert len(token) > 8
        cluster = await started(opened)
        assert await cluster.until(lambda: cluster.web_address is not None, PATIENCE)
        pages = [
            (await fetch(cluster.web_address or "", path)).text
            for path in (
                "/",
                "/api/v1/status",
                "/api/v1/settings",
                "/readyz?verbose",
                "/metrics",
                "/version",
                "/nothing",
            )
        ]
        # A server that takes the token no more is told of, with the address and without the token.
        user["user"]["token"] = wrong = f"{token}-and-more"
        cluster.places.kubeconfig.write_text(json.dumps(kubeconfig))
        await cluster.kill_agent()
        await cluster.start_agent()
        assert await cluster.until(lambda: "answered 401" in said(cluster), PATIENCE)
        code = await cluster.stop_agent()

    assert 0 == code
    for secret in (token, wrong):
        assert secret not in said(cluster)
        assert [] == [page for page in pages if secret in page]


def said(cluster):
    return "\n".join(line.text for line in cluster.log)


def test_settings_are_shown_without_what_they_name(tmp_path):
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text("users: [{name: a, user: {token: s3cret}}]\n")

    shown = run("config", "show", "--origin", "--kubeconfig", str(kubeconfig))

    assert str(kubeconfig) in shown.stdout
    assert "s3cret" not in shown.stdout + shown.stderr


# A real agent holds a container back by its region file, and releases it however it ends.

SWITCH, RECENT_KERNEL, PRIORITY = (V1_2.tail + 4 * word for word in (1, 2, 3))


async def run_one(cluster: SandboxCluster, name: str, priority: int) -> Path:
    """The region of a new pod of that priority."""
    pod = Workload(name, "", (Wish("main", 1, 1024),)).pod()
    pod["spec"]["containers"][0]["env"] = [{"name": "CUDA_TASK_PRIORITY", "value": str(priority)}]
    cluster.submit(pod)
    assert await cluster.until(lambda: is_running(cluster, name), PATIENCE), cluster.log.last(20)
    own = cluster.places.hook / f"vgpu/containers/{pod_facts(cluster, name).uid}_main"
    region = own / FILE
    region.write_bytes(region_file("v12-two").content)
    write(region, 0, switch=0, priority=priority)
    return region


def write(region: Path, recent: int, *, switch: int, priority: int) -> None:
    poke(region, SWITCH, "<iii", switch, recent, priority)


def state(region: Path) -> tuple[int, int]:
    """The utilisation switch and recent_kernel."""
    switch, recent = struct.unpack_from("<ii", region.read_bytes(), SWITCH)
    return switch, recent


async def test_a_container_is_held_back_and_released_at_the_end_and_after_a_kill():
    async with open_cluster(options(gpus=1)) as cluster:
        await started(cluster, slices=10)
        high, low = await run_one(cluster, "high", 0), await run_one(cluster, "low", 1)
        assert 0 == await cluster.stop_agent()
        write(high, 5, switch=0, priority=0)
        await started(cluster, slices=10)
        assert await comes(lambda: (1, -1) == state(low)), cluster.log.last(20)

        assert 0 == await cluster.stop_agent()
        assert (0, 0) == state(low)

        write(low, 0, switch=0, priority=1)
        write(high, 5, switch=0, priority=0)
        await started(cluster, slices=10)
        assert await comes(lambda: (1, -1) == state(low)), cluster.log.last(20)
        await cluster.kill_agent()
        assert (1, -1) == state(low)
        write(high, 0, switch=0, priority=0)
        await started(cluster, slices=10)
        assert await comes(lambda: (0, 0) == state(low)), cluster.log.last(20)
        assert [] == cluster.log.of("usage.unread") + cluster.log.of("usage.unwritten")

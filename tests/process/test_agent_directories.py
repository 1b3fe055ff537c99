"""What root in a container does to its directory stops no other pod, of a real agent."""

import asyncio
import os
from pathlib import Path

import pytest

from agent.sandbox.lab.cluster import SandboxCluster, fetch, open_cluster
from agent.sandbox.scenario.facts import is_running, pod_facts
from agent.sandbox.scenario.stage import Wish, Workload
from tests.process.agent_process import PATIENCE, comes, options, started

pytestmark = [
    pytest.mark.process,
    pytest.mark.looptime(False),
    pytest.mark.timeout(90),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away"),
]
OTHER = 65534


async def run_one(cluster: SandboxCluster, name: str) -> None:
    cluster.submit(Workload(name, "", (Wish("main", 1, 1024),)).pod())
    runs = await cluster.until(lambda: is_running(cluster, name), PATIENCE)
    assert runs, (cluster.pod(name)["status"], *cluster.log.last(20))


def kept_events(cluster: SandboxCluster) -> int:
    events = cluster.store.select("events")
    return sum(one["reason"] == "DirectoriesKept" for one in events)


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


async def test_the_agent_is_root_without_capabilities_as_the_unit_and_the_daemonset_run_it():
    async with open_cluster(options(gpus=1)) as cluster:
        await started(cluster, slices=10)
        said = status_of(cluster.agent.pid)

    assert {"0" * 16} == {said[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
    assert ("1", "0\t0\t0\t0") == (said["NoNewPrivs"], said["Uid"])


async def test_what_a_container_does_to_its_directory_stops_no_other_pod_and_no_restart():
    async with open_cluster(options(gpus=2)) as cluster:
        await started(cluster, slices=20)
        await run_one(cluster, "hostile")
        containers = cluster.places.hook / "vgpu" / "containers"
        (own,) = containers.iterdir()
        for number in range(3000):
            (own / str(number)).write_text("")
        own.chmod(0)
        await run_one(cluster, "beside")

        await cluster.kill_agent()
        await started(cluster, slices=20)
        await run_one(cluster, "after")

        held = {f"{pod_facts(cluster, name).uid}_main" for name in ("hostile", "beside", "after")}

        def found() -> dict[str, int]:
            return {path.name: path.stat().st_mode & 0o7777 for path in containers.iterdir()}

        assert await comes(lambda: dict.fromkeys(held, 0o777) == found()), found()
        assert [] == cluster.log.of("hooks.not_prepared")


async def test_what_no_agent_could_remove_is_counted_and_told_until_root_removes_it():
    async with open_cluster(options(gpus=2)) as cluster:
        containers = cluster.places.hook / "vgpu" / "containers"
        left = [containers / f".removed-{number:032x}-{number:016x}" for number in range(3)]
        for path in left:
            (path / "shut").mkdir(parents=True)
            (path / "shut" / "file").write_text("")
        os.chown(left[1] / "shut", OTHER, OTHER)
        await started(cluster, slices=20)

        assert await cluster.until(lambda: kept_events(cluster) == 1, PATIENCE)
        assert await comes(lambda: [left[1]] == list(containers.iterdir()))
        assert await cluster.until(lambda: cluster.web_address is not None, PATIENCE)
        page = await fetch(cluster.web_address or "", "/metrics")
        async with asyncio.timeout(PATIENCE):  # the room is measured beside the start of the web
            while "\nhami_agent_hook_available_bytes NaN\n" in page.text:
                await asyncio.sleep(0.05)
                page = await fetch(cluster.web_address or "", "/metrics")
        assert "\nhami_agent_directories_kept 1.0\n" in page.text
        samples = dict(line.split() for line in page.text.splitlines() if line.count(" ") == 1)
        assert 0 < float(samples["hami_agent_hook_available_bytes"])
        assert 0 < float(samples["hami_agent_hook_available_inodes"])

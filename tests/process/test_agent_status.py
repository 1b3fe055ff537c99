"""`status` and the read API beside a real agent: what happened is what they say."""

import asyncio
import json
import sys

import pytest

from agent.sandbox.lab.cluster import SandboxCluster, open_cluster
from agent.sandbox.lab.web import fetch
from agent.sandbox.scenario.facts import is_running
from agent.sandbox.scenario.workloads import Wish, Workload
from tests.process.agent_process import ENVIRON, PATIENCE, ROOT, options, started

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(90)]


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

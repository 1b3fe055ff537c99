"""Health as an operator meets it, with a real agent: recheck, Events, the Node's condition."""

import asyncio
import json
from typing import Any

import pytest

from agent.sandbox.lab.cluster import SandboxCluster, open_cluster
from agent.sandbox.lab.web import fetch
from tests.process.agent_process import PATIENCE, comes, options, run, started

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(90)]


async def verb(cluster: SandboxCluster, *words: str) -> tuple[int, str, str]:
    """A verb in a process of its own, with this cluster's sockets."""
    sockets = dict.fromkeys(("recheck", "release"), cluster.places.run / "api.sock")
    socket = sockets.get(words[0], cluster.places.hardware_socket)
    done = await asyncio.to_thread(run, *words, "--socket", str(socket))
    return done.returncode, done.stdout, done.stderr


async def answering(cluster: SandboxCluster, slices: int = 20) -> None:
    """The agent offers its slices and can be asked."""
    await started(cluster, slices=slices)
    assert await cluster.until((cluster.places.run / "api.sock").exists, PATIENCE)


async def fetched(cluster: SandboxCluster, path: str) -> str:
    """What the web door says."""
    assert await cluster.until(lambda: cluster.web_address is not None, PATIENCE)
    return (await fetch(cluster.web_address or "", path)).text


def condition(cluster: SandboxCluster) -> dict[str, Any]:
    conditions = (cluster.node().get("status") or {}).get("conditions") or []
    return next((one for one in conditions if one["type"] == "GpuDegraded"), {})


def reasons(cluster: SandboxCluster) -> list[str]:
    return [one["reason"] for one in cluster.store.select("events")]


async def test_a_gpu_that_falls_ill_is_told_everywhere_and_can_be_asked():
    async with open_cluster(options(gpus=2)) as cluster:
        cluster.places.config.write_text("report: {nodeCondition: true}\n")
        await answering(cluster)
        assert await cluster.until(lambda: condition(cluster).get("status") == "False", PATIENCE)

        code, text, _ = await verb(cluster, "recheck", "1")
        assert (0, True) == (code, "ok since" in text)
        assert 0 == (await verb(cluster, "simulate", "xid", "48", "--gpu", "1"))[0]
        assert await cluster.until(lambda: cluster.allocatable() == 10, PATIENCE)

        code, text, _ = await verb(cluster, "recheck", "1")
        assert 1 == code
        for words in ("not served", "[H-048]", "needed: a reset of the GPU"):
            assert words in text
        code, text, _ = await verb(cluster, "recheck", "1", "-o", "json")
        assert ("bad", "reset") == (
            json.loads(text)["data"]["condition"],
            json.loads(text)["data"]["action"],
        )
        assert 4 == (await verb(cluster, "recheck", "7"))[0]
        assert await cluster.until(lambda: condition(cluster).get("status") == "True", PATIENCE)
        assert "XID 48" in condition(cluster)["message"]
        assert await cluster.until(lambda: "GpuUnhealthy" in reasons(cluster), PATIENCE)


@pytest.mark.slow
async def test_an_ill_gpu_that_nobody_holds_is_in_view_after_a_restart():
    async with open_cluster(options(gpus=3)) as cluster:
        cluster.places.config.write_text("report: {nodeCondition: true}\n")
        await answering(cluster, 30)
        ill = cluster.hardware.states[1].gpu.uuid
        assert 0 == (await verb(cluster, "simulate", "refuse", "--gpu", "1"))[0]
        assert await cluster.until(lambda: condition(cluster).get("status") == "True", PATIENCE)
        before = condition(cluster)
        # The memory is written behind the list; a death in between is not what is asked here.
        memory = cluster.places.state / "state.json"
        assert await comes(lambda: memory.exists() and "refused" in memory.read_text())

        await cluster.kill_agent()
        (cluster.places.run / "api.sock").unlink()  # or the dead one's would be asked
        await answering(cluster, 20)

        assert before == condition(cluster)
        code, text, _ = await verb(cluster, "recheck", ill)
        assert (1, True) == (code, "bad since" in text and "[H-RESET]" in text)
        told = await fetched(cluster, "/metrics")
        assert f'gpu="1",mode="hami-core",model="",numa="",pci="",uuid="{ill}"}} 1.0' in told
        assert 'hami_agent_gpu_health{gpu="1",state="bad"} 1.0' in told
        assert 'hami_agent_degraded{reason="gpu_health"} 1.0' in told
        assert 'hami_agent_slices{gpu="1",state="healthy"} 0.0' in told
        assert "GPU 1 is bad: " in await fetched(cluster, "/readyz?verbose")
        register = "hami.io/node-nvidia-register"
        assert await cluster.until(
            lambda: ill not in cluster.node_annotations()[register], PATIENCE
        )
        assert "GpuLeftOut" not in reasons(cluster)


@pytest.mark.slow
async def test_a_gpu_is_released_for_its_reset_and_taken_back_by_an_operators_word():
    async with open_cluster(options(gpus=2)) as cluster:
        await answering(cluster)
        assert 0 == (await verb(cluster, "simulate", "xid", "48", "--gpu", "1"))[0]
        assert await cluster.until(lambda: cluster.allocatable() == 10, PATIENCE)

        code, text, _ = await verb(cluster, "release", "1")
        assert (0, True) == (code, "released; `hami-agent recheck` takes it back" in text)
        assert "[H-RELEASED]" in await fetched(cluster, "/readyz?verbose")
        assert 0 == (await verb(cluster, "simulate", "restore", "--gpu", "1"))[0]
        assert await cluster.until(lambda: cluster.hardware.states[1].words == "ok", PATIENCE)
        code, text, _ = await verb(cluster, "recheck", "--was-reset", "1")
        assert 1 == code
        for words in ("it answered", "bad since", "s more without a bad report"):
            assert words in text
        assert "reset of the GPU" not in text

        code, text, _ = await verb(cluster, "release", "all")
        assert 0 == code
        assert await cluster.until(lambda: cluster.allocatable() == 0, PATIENCE)
        assert 0 == (await verb(cluster, "recheck", "0"))[0]
        assert await cluster.until(lambda: cluster.allocatable() == 10, PATIENCE)
        assert await cluster.until(lambda: "GpuReleased" in reasons(cluster), PATIENCE)
        assert 4 == (await verb(cluster, "release", "7"))[0]


async def test_all_gpus_that_were_released_are_taken_back_with_one_word():
    async with open_cluster(options(gpus=2)) as cluster:
        await answering(cluster)
        code, text, _ = await verb(cluster, "release", "all")
        assert (0, True) == (code, "`hami-agent recheck all` takes them back" in text)
        assert await cluster.until(lambda: cluster.allocatable() == 0, PATIENCE)

        code, text, _ = await verb(cluster, "recheck", "all")
        assert (0, 2) == (code, text.count("it answered"))
        assert await cluster.until(lambda: cluster.allocatable() == 20, PATIENCE)
        assert 0 == (await verb(cluster, "recheck", "--was-reset", "all"))[0]


async def test_where_health_checks_are_switched_off_no_gpu_is_bad():
    async with open_cluster(options(gpus=2)) as cluster:
        cluster.places.config.write_text("health: {disabledXids: all}\n")
        await answering(cluster)
        assert 0 == (await verb(cluster, "simulate", "xid", "48", "--gpu", "0"))[0]

        code, text, _ = await verb(cluster, "recheck", "0")
        assert (0, True) == (code, "[H-OFF]" in text)
        assert 20 == cluster.allocatable()

"""GPUs come, go and change places and modes under a whole agent, and so does their driver."""

import asyncio
import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.sandbox.lab.cluster import SandboxCluster, fetch, open_cluster
from agent.state import CURRENT, decode_state, encode_state
from tests.fakes.nvml_stub import NvmlStub
from tests.process.agent_process import PATIENCE, comes, offers, options, run, started
from tests.process.driver_node import GPUS, LIMIT, SLICES, DriverNode, a_cluster, a_node, start

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(120)]


def test_a_driver_that_fails_is_69_where_the_agent_is_to_exit(library, tmp_path):
    stub = NvmlStub(library)
    stub.fail("nvmlDeviceGetCount_v2", code=999)
    (tmp_path / "plugins").mkdir()
    ended = run(
        "run",
        *("--scheduler", "none", "--node-name", "here", "--web-port", "0"),
        *("--nvml-library", str(library), "--on-no-driver", "exit"),
        *("--state-dir", str(tmp_path / "state"), "--run-dir", str(tmp_path / "run")),
        *("--hook-path", str(tmp_path / "hook")),
        *("--kubelet-socket", str(tmp_path / "plugins" / "kubelet.sock")),
    )

    assert 69 == ended.returncode, ended.stderr
    assert "driver answers with an error" in ended.stderr


async def booted(cluster: SandboxCluster) -> None:
    """What a boot leaves: no agent, and a state that was written before it."""
    assert 0 == await cluster.stop_agent()
    path = cluster.places.state / CURRENT
    state = decode_state(path.read_bytes())
    path.write_bytes(encode_state(msgspec.structs.replace(state, boot_id="of the boot before")))


async def test_a_boot_ends_what_a_reset_would_and_a_restart_of_the_agent_does_not(library):
    async with a_node(library) as node:
        node.stub.set(1, recovery=-1)  # a driver before 570 tells no need of a reset
        node.stub.xid(1, 48)
        assert await offers(node.cluster, 10 * (GPUS - 1)), node.cluster.log.last(20)
        assert 0 == await node.cluster.stop_agent()
        await start(node.cluster, library)
        assert await offers(node.cluster, 10 * (GPUS - 1)), node.cluster.log.last(20)

        await booted(node.cluster)
        await start(node.cluster, library)

        assert await offers(node.cluster, 10 * GPUS), node.cluster.log.last(20)


# A whole agent on the real pynvml and a library of ours that hangs: the agent never does.

HANG = 20.0
PROBE = 1.0
"""Seconds: a page that waits for a call to the driver takes the two of its deadline."""


@dataclass
class WatchedAgent:
    """What was seen of an agent whose driver hung. `refused_at`: seconds after it began to.

    `early`, `later`: the seconds of each page before a slice was refused, and after.
    """

    answered: int = 0
    refused_at: float | None = None
    refusal: str = ""
    most_threads: int = 0
    ready: set[int] = field(default_factory=set)
    early: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)


async def watch(node: DriverNode, seconds: float) -> WatchedAgent:
    """Ask the agent everything again and again: pages, and slices until one is refused."""
    seen, loop = WatchedAgent(), asyncio.get_running_loop()
    begun = loop.time()
    while loop.time() - begun < seconds:
        asked = loop.time()
        live, words = await node.page("/livez")
        lives = loop.time()
        assert 200 == live, words
        seen.ready.add((await node.page("/readyz"))[0])
        pages = seen.early if seen.refused_at is None else seen.later
        pages += [lives - asked, loop.time() - lives]
        if seen.refused_at is None:
            seen.refusal = await node.allocate(SLICES[1 + seen.answered])
            seen.answered += not seen.refusal
            seen.refused_at = loop.time() - begun if seen.refusal else None
        seen.most_threads = max(seen.most_threads, node.threads)
        await asyncio.sleep(0.3)
    return seen


@pytest.mark.slow
async def test_a_library_that_hangs_for_20_s_holds_up_no_page_and_refuses_with_the_reason(library):
    async with a_node(library) as node:
        assert "" == await node.allocate(SLICES[0])
        assert await comes(lambda: node.stub.inside == 0)
        threads = node.threads
        node.stub.hang()
        seen = await watch(node, HANG)

        assert seen.answered >= 1
        assert seen.refused_at is not None
        assert LIMIT <= seen.refused_at
        # In the middle: a single page may be late on a busy machine, with any driver.
        assert statistics.median(seen.early) < PROBE, seen.early
        assert statistics.median(seen.later) < PROBE, seen.later
        assert "the driver has not answered for its GPU" in seen.refusal
        assert "HA-4005" in seen.refusal
        assert 0 == node.cluster.allocatable()
        assert seen.most_threads <= threads + GPUS + 2  # the driver's own, and a slow one's

        node.stub.hang(hung=False)
        assert await offers(node.cluster, 10 * GPUS), node.cluster.log.last(20)
        assert "" == await node.allocate(SLICES[-1])
        assert await comes(lambda: node.stub.inside == 0)
        assert await comes(lambda: node.threads <= threads), (threads, node.threads)
        assert 0 == await node.cluster.stop_agent()
    assert (0, 0, 0) == (node.stub.sessions, node.stub.sets, node.stub.undefined)


async def test_an_xid_of_the_library_takes_the_slices_of_its_gpu_away(library):
    async with a_node(library) as node:
        node.stub.xid(2, 48)

        assert await offers(node.cluster, 10 * (GPUS - 1)), node.cluster.log.last(20)
        assert "XID 48" in await node.allocate("GPU-5708-2-0")
        assert "" == await node.allocate("GPU-5708-0-0")


async def test_release_all_lets_go_of_a_gpu_that_is_not_shared_too(library):
    stub = NvmlStub(library)
    stub.set(1, mig=1)
    stub.set(2, memory=16 << 30)
    async with a_cluster() as cluster:
        await start(cluster, library)
        assert await offers(cluster, 20), cluster.log.last(20)
        socket = str(cluster.places.run / "api.sock")
        assert await comes(lambda: Path(socket).exists())
        one = await asyncio.to_thread(run, "release", "1", "--socket", socket)
        every = await asyncio.to_thread(run, "release", "all", "--socket", socket)

        assert 1 == one.returncode
        assert "GPU 1 is not shared: it is in MIG mode" in one.stderr
        assert "`hami-agent release all` releases it too" in one.stderr
        assert 0 == every.returncode, every.stderr
        assert ([False] * 3, 0) == ([stub.attached(slot) for slot in range(3)], stub.sessions)
        stub.set(1, mig=0)
        await asyncio.to_thread(run, "recheck", "all", "--socket", socket)
        assert await offers(cluster, 30), cluster.log.last(20)


# Health as an operator meets it, with a real agent: recheck, Events, the Node's condition.


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

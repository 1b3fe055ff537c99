"""GPUs come, go and change places and modes under a whole agent, and so does their driver."""

import re
import shutil

import msgspec
import pytest

from agent.hami.register import decode_register
from agent.sandbox.lab.cluster import SandboxCluster, open_cluster
from agent.state import CURRENT, StateEncoder, decode_state
from tests.fakes.nvml_stub import NvmlStub
from tests.process.agent_process import PATIENCE, offers, options, run, started
from tests.process.driver_node import GPUS, DriverNode, a_cluster, a_node, start

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(120)]

NOT_LOADED = 9
MIG_CHANGED = 0x100
HELD = "GPU-5708-1-0"


async def says(cluster: SandboxCluster, words: str) -> bool:
    """Whether the agent's log says so, in time."""
    return await cluster.until(lambda: any(words in line.text for line in cluster.log), PATIENCE)


async def shows(node: DriverNode, words: str) -> bool:
    """Whether the metrics show it, in time: nothing tells when a page changes."""
    for _ in range(int(PATIENCE / 0.2)):
        if words in (await node.page("/metrics"))[1]:
            return True
        await node.cluster.until(lambda: False, 0.2)
    return False


def registered(cluster: SandboxCluster) -> int:
    text = cluster.node_annotations().get("hami.io/node-nvidia-register")
    return len(decode_register(text)) if text else 0


async def test_gpus_are_plugged_in_and_unplugged_under_a_running_agent():
    async with open_cluster(options(gpus=2)) as cluster:
        await started(cluster, slices=20)
        assert await cluster.until(lambda: registered(cluster) == 2, PATIENCE)
        added = cluster.hardware.add().gpu
        assert await offers(cluster, 30)
        assert await cluster.until(lambda: registered(cluster) == 3, PATIENCE)
        cluster.hardware.remove(added.uuid)
        assert await offers(cluster, 20)
        assert await cluster.until(lambda: registered(cluster) == 2, PATIENCE)

        def told() -> list[str]:
            events = cluster.store.select("events")
            return [one["message"] for one in events if one["reason"] == "GpuInventoryChanged"]

        shared, gone = (
            f"{word}: GPU 2 ({added.uuid})" for word in ("shared now", "no longer shared")
        )
        assert await cluster.until(lambda: {shared, gone} <= {*told()}, PATIENCE), told()


async def test_a_gpu_of_the_library_that_is_gone_leaves_the_list(library):
    async with a_node(library) as node:
        node.stub.order([0, 2])

        assert await offers(node.cluster, 10 * (GPUS - 1)), node.cluster.log.last(20)
        assert await says(node.cluster, "the driver no longer reaches it")
        assert "" == await node.allocate("GPU-5708-2-0")


async def test_a_driver_is_unloaded_and_loaded_again_with_one_gpu_more(library):
    async with a_node(library) as node:
        assert "" == await node.allocate(HELD)
        node.stub.fail("any", code=NOT_LOADED)
        assert await offers(node.cluster, 0), node.cluster.log.last(20)
        assert 200 == (await node.page("/livez"))[0]
        assert "HA-4005" in await node.allocate("GPU-5708-0-1")

        node.stub.end()
        node.stub.order(range(GPUS + 1))
        node.stub.fail("any", code=0)
        assert await offers(node.cluster, 10 * (GPUS + 1)), node.cluster.log.last(20)
        assert "" == await node.allocate("GPU-5708-3-0")


async def test_a_library_that_appears_later_is_used_without_a_restart(built, tmp_path):
    library = tmp_path / "libnvidia-ml.so.1"
    async with a_cluster() as cluster:
        await start(cluster, library)
        assert await says(cluster, "cannot be loaded")
        shutil.copy(built, tmp_path / "copy")
        NvmlStub(tmp_path / "copy").set(2, memory=16 << 30)
        (tmp_path / "copy").rename(library)
        (tmp_path / "copy.state").rename(f"{library}.state")

        assert await offers(cluster, 10 * GPUS), cluster.log.last(20)
        assert 1 == len(cluster.children)


async def test_after_a_boot_that_shuffled_the_indexes_each_gpu_keeps_its_slices(library):
    async with a_node(library) as node:
        assert "" == await node.allocate(HELD)
        assert await shows(node, 'hami_agent_slices_allocated{gpu="1"} 1.0')
        assert 0 == await node.cluster.stop_agent()
        assert await offers(node.cluster, 0)
        node.stub.order([1, 2, 0])
        await start(node.cluster, library)

        assert await offers(node.cluster, 10 * GPUS), node.cluster.log.last(20)
        assert await node.cluster.until(lambda: node.cluster.web_address is not None, PATIENCE)
        assert await shows(node, 'hami_agent_slices_allocated{gpu="0"} 1.0')
        assert 'gpu="0",mode="hami-core",model="Stub GPU"' in (await node.page("/metrics"))[1]


async def test_a_gpu_that_is_switched_to_mig_mode_is_not_shared_until_it_is_switched_back(library):
    async with a_node(library) as node:
        assert "" == await node.allocate(HELD)
        node.stub.set(1, mig=1)
        node.stub.event(1, MIG_CHANGED)
        assert await offers(node.cluster, 10 * (GPUS - 1)), node.cluster.log.last(20)
        assert await says(node.cluster, "is not shared: it is in MIG mode")
        assert "HA-" in await node.allocate("GPU-5708-1-1")
        assert "" == await node.allocate("GPU-5708-0-0")

        node.stub.set(1, mig=0)
        node.stub.event(1, MIG_CHANGED)
        assert await offers(node.cluster, 10 * GPUS), node.cluster.log.last(20)
        assert "" == await node.allocate("GPU-5708-1-1")


async def test_how_much_a_gpu_is_used_is_shown(library):
    async with a_node(library) as node:
        node.stub.set(1, gpu_percent=93, used=7 << 30, celsius=41, ecc_life_corrected=9)

        assert await shows(node, 'hami_agent_gpu_utilization_ratio{gpu="1"} 0.93')
        assert await shows(node, 'hami_agent_gpu_memory_used_bytes{gpu="1"} 7.516192768e+09')
        page = (await node.page("/metrics"))[1]
        heat = re.findall(
            r'^hami_host_gpu_temperature_celsius{device_index="(.)".* (.+)$', page, re.MULTILINE
        )
        assert [("1", "41.0")] == heat  # the others do not tell
        assert 'error_type="corrected",' in page


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
    path.write_bytes(
        StateEncoder().encode(msgspec.structs.replace(state, boot_id="of the boot before"))
    )


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

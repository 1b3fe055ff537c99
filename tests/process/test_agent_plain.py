"""Plain mode as a real process beside the kubelet model, with no API server to be found."""

import contextlib
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from agent.ledger import Ledger
from agent.sandbox.api_errors import Json
from agent.sandbox.kubelet.pods import KubeletAdmission
from agent.sandbox.lab.cluster import RESOURCE, SandboxCluster, open_cluster
from agent.sandbox.lab.web import fetch
from agent.state import StateEncoder, decode_state
from agent.wire.v1beta1 import ContainerAllocateResponse
from tests.process.agent_process import PATIENCE, comes, offers, options, started

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(60)]


@contextlib.asynccontextmanager
async def a_node(*arguments: str, limits: bool = True) -> AsyncIterator[SandboxCluster]:
    """A node whose agent is in plain mode and could not find an API server if it wanted to."""
    async with open_cluster(options("--scheduler", "none", *arguments, gpus=2)) as cluster:
        cluster.places.kubeconfig.unlink()
        cluster.places.config.write_text(f"plain:\n  memoryLimits: {str(limits).lower()}\n")
        yield await started(cluster, slices=20)


def a_pod(name: str, *counts: int) -> Json:
    containers = [
        {"name": f"c{number}", "resources": {"limits": {RESOURCE: str(count)}}}
        for number, count in enumerate(counts or (1,))
    ]
    metadata = {"uid": str(uuid.uuid5(uuid.NAMESPACE_DNS, name)), "namespace": "a", "name": name}
    return {"metadata": metadata, "spec": {"containers": containers}}


def uid_of(name: str) -> str:
    uid: str = a_pod(name)["metadata"]["uid"]
    return uid


async def admit(cluster: SandboxCluster, name: str, *counts: int) -> KubeletAdmission:
    return await cluster.kubelet.admit(a_pod(name, *counts))


async def runs(cluster: SandboxCluster, name: str, *counts: int) -> ContainerAllocateResponse:
    """The answer of the pod's first container, once it runs."""
    admission = await admit(cluster, name, *counts)
    assert admission.admitted, admission.message
    await cluster.kubelet.until_running(uid_of(name), "c0")
    return admission.containers["c0"]


def directory(answer: ContainerAllocateResponse) -> Path:
    """The directory of its own that an answer mounts."""
    (found,) = {Path(one.host_path) for one in answer.mounts if "/containers/" in one.host_path}
    return found


def ledger(cluster: SandboxCluster) -> Ledger:
    file = cluster.places.state / "state.json"
    return decode_state(file.read_bytes()).ledger if file.exists() else Ledger()


def holders(cluster: SandboxCluster) -> set[str]:
    """The pods that the ledger knows as holders."""
    return {row.holder.pod for row in ledger(cluster).rows if row.holder is not None}


async def test_pods_get_their_slices_and_it_is_ready_without_any_api_server():
    async with a_node() as cluster:
        first, second = await runs(cluster, "one", 1), await runs(cluster, "two", 2)
        assert await cluster.until(lambda: cluster.web_address is not None, PATIENCE)
        page = await fetch(cluster.web_address or "", "/readyz?verbose")
        metrics = await fetch(cluster.web_address or "", "/metrics")

        assert 200 == page.status, page.text
        assert "api_synced" not in page.text
        assert 'hami_agent_allocations_total{reason="",result="ok"} 2.0' in metrics.text

        assert "8155m" == first.envs["CUDA_DEVICE_MEMORY_LIMIT_0"]
        assert directory(first).is_dir()
        assert directory(first) != directory(second)
        assert 2 == len(second.envs["NVIDIA_VISIBLE_DEVICES"].split(","))
        assert await comes(lambda: {"one", "two"} == holders(cluster))
        assert {} == dict(cluster.api.journal.counts)


async def test_without_limits_a_container_gets_its_gpus_and_nothing_else():
    async with a_node(limits=False) as cluster:
        answer = await runs(cluster, "one", 1)

        assert {"NVIDIA_VISIBLE_DEVICES"} == set(answer.envs)
        assert [] == answer.mounts
        assert not (cluster.places.hook / "vgpu" / "containers").exists()


@pytest.mark.timeout(120)
async def test_a_row_and_its_directory_go_when_the_pod_ends():
    async with a_node() as cluster:
        ended = directory(await runs(cluster, "one", 1))
        stays = directory(await runs(cluster, "two", 1))
        assert await comes(lambda: {"one", "two"} == holders(cluster))

        await cluster.kubelet.pod_gone(uid_of("one"))
        await runs(cluster, "three", 1)  # a burst, after which the kubelet is asked

        assert await comes(lambda: {"two", "three"} == holders(cluster), 60)
        assert not ended.exists()
        assert stays.is_dir()
        assert await comes(lambda: [] == list(ended.parent.glob(".removed-*")))


async def test_a_restarted_kubelet_finds_everything_and_asks_for_nothing_again():
    async with a_node() as cluster:
        mine = directory(await runs(cluster, "one", 1))
        assert await comes(lambda: {"one"} == holders(cluster))
        before = ledger(cluster).rows[0].epoch

        await cluster.kubelet.restart()

        assert await offers(cluster, 20)
        assert await comes(lambda: ledger(cluster).rows[0].epoch != before), cluster.log.last(20)
        assert 1 == len(cluster.kubelet.history.of("allocated"))
        assert mine.is_dir()


async def test_after_a_lost_checkpoint_nobody_gets_the_directory_of_a_running_container():
    async with a_node() as cluster:
        mine = directory(await runs(cluster, "one", 1))
        assert await comes(lambda: {"one"} == holders(cluster))

        await cluster.kubelet.restart(lose_checkpoint=True)
        assert await offers(cluster, 20)
        others = {directory(await runs(cluster, f"p{number}", 2)) for number in range(9)}

        assert 9 == len(others - {mine})
        assert mine.is_dir()
        await cluster.end_container(uid_of("one"), "c0")
        await cluster.kubelet.until_running(uid_of("one"), "c0")
        assert await comes(lambda: 10 == len(holders(cluster)))
        assert mine.is_dir()


async def test_a_killed_agent_loses_no_row_and_the_next_one_serves_on():
    async with a_node() as cluster:
        first = directory(await runs(cluster, "one", 1))
        await cluster.kill_agent()
        assert await offers(cluster, 0)
        first.rmdir()  # as after a reboot with a hook path in memory
        await started(cluster, slices=20)

        second = directory(await runs(cluster, "two", 1))

        assert await comes(lambda: {"one", "two"} == holders(cluster))
        assert first.is_dir()
        assert first != second


async def test_an_answer_that_a_kubelet_died_over_is_given_again_to_the_byte():
    async with a_node() as cluster:
        await runs(cluster, "one", 1)
        assert await comes(lambda: {"one"} == holders(cluster))
        (row,) = ledger(cluster).rows
        await cluster.kill_agent()
        await cluster.kubelet.kill()
        # the kubelet's books never had it, its pod is asked for again under the next kubelet
        unbooked = msgspec.structs.replace(row, holder=None, confirmed=False)
        state = decode_state((cluster.places.state / "state.json").read_bytes())
        state = msgspec.structs.replace(state, ledger=Ledger((unbooked,)))
        (cluster.places.state / "state.json").write_bytes(StateEncoder().encode(state))
        (cluster.places.plugins / "kubelet_internal_checkpoint").unlink()
        cluster.kubelet.node.remove(uid_of("one"))
        await cluster.kubelet.start()
        await started(cluster, slices=20)

        again = await runs(cluster, "one", 1)

        assert row.slice_ids == ledger(cluster).rows[-1].slice_ids
        assert dict(row.edits.envs) == again.envs
        assert directory(again) == Path(
            next(one.host_path for one in row.edits.mounts if "/containers/" in one.host_path)
        )


async def test_a_bad_gpu_leaves_the_list_and_its_slices_are_refused():
    async with a_node() as cluster:
        await runs(cluster, "one", 1)
        cluster.hardware.xid("0", 79)

        assert await offers(cluster, 10), cluster.log.last(20)
        assert 20 == cluster.kubelet.capacity(RESOURCE)
        answers = [await runs(cluster, f"p{number}", 1) for number in range(3)]
        well = cluster.hardware.find("1").gpu.uuid
        assert {well} == {one.envs["NVIDIA_VISIBLE_DEVICES"] for one in answers}

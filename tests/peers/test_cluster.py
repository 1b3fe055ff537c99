"""Two clusters side by side: neither disturbs the other, nor the host, and nothing is left."""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.cluster import Cluster, open_cluster
from tests.peers.lab.keeper import kept
from tests.peers.lab.space import hierarchies
from tests.peers.lab.workloads import NAMESPACE, a_pod

HOST = tuple(Path(name) for name in ("/var/lib/kubelet", "/var/lib/hami-agent", "/usr/local/vgpu"))


@pytest.mark.timeout(300)
async def test_a_second_cluster_stands_beside_the_first_and_leaves_nothing(
    cluster, agent, programs, table
):
    await run_a_pod(cluster, "with-one")
    mounts, files, groups = mounted(), host_files(), foreign_cgroups()
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with kept(open_cluster(programs)) as second:
        table.add("second cluster beside the first: start → Node ready", loop.time() - began, 45)
        await second.start_registered_agent()
        await run_a_pod(cluster, "with-two")
        await run_a_pod(second, "with-two")

        assert cluster.is_sharing(80)
        assert [80, 80] == [await slices(one) for one in (cluster, second)]
        assert {"default/with-one", "default/with-two"} == await holders(cluster)
        assert {"default/with-two"} == await holders(second)
        assert mounts == mounted()
        assert files == host_files()
        assert groups == foreign_cgroups()
        processes = processes_of(second)
        assert {"etcd", "kubelet", "containerd", "sh"} <= set(processes.values())

    assert {} == processes_of(second)
    assert mounts == mounted()
    assert files == host_files()
    assert groups == foreign_cgroups()
    assert [] == [tree for tree in hierarchies() if (tree / second.root.name).exists()]
    assert not second.root.exists()
    assert agent.part.is_alive
    await run_a_pod(cluster, "with-one-again")


async def run_a_pod(cluster: Cluster, name: str) -> None:
    """Have HAMi's scheduler place a pod with a GPU; returns when it runs."""
    key = f"{NAMESPACE}/{name}"

    def phase() -> str | None:
        return cluster.pods.objects.get(key, {"status": {}})["status"].get("phase")

    await cluster.reading.until_current()
    await cluster.api.create(f"/api/v1/namespaces/{NAMESPACE}/pods", a_pod(name))
    await cluster.pods.until(lambda: phase() in ("Running", "Failed"), 60.0, f"{name} does not run")
    assert "Running" == phase(), cluster.pods.objects[key]["status"]


async def slices(cluster: Cluster) -> int:
    """How many slices the kubelet counts."""
    return len(await cluster.kubelet.allocatable(RESOURCE))


async def holders(cluster: Cluster) -> set[str]:
    """The pods to which the kubelet has given slices."""
    return {key for key, _ in await cluster.kubelet.held(RESOURCE)}


def mounted() -> str:
    """What is mounted on the host, as the tests see it."""
    return Path("/proc/self/mountinfo").read_text()


def host_files() -> Mapping[Path, int]:
    """What the host has where a node keeps its state, and when it was last changed."""
    present = (path for root in HOST if root.exists() for path in (root, *root.rglob("*")))
    return {path: path.lstat().st_mtime_ns for path in present}


def foreign_cgroups() -> list[Path]:
    """The host's own cgroups: a cluster has one in each tree, and all of its others below it."""
    found = (path for tree in hierarchies() for path in tree.iterdir() if path.is_dir())
    return sorted(path for path in found if not path.name.startswith("hp-"))


def processes_of(cluster: Cluster) -> Mapping[int, str]:
    """The programs by pid that are in a cluster's cgroups, or that its directory is named to."""
    return dict(_processes(cluster.root))


def _processes(root: Path) -> Iterator[tuple[int, str]]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            name = (process / "comm").read_text().strip()
            words = (process / "cmdline").read_text(errors="replace")
            groups = (process / "cgroup").read_text()
        except OSError:  # it has just ended
            continue
        if str(root) in words or f"/{root.name}" in groups:
            yield int(process.name), name

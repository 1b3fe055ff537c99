"""The node under siege: one agent without capabilities, the models beside it, a disk of its own."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import pytest

from agent.sandbox.lab.cluster import SandboxCluster, open_cluster
from agent.sandbox.lab.web import fetch
from agent.sandbox.scenario.sums import SumWatch
from agent.sandbox.scenario.workloads import Wish, Workload
from agent.sandbox.scheduler.model import SchedulerSettings
from tests.hostile.lab.disks import disk
from tests.hostile.lab.pods import Pods
from tests.process.agent_process import PATIENCE, options, started

MIB, INODES = 6144, 1_500_000
NEIGHBOUR: Final = "neighbour"
SLICES: Final = 20


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """What a siege is about. `neighbour` is the directory of a tenant that nobody may touch."""

    cluster: SandboxCluster
    pods: Pods
    sums: SumWatch
    neighbour: Path
    kind: str

    @property
    def containers(self) -> Path:
        """Above the containers' directories."""
        return self.cluster.places.hook / "vgpu" / "containers"

    @property
    def agent(self) -> int:
        """The agent's process."""
        return self.cluster.agent.pid

    @property
    def socket(self) -> Path:
        """The plugin's, where the kubelet calls."""
        (path,) = self.cluster.places.plugins.glob("hami-gpu-*.sock")
        return path

    @property
    def port(self) -> int:
        """The web door's."""
        address = self.cluster.web_address
        assert address is not None
        return int(address.rpartition(":")[2])

    async def tenant(self, name: str) -> Path:
        """A pod that runs; the directory that its container has mounted."""
        cluster = self.cluster
        cluster.submit(Workload(name, "", (Wish("main", 1, 256),)).pod())
        assert await cluster.until(lambda: self.pods.is_served(name), PATIENCE), self.pods.why(name)
        uid = cluster.pod(name)["metadata"]["uid"]
        return self.containers / f"{uid}_main"

    async def is_alive(self) -> None:
        """The kubelet's probe is answered, and in the time that it has."""
        page = await fetch(self.cluster.web_address or "", "/livez")
        assert (200, True) == (page.status, self.cluster.agent.code is None)

    def resident(self) -> int:
        """MiB that the agent holds in memory."""
        status = Path(f"/proc/{self.agent}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) // 1024


@contextlib.asynccontextmanager
async def open_node(slices: int = 80) -> AsyncIterator[Node]:
    """The agent at work, beside a neighbour that has something in its directory.

    Strangers may come as near as any file system lets them: nothing above is closed.
    """
    chosen = dataclasses.replace(options(gpus=slices // 10), scheduler=SchedulerSettings().quick())
    with _own_disk() as kind:
        async with open_cluster(chosen) as cluster:
            cluster.places.root.chmod(0o755)
            cluster.places.plugins.chmod(0o755)
            await started(cluster, slices=slices)
            gpus = {state.gpu.uuid: state.gpu for state in cluster.hardware.states}
            pods, sums = Pods(cluster, gpus), SumWatch(cluster, gpus, 10)
            cluster.kubelet.history.listen(pods.hear)
            cluster.kubelet.history.listen(sums.hear)
            node = Node(cluster, pods, sums, Path(), kind)
            node.neighbour = await node.tenant(NEIGHBOUR)
            (node.neighbour / "mine").write_text("mine")
            (node.neighbour / "mine").chmod(0o600)
            assert await cluster.until(lambda: cluster.web_address is not None, PATIENCE)
            yield node


@contextlib.contextmanager
def _own_disk() -> Iterator[str]:
    """All that the cluster makes lies on a file system of its own."""
    with tempfile.TemporaryDirectory(prefix="hami-hostile-", dir="/var/tmp") as made:
        image, at = Path(made) / "image", Path(made) / "d"
        os.chmod(made, 0o755)
        with disk(image, at, mib=MIB, inodes=INODES) as kind, pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(at))
            yield kind

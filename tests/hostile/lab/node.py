"""The node under siege: one agent without capabilities, the models beside it, a disk of its own."""

import asyncio
import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import aiohttp
import pytest

from agent.sandbox.api_errors import Json
from agent.sandbox.kubelet.podloop import ended_status, merged
from agent.sandbox.lab.cluster import NAMESPACE, SandboxCluster, open_cluster
from agent.sandbox.lab.web import DEADLINE, fetch
from agent.sandbox.scenario.stage import SumWatch
from agent.sandbox.scenario.workloads import Wish, Workload
from agent.sandbox.scheduler.model import SchedulerSettings
from tests.hostile.lab.disks import disk, mounted
from tests.hostile.lab.pods import Pods
from tests.process.agent_process import PATIENCE, comes, offers, options, started

MIB, INODES = 6144, 1_500_000
NEIGHBOUR: Final = "neighbour"
SLICES: Final = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Tenant:
    """A pod whose container does what it likes in `directory`; `aside` is how that is called when
    it was set aside."""

    name: str
    uid: str
    directory: Path

    def aside(self) -> list[Path]:
        """What is left of it under the name that it has after its pod's end."""
        return list(self.directory.parent.glob(f".removed-{self.uid.replace('-', '')}-*"))


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """What a siege is about. `neighbour` is the directory of a tenant that nobody may touch."""

    cluster: SandboxCluster
    pods: Pods
    sums: SumWatch
    neighbour: Path
    kind: str
    slices: int

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
    def address(self) -> str:
        """The web door's: it tells a free port in its log, or it was given one."""
        chosen = self.cluster.options.web_port
        return f"http://127.0.0.1:{chosen}" if chosen else self.cluster.web_address or ""

    @property
    def port(self) -> int:
        """The web door's."""
        return int(self.address.rpartition(":")[2])

    @property
    def roots_door(self) -> Path:
        """The web door on a unix socket."""
        return self.cluster.places.run / "api.sock"

    async def tenant(self, name: str) -> Tenant:
        """A pod that runs."""
        cluster = self.cluster
        cluster.submit(Workload(name, "", (Wish("main", 1, 256),)).pod())
        assert await cluster.until(lambda: self.pods.is_served(name), PATIENCE), self.pods.why(name)
        uid = cluster.pod(name)["metadata"]["uid"]
        return Tenant(name, uid, self.containers / f"{uid}_main")

    async def end(self, tenant: Tenant) -> None:
        """Its pod succeeds, and the directory is set aside. A new kubelet makes that soon: the
        agent then looks at once who is there no more; else it is a minute."""
        kubelet, store = self.cluster.kubelet, self.cluster.store
        pod = kubelet.pod(tenant.uid)
        assert pod is not None
        await kubelet.pod_gone(tenant.uid)
        status = ended_status(pod, kubelet.clock.now().strftime("%Y-%m-%dT%H:%M:%SZ"))

        def succeeded(found: Json) -> Json:
            found["status"] = merged(found["status"], status)
            return found

        store.update("pods", NAMESPACE, tenant.name, succeeded, uid=tenant.uid)
        await kubelet.restart()
        assert await offers(self.cluster, self.slices), self.cluster.log.last(20)
        assert await comes(lambda: not tenant.directory.exists()), self.cluster.log.last(20)
        self.pods.delete(tenant.name)

    async def is_alive(self) -> None:
        """The kubelet's probe is answered, and in the time that it has."""
        page = await fetch(self.address, "/livez")
        assert (200, True) == (page.status, self.cluster.agent.code is None)

    async def is_alive_for_root(self) -> None:
        """The same over the unix socket."""
        connector = aiohttp.UnixConnector(str(self.roots_door))
        async with (
            asyncio.timeout(DEADLINE),
            aiohttp.ClientSession("http://agent", connector=connector) as client,
            client.get("/livez") as answer,
        ):
            assert (200, True) == (answer.status, self.cluster.agent.code is None)

    def resident(self) -> int:
        """MiB that the agent holds in memory."""
        status = Path(f"/proc/{self.agent}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) // 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Small:
    """A file system that can be filled, and what lies on it: names of directories of Places."""

    mib: int
    inodes: int
    holds: tuple[str, ...]


@contextlib.asynccontextmanager
async def open_node(
    slices: int = 80, *, small: Small | None = None, web_port: int = 0, log: str = "json"
) -> AsyncIterator[Node]:
    """The agent at work, beside a neighbour that has something in its directory.

    Strangers may come as near as any file system lets them: nothing above is closed.
    """
    chosen = dataclasses.replace(
        options("--log-format", log, gpus=slices // 10),
        scheduler=SchedulerSettings().quick(),
        web_port=web_port,
    )
    with _own_disk() as (kind, disks):
        async with open_cluster(chosen) as cluster:
            cluster.places.root.chmod(0o755)
            cluster.places.plugins.chmod(0o755)
            with contextlib.ExitStack() as stack:
                if small is not None:
                    stack.enter_context(_on(small, cluster, disks))
                await started(cluster, slices=slices)
                gpus = {state.gpu.uuid: state.gpu for state in cluster.hardware.states}
                pods, sums = Pods(cluster, gpus), SumWatch(cluster, gpus, 10)
                cluster.kubelet.history.listen(pods.hear)
                cluster.kubelet.history.listen(sums.hear)
                node = Node(cluster, pods, sums, Path(), kind, slices)
                node.neighbour = (await node.tenant(NEIGHBOUR)).directory
                (node.neighbour / "mine").write_text("mine")
                (node.neighbour / "mine").chmod(0o600)
                try:
                    yield node
                finally:
                    await cluster.stop_agent()


@contextlib.contextmanager
def _on(small: Small, cluster: SandboxCluster, disks: Path) -> Iterator[None]:
    """What `small` holds lies on it."""
    with contextlib.ExitStack() as stack:
        at = disks / "small"
        made = disk(disks / "image-small", at, mib=small.mib, inodes=small.inodes)
        stack.enter_context(made)
        for name in small.holds:
            path = getattr(cluster.places, name)
            shutil.copytree(path, at / name)
            stack.enter_context(mounted(at / name, path))
        yield


@contextlib.contextmanager
def _own_disk() -> Iterator[tuple[str, Path]]:
    """All that the cluster makes lies on a file system of its own; its kind, and a directory
    beside it."""
    with tempfile.TemporaryDirectory(prefix="hami-hostile-", dir="/var/tmp") as made:
        beside = Path(made)
        beside.chmod(0o755)
        image, at = beside / "image", beside / "d"
        with disk(image, at, mib=MIB, inodes=INODES) as kind, pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(at))
            yield kind, beside

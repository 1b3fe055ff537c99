"""The node under siege: one agent without capabilities, the models beside it, a disk of its own."""

import contextlib
import dataclasses
import itertools
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from agent.model import Gpu, GpuUuid
from agent.sandbox.kubelet.podloop import ended_status, merged
from agent.sandbox.kubelet.pods import KubeletEvent
from agent.sandbox.lab.cluster import NAMESPACE, SandboxCluster, fetch, open_cluster
from agent.sandbox.scenario.facts import answers, differences, is_locked, is_running, pod_facts
from agent.sandbox.scenario.stage import SumWatch, Wish, Workload
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.store import Json, NotFoundError
from tests.process.agent_process import PATIENCE, comes, offers, options, started

# A file system of the tests' own: what a tenant fills is not this machine's disk.

MIB, INODES = 6144, 1_500_000


@contextlib.contextmanager
def disk(image: Path, at: Path) -> Iterator[str]:
    """An ext4 in the file `image`, mounted at `at`; yields its kind.

    Where this kernel has no loop device it is a tmpfs of the same size. Without the blocks that
    ext4 keeps for root: root in a container could use them, too.
    """
    at.mkdir(parents=True, exist_ok=True)
    with image.open("wb") as file:
        file.truncate(MIB * 2**20)
    _run("mkfs.ext4", "-q", "-m", "0", "-N", f"{INODES}", image)
    kind = "ext4"
    if _tried("mount", "-o", "loop", str(image), str(at)) != 0:
        kind = "tmpfs"
        _run("mount", "-t", "tmpfs", "-o", f"size={MIB}m,nr_inodes={INODES},mode=755", "none", at)
    try:
        yield kind
    finally:
        _run("umount", "--lazy", at)
        image.unlink()


def _run(*words: str | Path) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=60)  # noqa: S603 -- our own words


def _tried(*words: str) -> int:
    return subprocess.run(words, check=False, capture_output=True, timeout=60).returncode  # noqa: S603 -- our own words


# Pods in a row, each through the scheduler's model and the kubelet's, and what each was given.

PODS: Final = 20
"""In a row, before an attack and in it."""
LOOK: Final = 5
"""After so many pods something else is looked at."""
POD_PATIENCE: Final = 20.0
"""Seconds for one pod that takes a tenth of one."""
GONE: Final = 30.0
"""Seconds for the pods of one round to be over."""


@dataclasses.dataclass(eq=False, slots=True)
class Pods:
    """Makes pods that want a share of one GPU and times what the kubelet waits for the agent."""

    cluster: SandboxCluster
    gpus: dict[GpuUuid, Gpu]
    began: dict[str, float] = dataclasses.field(default_factory=dict)
    took: dict[str, float] = dataclasses.field(default_factory=dict)
    numbers: Iterator[int] = dataclasses.field(default_factory=lambda: itertools.count(1))

    def hear(self, event: KubeletEvent) -> None:
        """Allocate calls, as the kubelet saw them."""
        if event.kind == "allocating":
            self.began[event.pod] = event.elapsed
        elif event.kind == "allocated":
            self.took[event.pod] = event.elapsed - self.began[event.pod]

    async def row(
        self, look: Callable[[], Awaitable[None]], served: Callable[[], None] = lambda: None
    ) -> list[float]:
        """So many pods, one after the other, each served; the seconds of each Allocate.

        `look` is called now and then between them, `served` after each.
        """
        names = [f"pod-{next(self.numbers)}" for _ in range(PODS)]
        delays = []
        for number, name in enumerate(names):
            delays.append(await self.one(name))
            served()
            if number % LOOK == 0:
                await look()
            self.delete(name)
        assert await self.cluster.until(lambda: not any(map(self.exists, names)), GONE)
        return delays

    async def one(self, name: str) -> float:
        """One pod, served as the scheduler said; the seconds that its Allocate took."""
        cluster, number = self.cluster, next(self.numbers)
        wish = Wish("main", 1, 512 + number % 97, core_percent=1 + number % 7)
        cluster.submit(Workload(name, "", (wish,)).pod())
        await cluster.until(lambda: self.is_served(name) or self.has_failed(name), POD_PATIENCE)
        assert self.is_served(name), self.why(name)
        pod = pod_facts(cluster, name)
        assert [] == differences(pod, answers(cluster), self.gpus, cluster.places)
        (share,) = pod.shares()["main"]
        assert (wish.memory_mib, wish.core_percent) == (share.memory_mib, share.core_percent)
        leaf = cluster.places.hook / "vgpu" / "containers" / f"{pod.uid}_main"
        assert (0, []) == (leaf.stat().st_uid, list(leaf.iterdir()))
        return self.took[pod.uid]

    def is_served(self, name: str) -> bool:
        """It runs, the scheduler was told, and the node is free for the next one."""
        cluster = self.cluster
        return (
            is_running(cluster, name)
            and pod_facts(cluster, name).is_settled
            and not is_locked(cluster)
        )

    def has_failed(self, name: str) -> bool:
        """The kubelet has rejected it."""
        return pod_facts(self.cluster, name).phase == "Failed"

    def why(self, name: str) -> str:
        """What is known of a pod that was not served."""
        pod = pod_facts(self.cluster, name)
        said = self.cluster.log.last(12)
        return "\n".join([f"{name} is {pod.phase}: {pod.reason}", f"{pod.notes}", *said])

    def delete(self, name: str) -> None:
        """As a user does."""
        self.cluster.store.delete("pods", NAMESPACE, name)

    def exists(self, name: str) -> bool:
        """Whether the API server has it."""
        try:
            self.cluster.pod(name)
        except NotFoundError:
            return False
        return True


NEIGHBOUR: Final = "neighbour"


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

    @property
    def agent(self) -> int:
        """The agent's process."""
        return self.cluster.agent.pid

    @property
    def port(self) -> str:
        """The web door's."""
        return (self.cluster.web_address or "").rpartition(":")[2]

    def theirs(self) -> list[tuple[str, int]]:
        """The neighbour's files, with their modes."""
        return [(path.read_text(), path.stat().st_mode) for path in self.neighbour.iterdir()]

    async def tenant(self, name: str) -> Tenant:
        """A pod that runs."""
        cluster = self.cluster
        cluster.submit(Workload(name, "", (Wish("main", 1, 256),)).pod())
        assert await cluster.until(lambda: self.pods.is_served(name), PATIENCE), self.pods.why(name)
        uid = cluster.pod(name)["metadata"]["uid"]
        leaf = cluster.places.hook / "vgpu" / "containers" / f"{uid}_main"
        return Tenant(name, uid, leaf)

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
        assert await offers(self.cluster, 80), self.cluster.log.last(20)
        assert await comes(lambda: not tenant.directory.exists()), self.cluster.log.last(20)
        self.pods.delete(tenant.name)

    async def is_alive(self) -> None:
        """The kubelet's probe is answered, and in the time that it has."""
        page = await fetch(self.cluster.web_address or "", "/livez")
        assert (200, True) == (page.status, self.cluster.agent.code is None)

    def resident(self) -> int:
        """MiB that the agent holds in memory."""
        status = Path(f"/proc/{self.agent}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) // 1024


@contextlib.asynccontextmanager
async def open_node() -> AsyncIterator[Node]:
    """The agent at work, beside a neighbour that has something in its directory.

    Strangers may come as near as any file system lets them: nothing above is closed.
    """
    chosen = dataclasses.replace(options(), scheduler=SchedulerSettings().quick())
    with _own_disk() as kind:
        async with open_cluster(chosen) as cluster:
            cluster.places.root.chmod(0o755)
            cluster.places.plugins.chmod(0o755)
            await started(cluster)
            gpus = {state.gpu.uuid: state.gpu for state in cluster.hardware.states}
            pods, sums = Pods(cluster, gpus), SumWatch(cluster, gpus, 10)
            cluster.kubelet.history.listen(pods.hear)
            cluster.kubelet.history.listen(sums.hear)
            node = Node(cluster, pods, sums, Path(), kind)
            node.neighbour = (await node.tenant(NEIGHBOUR)).directory
            (node.neighbour / "mine").write_text("mine")
            (node.neighbour / "mine").chmod(0o600)
            yield node
            await cluster.stop_agent()


@contextlib.contextmanager
def _own_disk() -> Iterator[str]:
    """All that the cluster makes lies on a file system of its own; its kind."""
    with tempfile.TemporaryDirectory(prefix="hami-hostile-", dir="/var/tmp") as made:
        Path(made).chmod(0o755)
        at = Path(made, "d")
        with disk(Path(made, "image"), at) as kind, pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(at))
            yield kind

"""The node under siege: one agent without capabilities, the models beside it, a disk of its own."""

import contextlib
import ctypes
import dataclasses
import itertools
import os
import shutil
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

# File systems of a test's own: what a tenant fills is not this machine's disk.


@contextlib.contextmanager
def disk(image: Path, at: Path, *, mib: int, inodes: int) -> Iterator[str]:
    """An ext4 of so many MiB and inodes in the file `image`, mounted at `at`; yields its kind.

    Where this kernel has no loop device it is a tmpfs of the same size. Without the blocks that
    ext4 keeps for root: root in a container could use them, too.
    """
    at.mkdir(parents=True, exist_ok=True)
    with image.open("wb") as file:
        file.truncate(mib * 2**20)
    _run("mkfs.ext4", "-q", "-m", "0", "-N", str(inodes), str(image))
    kind = "ext4"
    if _tried("mount", "-o", "loop", str(image), str(at)) != 0:
        kind = "tmpfs"
        _run("mount", "-t", "tmpfs", "-o", f"size={mib}m,nr_inodes={inodes},mode=755", "none", at)
    try:
        yield kind
    finally:
        _run("umount", "--lazy", at)
        image.unlink()


@contextlib.contextmanager
def mounted(source: Path, at: Path) -> Iterator[None]:
    """`source` is seen at `at`, too, wherever that is renamed to meanwhile."""
    _run("mount", "--bind", source, at)
    opened = os.open(at, os.O_PATH)
    try:
        yield
    finally:
        now = os.readlink(f"/proc/self/fd/{opened}")
        os.close(opened)
        _run("umount", "--recursive", now)


def is_full(at: Path) -> bool:
    """Whether its file system has no block left, or no inode."""
    found = os.statvfs(at)
    return not found.f_bavail or not found.f_ffree


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

    async def tried(self, patience: float = POD_PATIENCE) -> str:
        """One pod, whatever becomes of it: empty when it was served, else why it was not.

        One that no slice is on offer for waits, and is deleted; so is one that waits for long.
        """
        cluster, name = self.cluster, f"pod-{next(self.numbers)}"
        cluster.submit(Workload(name, "", (Wish("main", 1, 512),)).pod())

        def is_over() -> bool:
            return self.is_served(name) or self.has_failed(name) or not cluster.allocatable()

        await cluster.until(is_over, patience)
        served, why = self.is_served(name), self.why(name)
        self.delete(name)
        return "" if served else why

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
        """The web door's."""
        return self.cluster.web_address or ""

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
        pod = kubelet.node.pods[tenant.uid]
        await kubelet.pod_gone(tenant.uid)
        now = kubelet.clock.now().strftime("%Y-%m-%dT%H:%M:%SZ")

        def succeeded(found: Json) -> Json:
            found["status"] = merged(found["status"], ended_status(pod, now), now)
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
async def open_node(slices: int = 80, *, small: Small | None = None) -> AsyncIterator[Node]:
    """The agent at work, beside a neighbour that has something in its directory.

    Strangers may come as near as any file system lets them: nothing above is closed.
    """
    chosen = dataclasses.replace(options(gpus=slices // 10), scheduler=SchedulerSettings().quick())
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
                    await cluster.agent.stop()


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


# Becoming root in a container: own mounts, one directory, the capabilities of containerd.

DEFAULT = (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31)
"""What containerd leaves a container's root: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID,
SETUID, SETPCAP, NET_BIND_SERVICE, NET_RAW, SYS_CHROOT, MKNOD, AUDIT_WRITE, SETFCAP."""

_NEW_MOUNTS = 0x00020000
_BIND, _PRIVATE = 0x1000, 0x44000
_DROP_FROM_BOUNDS = 24
_LAST = 63
_VERSION = 0x20080522
_NO_NEW_PRIVILEGES = 38


def enter(directory: str, capabilities: tuple[int, ...]) -> None:
    """From now on this process sees `directory` alone, as /; it is uid 0 with these capabilities.

    Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _done(libc.unshare(_NEW_MOUNTS))
    _done(libc.mount(None, b"/", None, _PRIVATE, None))
    root = tempfile.mkdtemp(prefix="hami-tenant-")
    _done(libc.mount(directory.encode(), root.encode(), None, _BIND, None))
    os.chroot(root)
    os.chdir("/")
    for number in range(_LAST + 1):
        if number not in capabilities:
            libc.prctl(_DROP_FROM_BOUNDS, number, 0, 0, 0)  # those that this kernel lacks fail
    _done(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    bits = sum(1 << number for number in capabilities)
    low, high = bits & 0xFFFFFFFF, bits >> 32
    header = (ctypes.c_uint32 * 2)(_VERSION, 0)
    _done(libc.capset(header, (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)))


def _done(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

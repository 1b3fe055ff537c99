"""A cluster on which the chart is installed, from the image, as an operator does it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent import __version__
from agent.sandbox.lab.cluster import stand_in
from tests.peers.lab.agents import SOURCE
from tests.peers.lab.api import Object
from tests.peers.lab.cluster import Cluster, open_cluster, open_pod_network
from tests.peers.lab.identities import ADMIN
from tests.peers.lab.node import BUSYBOX_FILE, PASSWD, write_image
from tests.peers.lab.node_state import NODE_PATH, until_allocatable
from tests.peers.lab.placing import Programs
from tests.peers.lab.releases import Release
from tests.peers.lab.space import until_answer
from tests.released import released

NAMESPACE: Final = "kube-system"
RELEASE: Final = "hami-agent"
IMAGE: Final = "localhost/hami-agent"
NEXT: Final = f"{__version__}-next"
"""The same image under a second tag: another version, as far as Kubernetes can tell."""
LIBRARY: Final = stand_in()
DAEMON_SET: Final = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/{RELEASE}"
CHART: Final = released("*.tgz") or SOURCE / "deploy" / "chart" / "hami-agent"
SERVING: Final = 60.0
"""Seconds for what takes three or four on a quiet machine."""

_PLACES: Final = (*("etc", "opt", "run", "usr/local", "var/lib"), "var/lib/kubelet/device-plugins")
"""Where a look is taken at what is left."""
_OTHERS: Final = {
    *("/run/containerd", "/run/netns", "/var/lib/cni"),
    "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint",
}
"""What runtime, network and kubelet keep where pods have been."""
_KINDS: Final = (
    *("daemonset", "pod", "job", "configmap", "secret", "service", "serviceaccount"),
    *("role", "rolebinding", "clusterrole", "clusterrolebinding", "controllerrevision"),
    "networkpolicy",
    *("validatingadmissionpolicy", "validatingadmissionpolicybinding"),
)
_HAMI: Final = "peers.test/hami"
_HAMI_TAG: Final = "v2.10.0"
_SHELL: Final = (
    *("cat", "chmod", "cp", "find", "mktemp", "mv", "rm", "sh", "sha256sum", "stat", "sync"),
)


def extra_args(release: Release) -> tuple[str, ...]:
    """What the agent is told: its GPUs are simulated, as in all other tests here."""
    return ("--simulate", "h100:8", *release.flags)


def values(release: Release) -> tuple[str, ...]:
    """An operator names two images, and nobody waits longer than needed."""
    return (
        f"image.repository={IMAGE}",
        f"library.image.repository={_HAMI}",
        f"extraArgs={{{','.join(extra_args(release))}}}",
        "minReadySeconds=1",
        "config.report.nodeCondition=true",
    )


# The programs of an operator, run as they run them: helm and kubectl, as the cluster's admin.

_COMMAND_SECONDS: Final = 240.0
"""Until a command is taken to hang; each has a deadline of its own below that."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A program that has ended, and what it said, errors included."""

    code: int
    words: str


class Commands:
    """The two programs at one cluster; `tools` is the folder that tests/chart/build printed."""

    def __init__(self, cluster: Cluster, tools: Path, binaries: Path) -> None:
        self._root = cluster.root
        self._tools = tools
        self._binaries = binaries
        self._kubeconfig = str(cluster.plane.kubeconfig(ADMIN))

    async def helm(self, *arguments: str) -> str:
        """What helm said. Raises AssertionError: it failed."""
        return succeeded(await self.try_helm(*arguments))

    async def try_helm(self, *arguments: str) -> Ended:
        """How a helm ended."""
        return await self._run(self._tools / "helm", *arguments)

    async def kubectl(self, *arguments: str) -> str:
        """What kubectl said. Raises AssertionError: it failed."""
        return succeeded(await self.try_kubectl(*arguments))

    async def try_kubectl(self, *arguments: str) -> Ended:
        """How a kubectl ended."""
        return await self._run(self._binaries / "kubectl", *arguments)

    async def _run(self, program: Path, *arguments: str) -> Ended:
        room = self._root / "home"
        room.mkdir(exist_ok=True)
        environment = {"HOME": str(room), "PATH": "/usr/bin:/bin", "KUBECONFIG": self._kubeconfig}
        process = await asyncio.create_subprocess_exec(
            *(str(program), *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
        )
        try:
            async with asyncio.timeout(_COMMAND_SECONDS):
                words, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            raise
        return Ended(process.returncode or 0, words.decode(errors="replace"))


def succeeded(ended: Ended) -> str:
    """What it said. Raises AssertionError: it failed."""
    assert ended.code == 0, ended.words
    return ended.words


@dataclass(eq=False, slots=True)
class Site:
    """The cluster, its operator's commands, and all objects of the API that the chart makes."""

    cluster: Cluster
    run: Commands
    found: frozenset[str]
    """What was on the node before."""

    @property
    def agents(self) -> list[Object]:
        """The agent's pods that are to stay: an update starts the next one beside the last."""
        return [pod for pod in self.all_agents if "deletionTimestamp" not in pod["metadata"]]

    @property
    def all_agents(self) -> list[Object]:
        """The agent's pods that are there."""
        return [
            pod
            for pod in self.cluster.pods.objects.values()
            if pod["metadata"].get("labels", {}).get("app.kubernetes.io/name") == RELEASE
        ]

    async def install(self, *settings: str) -> None:
        """`helm install` with the values of an operator, and these. Raises AssertionError."""
        succeeded(await self.try_install(*settings))

    async def try_install(self, *settings: str) -> Ended:
        """How such an installation ends."""
        given = (*values(self.cluster.release), *settings)
        return await self.run.try_helm("install", RELEASE, *self._chart(), *_given(given))

    async def upgrade(self, *settings: str) -> None:
        """`helm upgrade --reset-then-reuse-values`. Raises AssertionError."""
        succeeded(await self.try_upgrade(*settings))

    async def try_upgrade(self, *settings: str) -> Ended:
        """How such an upgrade ends; flags of helm may be among the settings."""
        return await self.run.try_helm(
            "upgrade", RELEASE, *self._chart(), "--reset-then-reuse-values", *_given(settings)
        )

    async def rollback(self) -> None:
        """`helm rollback`. Raises AssertionError."""
        await self.run.helm("rollback", RELEASE, f"--namespace={NAMESPACE}")

    async def uninstall(self) -> None:
        """`helm uninstall`. Raises AssertionError."""
        await self.run.helm("uninstall", RELEASE, f"--namespace={NAMESPACE}")

    async def rollout(self, seconds: int) -> Ended:
        """How `kubectl rollout status` ends."""
        where = (f"--namespace={NAMESPACE}", f"--timeout={seconds}s")
        return await self.run.try_kubectl("rollout", "status", f"daemonset/{RELEASE}", *where)

    async def is_installed(self) -> bool:
        """Whether the release is there."""
        listed = await self.run.helm("list", f"--namespace={NAMESPACE}", "--short")
        return RELEASE in listed.split()

    async def have_installed(self) -> None:
        """Install it where it is not, and wait until it serves. Raises as both."""
        if not await self.is_installed():
            await self.install()
            await self.until_serving()

    async def until_serving(self, slices: int = 80) -> None:
        """Return once kubelet and Node have the slices. Raises TimeoutError."""
        await until_allocatable(self.cluster, slices, SERVING)
        await self.cluster.nodes.until(
            lambda: self.cluster.is_sharing(slices), SERVING, "no slices on the Node"
        )

    async def status(self) -> Mapping[str, Any]:
        """The status of the DaemonSet. Raises RefusedError."""
        found: Mapping[str, Any] = (await self.cluster.api.get(DAEMON_SET))["status"]
        return found

    async def objects(self) -> str:
        """The names of all objects that the chart, its hooks or helm have made."""
        kinds, label = ",".join(_KINDS), "--selector=app.kubernetes.io/part-of=hami-agent"
        made = await self.run.kubectl("get", kinds, "--all-namespaces", "--output=name", label)
        own = ("get", "secrets", f"--namespace={NAMESPACE}", "--output=name")
        return made + await self.run.kubectl(*own, "--selector=owner=helm")

    async def until_gone(self) -> None:
        """Return once no such object is left: some go after helm has ended. Raises TimeoutError."""
        found = ""

        async def is_gone() -> bool:
            nonlocal found
            found = await self.objects()
            return not found

        await until_answer(is_gone, SERVING, lambda: f"these stay: {found}")

    def left(self) -> frozenset[str]:
        """What is on the node and was not there before, but for what others keep."""
        return _entries(self.cluster) - self.found - _OTHERS

    def tail(self, lines: int = 40) -> str:
        """The last words of all containers of the release."""
        logs = self.cluster.space.view / "var" / "log" / "pods"
        files = sorted(logs.glob(f"{NAMESPACE}_{RELEASE}*/*/*.log"))
        said = [line for one in files for line in one.read_text(errors="replace").splitlines()]
        return "\n".join(said[-lines:])

    @staticmethod
    def _chart() -> tuple[str, ...]:
        return (str(CHART), f"--namespace={NAMESPACE}")


@contextlib.asynccontextmanager
async def open_site(programs: Programs, tools: Path, archive: Path) -> AsyncIterator[Site]:
    """A cluster with pods' network, images and the node's label; nothing is installed yet."""
    async with open_cluster(programs) as cluster, open_pod_network(cluster):
        for file in ("libvgpu.so", "ld.so.preload"):
            (cluster.hook / file).unlink()
        library = cluster.root / "hami.tar"
        _write_hami(library)
        for one in (library, archive):
            await cluster.runtime.load(one)
        await cluster.runtime.tag(f"{IMAGE}:{__version__}", f"{IMAGE}:{NEXT}")
        await cluster.api.patch(NODE_PATH, {"metadata": {"labels": {"gpu": "on"}}})
        found = _entries(cluster) - {"/usr/local/vgpu"}
        yield Site(cluster, Commands(cluster, tools, programs.folder), found)


def _entries(cluster: Cluster) -> frozenset[str]:
    view = cluster.space.view
    return frozenset(
        f"/{path.relative_to(view)}" for place in _PLACES for path in (view / place).iterdir()
    )


def _write_hami(path: Path) -> None:
    """What HAMi's image has of its own for this chart: a shell, and the library."""
    files: dict[str, Path | bytes] = {
        "bin/busybox": BUSYBOX_FILE,
        "etc/passwd": PASSWD,
        "k8s-vgpu/lib/nvidia/libvgpu.so": LIBRARY,
    }
    links = {f"bin/{applet}": "busybox" for applet in _SHELL}
    write_image(path, f"{_HAMI}:{_HAMI_TAG}", files, links, ["/bin/sh"])


def _given(settings: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(
        word for one in settings for word in ((one,) if one.startswith("--") else ("--set", one))
    )

"""A whole cluster of one node: opened, looked at, closed."""

import asyncio
import contextlib
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import yaml

from agent import cluster as annotations
from tests.peers.lab.agents import (
    RESOURCE,
    SOURCE,
    Agent,
    agent_command,
    lay_out_library,
    make_agent,
)
from tests.peers.lab.api import Api, Watched, watching
from tests.peers.lab.control import ControlPlane, open_control_plane
from tests.peers.lab.identities import CONTROLLERS, EXTENDER, NODE, NODE_USER, SCHEDULER
from tests.peers.lab.kubelet import Kubelet
from tests.peers.lab.part import Part
from tests.peers.lab.placing import (
    device_config,
    lay_out_placing,
    placing_parts,
    register_webhook,
)
from tests.peers.lab.ports import free_ports
from tests.peers.lab.programs import Programs
from tests.peers.lab.reading import Reading
from tests.peers.lab.releases import Release
from tests.peers.lab.roots import open_root
from tests.peers.lab.runtime import Runtime
from tests.peers.lab.space import NodeSpace
from tests.peers.lab.waiting import until_answer

ACCOUNT: Final = "system:serviceaccount:kube-system:hami-agent"
_MANIFESTS: Final = SOURCE / "deploy" / "manifests"
_REGISTERED: Final = 30.0
"""Seconds for what takes one or two on a quiet machine."""
_RBAC: Final = {
    "ServiceAccount": "/api/v1/namespaces/kube-system/serviceaccounts",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
}


@dataclass(eq=False, slots=True)
class Cluster:
    """All parts of a cluster, running; made by `open_cluster`."""

    root: Path
    space: NodeSpace
    plane: ControlPlane
    runtime: Runtime
    kubelet: Kubelet
    placing: tuple[Part, ...]
    pods: Watched
    nodes: Watched
    release: Release
    reading: Reading
    """What HAMi's scheduler knows of the Node."""
    agents: list[Agent] = field(default_factory=list)
    started: int = 0
    """How many agents there were: each has a log of its own."""

    @property
    def api(self) -> Api:
        """The API server, as its admin."""
        return self.plane.admin

    @property
    def agent(self) -> Agent:
        """The agent that was started last. Raises IndexError: none was."""
        return self.agents[-1]

    @property
    def parts(self) -> dict[str, Part]:
        """All programs by name."""
        present = (*self.plane.parts, *self.placing, self.runtime.part, self.kubelet.part)
        return {part.name: part for part in (*present, *(one.part for one in self.agents))}

    @property
    def hook(self) -> Path:
        """The hook path's vgpu directory, from outside."""
        return self.space.view / "usr" / "local" / "vgpu"

    async def start_agent(
        self, *flags: str, user: str = NODE_USER, gpus: str = "h100:8", name: str = "agent"
    ) -> Agent:
        """Start an agent as one of its two identities; the last one must have ended.

        It reports as this cluster's scheduler reads, and reads HAMi's device-config.yaml as that
        does, unless the flags say otherwise.

        Raises:
            RefusedError, OSError, TimeoutError: it cannot be started.
        """
        kubeconfig = self.plane.root / f"{user.replace(':', '-')}.kubeconfig"
        if user == ACCOUNT:
            kubeconfig = self.plane.kubeconfig_for("account", await account_token(self.api))
        hamis = ("--device-config", str(device_config(self.plane)))
        command = agent_command(kubeconfig, gpus, (*hamis, *self.release.flags, *flags))
        self.started += 1
        made = make_agent(f"{name}-{self.started}", command, self.root / "logs", self.space)
        await made.part.start()
        self.agents.append(made)
        return made

    async def start_registered_agent(
        self,
        *flags: str,
        user: str = NODE_USER,
        gpus: str = "h100:8",
        name: str = "agent",
        slices: int = 80,
    ) -> Agent:
        """Start an agent; returns when the kubelet counts its slices and the Node is annotated.

        Raises:
            RefusedError, OSError, TimeoutError: it cannot be started, or does not register.
        """

        async def is_counted() -> bool:
            return await self.kubelet.offers(RESOURCE, slices)

        made = await self.start_agent(*flags, user=user, gpus=gpus, name=name)
        await until_answer(is_counted, _REGISTERED, made.part.tail)
        await self.nodes.until(lambda: self.is_sharing(slices), _REGISTERED, "no slices")
        return made

    def is_sharing(self, slices: int = 80) -> bool:
        """Whether the Node offers so many slices and says so to HAMi's scheduler."""
        node = self.nodes.objects[NODE]
        noted = node["metadata"].get("annotations") or {}
        offered = node["status"].get("allocatable", {}).get(RESOURCE)
        return offered == str(slices) and annotations.REGISTER in noted

    async def end_agents(self) -> None:
        """Stop every agent, the last one first, and forget it."""
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self.agents.clear)
            for one in self.agents:
                stack.push_async_callback(one.part.stop)

    def thaw(self) -> None:
        """Let go on whatever a test froze."""
        for part in self.parts.values():
            part.thaw()

    async def revive(self) -> None:
        """Start whatever a test has ended, and let go on what it froze."""
        self.thaw()
        for part in (*self.plane.parts, *self.placing):
            if not part.is_alive:
                await part.start()
        await self.plane.until_ready()
        if not self.runtime.part.is_alive:
            await self.runtime.part.start()
            await self.runtime.until_ready()
        if not self.kubelet.part.is_alive:
            await self.kubelet.start()

    def forget_agent_state(self) -> None:
        """Remove what the agent keeps on the node, as on a machine where none ever ran."""
        for directory in ("var/lib/hami-agent", "usr/local/vgpu/containers"):
            shutil.rmtree(self.space.view / directory, ignore_errors=True)

    def forget_history(self) -> None:
        """Forget what the watches have seen until now."""
        self.reading.forget()
        self.pods.forget()
        self.nodes.forget()

    def last_words(self) -> str:
        """The end of every log, for whoever has to find out why."""
        return "\n".join(part.tail() for part in self.parts.values())


async def account_token(api: Api) -> str:
    """A token of the ServiceAccount that deploy/ gives the agent, with deploy/'s rights.

    Raises:
        RefusedError: the API server does not take the manifests.
    """
    for document in _account_manifests():
        path = _RBAC[document["kind"]]
        present = {item["metadata"]["name"] for item in (await api.get(path))["items"]}
        if document["metadata"]["name"] not in present:
            await api.create(path, document)
    path = f"{_RBAC['ServiceAccount']}/hami-agent/token"
    review = await api.create(path, {"spec": {"expirationSeconds": 3600}})
    token: str = review["status"]["token"]
    return token


def _account_manifests() -> Iterator[dict[str, dict[str, str]]]:
    for path in sorted(_MANIFESTS.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document["kind"] in _RBAC:
                yield document


@contextlib.asynccontextmanager
async def open_cluster(programs: Programs) -> AsyncIterator[Cluster]:
    """Everything up and the Node ready, no agent yet; all ended and removed afterwards.

    The end of every log goes to standard error if the cluster itself does not come up.

    Raises:
        TimeoutError, OSError: a part does not start.
    """
    async with contextlib.AsyncExitStack() as stack:
        root = stack.enter_context(open_root())
        space = NodeSpace(root)
        stack.push_async_callback(space.close)
        await space.open()
        lay_out_library(space.view / "usr" / "local")
        runtime = Runtime(root, space)
        stack.push_async_callback(runtime.part.kill)
        async with asyncio.TaskGroup() as group:
            plane = await _control_plane(stack, root, programs.folder, space, group, runtime)
        kubelet_part = Kubelet(root, programs.folder, space, plane.certificates.ca)
        stack.push_async_callback(kubelet_part.part.kill)
        kubelet_part.configure(runtime.socket)
        ports = free_ports(3)
        lay_out_placing(plane, ports)
        placing = placing_parts(plane, programs, space, ports)
        for part in placing:
            stack.push_async_callback(part.kill)
        pods = await stack.enter_async_context(watching(plane.admin, "/api/v1/pods"))
        nodes = await stack.enter_async_context(watching(plane.admin, "/api/v1/nodes"))
        reading = Reading(programs.release, nodes, placing[1])
        parts = (plane, runtime, kubelet_part, placing, pods, nodes)
        cluster = Cluster(root, space, *parts, programs.release, reading)
        try:
            await _start(cluster, ports)
        except BaseException:
            sys.stderr.write(cluster.last_words() + "\n")
            raise
        stack.push_async_callback(cluster.end_agents)
        yield cluster


async def _control_plane(
    stack: contextlib.AsyncExitStack,
    root: Path,
    binaries: Path,
    space: NodeSpace,
    group: asyncio.TaskGroup,
    runtime: Runtime,
) -> ControlPlane:
    async def run_time() -> None:
        await runtime.start()
        await runtime.import_images()

    group.create_task(run_time())
    plane = await stack.enter_async_context(open_control_plane(root, binaries, space))
    for user in (NODE_USER, SCHEDULER, CONTROLLERS, EXTENDER):
        plane.kubeconfig(user)
    return plane


async def _start(cluster: Cluster, ports: list[int]) -> None:
    for part in cluster.placing:
        await part.start()
    await cluster.kubelet.start()
    await cluster.nodes.until(lambda: is_ready(cluster.nodes), 40.0, "the Node is not ready")
    await register_webhook(cluster.plane, ports[0])
    await _until_account(cluster.api)


async def _until_account(api: Api) -> None:
    """Pods are refused until the controllers have made the default ServiceAccount."""
    path = "/api/v1/namespaces/default/serviceaccounts"
    async with watching(api, path) as accounts:
        await accounts.until(lambda: "default/default" in accounts.objects, 30.0, "no account")


def is_ready(nodes: Watched) -> bool:
    """Whether the Node says that it takes pods."""
    node = nodes.objects.get(NODE, {"status": {}})
    conditions = node["status"].get("conditions") or []
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return ready and not node["spec"].get("taints")

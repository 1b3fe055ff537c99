"""The programs of a cluster while they run: agents started and ended, harm undone."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import yaml

from agent import cluster as annotations
from tests.peers.lab.agents import RESOURCE, SOURCE, Agent, agent_command, make_agent
from tests.peers.lab.api import Api, Watched
from tests.peers.lab.control import NODE, NODE_USER, ControlPlane
from tests.peers.lab.node import Kubelet, Runtime
from tests.peers.lab.part import NodeSpace, Part, until_answer
from tests.peers.lab.placing import Reading, Release, device_config

ACCOUNT: Final = "system:serviceaccount:kube-system:hami-agent"
_MANIFESTS: Final = SOURCE / "deploy" / "manifests"
_REGISTERED: Final = 30.0
"""Seconds for what takes one or two on a quiet machine."""
_RBAC: Final = {
    "ServiceAccount": "/api/v1/namespaces/kube-system/serviceaccounts",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
}


@dataclass(eq=False)
class Running:
    """All parts of a cluster, running."""

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
        """Start an agent; returns when the kubelet counts its slices and the Node is annotated."""

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

    def refusals(self) -> list[str]:
        """What the agents have refused."""
        return [str(line) for one in self.agents for line in one.events("alloc.refused")]

    def last_words(self) -> str:
        """The end of every log, for whoever has to find out why."""
        return "\n".join(part.tail() for part in self.parts.values())


async def account_token(api: Api) -> str:
    """A token of the ServiceAccount that deploy/ gives the agent, with deploy/'s rights."""
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

"""The programs of a cluster while they run: agents started and ended, harm undone."""

import contextlib
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import yaml

from agent import cluster as annotations
from tests.peers.lab.agents import RESOURCE, SOURCE, Agent, agent_command, make_agent
from tests.peers.lab.api import Api, Watched
from tests.peers.lab.control import ADMIN, NODE, NODE_USER, Asked, AuditLog, ControlPlane, counted
from tests.peers.lab.node import Kubelet, Runtime
from tests.peers.lab.part import Ended, NodeSpace, Part, run_program, until, until_answer
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


_AT_REST: Final = ("report.written", "pods.listed")
"""What an agent has done with the start that asks the API server."""
_VERB: Final = 60.0
"""Seconds until a verb is taken to hang; on a quiet machine it takes one."""


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

    async def verb(self, *words: str) -> Ended:
        """Run a verb from anywhere. Raises TimeoutError: it hangs."""
        environment = {
            "PYTHONPATH": str(SOURCE),
            "HOME": str(self.root),
            "KUBECONFIG": str(self.plane.kubeconfig(ADMIN)),
        }
        command = (sys.executable, "-m", "agent", *words)
        return await run_program(*command, environment=environment, within=_VERB)

    async def mark_of_rest(self) -> int:
        """A mark in the audit log behind the agent's register annotation and its list of the pods.

        A watch shows a write before the log does; what the writer has an answer to is in both.
        """
        agent = self.agent
        await until(lambda: all(map(agent.events_since_start, _AT_REST)), 30.0, agent.part.tail)
        return self.plane.audit.mark()

    async def asked_since(self, mark: int, user: str, wanted: Counter[str]) -> list[Asked]:
        """What the agent has asked since a mark, once that includes what is wanted."""
        found: list[Asked] = []

        async def is_told() -> bool:
            found[:] = self.plane.audit.since(mark, user)
            return counted(found) >= wanted

        await until_answer(is_told, 10.0, lambda: f"{wanted} is not there: {found}")
        return found


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


# What agents may ask of the API server, and asked.

_FORBIDDEN: Final = 403


def refused(requests: list[Asked]) -> list[Asked]:
    """The requests that the user has no right to."""
    return [one for one in requests if one.code == _FORBIDDEN]


def of_pods(count: int) -> Counter[str]:
    """What so many pods cost: two writes, and a look before the answer."""
    return Counter(dict.fromkeys(("get pods", "patch pods/status", "patch nodes"), count))


# What deploy/ grants the agent's account.

_OPTIONAL: Final = frozenset({"patch nodes/status"})
"""The chart grants it with `report.nodeCondition` alone."""
_EVERYBODYS: Final = frozenset({"create selfsubjectaccessreviews"})
"""Kubernetes grants it to whoever has a token (ClusterRole system:basic-user)."""


def granted() -> frozenset[str]:
    """Each `verb resource` of the ClusterRole, as the audit log counts requests."""
    documents = yaml.safe_load_all((SOURCE / "deploy/manifests/rbac.yaml").read_text())
    (role,) = [one for one in documents if one["kind"] == "ClusterRole"]
    return frozenset(
        f"{verb} {resource}"
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    )


def asked_beyond_rights(audit: AuditLog) -> set[str]:
    """What any agent has ever asked for and the account may not. Raises OSError."""
    asked = [one for user in (NODE_USER, ACCOUNT) for one in audit.since(0, user)]
    return counted(asked).keys() - granted() - _OPTIONAL - _EVERYBODYS

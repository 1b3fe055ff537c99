"""The programs of a cluster while they run, harm undone, and the Node as it is shown."""

import asyncio
import contextlib
import json
import shutil
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
import yaml

from agent import cluster as annotations
from agent.model import GpuUuid
from tests.peers.lab.agents import RESOURCE, SOURCE, Agent
from tests.peers.lab.api import Api, Object, RefusedError, Watched, notes_of
from tests.peers.lab.control import (
    ADMIN,
    NODE,
    NODE_PATH,
    NODE_USER,
    Asked,
    AuditLog,
    ControlPlane,
    counted,
)
from tests.peers.lab.node import Kubelet, Runtime
from tests.peers.lab.part import Ended, NodeSpace, Part, run_program, until_answer
from tests.peers.lab.placing import Reading, Release, device_config

ACCOUNT: Final = "system:serviceaccount:kube-system:hami-agent"
_MANIFESTS: Final = SOURCE / "deploy" / "manifests"
_NOTED: Final = "hami.io/"
"""What HAMi's annotations begin with: its scheduler notes more than one vendor."""
_STEP: Final = 0.05
"""Seconds between two looks; the kubelet answers no more than 100 in a second to all together."""
PATIENCE: Final = 30.0
"""Seconds for what takes two or three on a quiet machine."""
_RBAC: Final = {
    "ServiceAccount": "/api/v1/namespaces/kube-system/serviceaccounts",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
}


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
    nodes: Reading
    release: Release
    agents: list[Agent] = field(default_factory=list)
    started: int = 0
    """How many agents there were: each has a log of its own."""

    @property
    def api(self) -> Api:
        return self.plane.admin

    @property
    def parts(self) -> dict[str, Part]:
        present = (*self.plane.parts, *self.placing, self.runtime.part, self.kubelet.part)
        return {part.name: part for part in (*present, *(one.part for one in self.agents))}

    @property
    def hook(self) -> Path:
        """The hook path's vgpu directory, from outside."""
        return self.space.view / "usr" / "local" / "vgpu"

    async def start_agent(self, *flags: str, user: str = NODE_USER) -> Agent:
        """Start an agent as one of its two identities; the last one must have ended.

        It reports as this cluster's scheduler reads, and reads HAMi's device-config.yaml as that
        does, unless the flags say otherwise.
        """
        if user == ACCOUNT:
            kubeconfig = self.plane.kubeconfig_for("account", await account_token(self.api))
        else:
            kubeconfig = self.plane.kubeconfig(user)
        hamis = ("--device-config", str(device_config(self.plane)))
        command = (
            *(sys.executable, "-m", "agent", "run", "--node-name", NODE, "--simulate", "h100:8"),
            *("--kubeconfig", str(kubeconfig), "--web-port", "0", "--log-format", "json"),
            *(*hamis, *self.release.flags, *flags),
        )
        self.started += 1
        environment = {"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"}
        where, logs = f"agent-{self.started}", self.root / "logs"
        part = Part(where, command, logs, space=self.space, environment=environment)
        made = Agent(part, self.space.view / "run" / "hami-agent")
        await made.part.start()
        self.agents.append(made)
        return made

    async def start_registered_agent(self, *flags: str, user: str = NODE_USER) -> Agent:
        """Start an agent; returns when the kubelet counts its slices and the Node is annotated."""
        made = await self.start_agent(*flags, user=user)
        await self.until_allocatable(80, PATIENCE)
        await self.nodes.until(self.is_sharing, PATIENCE, "no slices")
        return made

    def is_sharing(self) -> bool:
        """Whether the Node offers so many slices and says so to HAMi's scheduler."""
        node = self.node_of()
        offered = node["status"].get("allocatable", {}).get(RESOURCE)
        return offered == "80" and annotations.REGISTER in notes_of(node)

    async def end_agents(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self.agents.clear)
            for one in self.agents:
                stack.push_async_callback(one.part.stop)

    def thaw(self) -> None:
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

    def refusals(self) -> list[str]:
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

    # The Node as API server and kubelet show it.

    async def remove(self, path: str, grace: int | None = None) -> None:
        """Delete an object that may be gone, and leave a controller's pods to whoever tidies up."""
        try:
            await self.api.delete(path, grace=grace)
        except RefusedError as error:
            if error.code != 404:
                raise

    async def remove_pods(self) -> None:
        """Delete every pod, wait until the kubelet has forgotten all, and free the Node."""
        # The watch may not have shown the newest yet.
        for pod in (await self.api.get("/api/v1/pods"))["items"]:
            namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
            await self.remove(f"/api/v1/namespaces/{namespace}/pods/{name}", grace=0)
        await until_answer(self._has_none, 30.0, lambda: "pods stay")
        await self.pods.until(lambda: not self.pods.objects, 30.0, "the watch shows pods")
        notes = notes_of(await self.api.get(NODE_PATH))
        noted = dict.fromkeys(name for name in notes if name.startswith(_NOTED))
        node = await self.api.patch(NODE_PATH, {"metadata": {"annotations": noted}})
        # Not until nothing is noted: HAMi's scheduler asks for a handshake as soon as it sees none.
        await self.nodes.until(
            lambda: _version(self.node_of()) >= _version(node), 30.0, "the watch shows old notes"
        )

    async def _has_none(self) -> bool:
        return not (await self.api.get("/api/v1/pods"))["items"]

    def node_of(self) -> Object:
        return self.nodes.objects[NODE]

    def gpu_uuids(self) -> list[GpuUuid]:
        """The GPUs of the Node by index, as the register annotation names them."""
        return [*registered_health(self.node_of())]

    async def until_unlocked(self, within: float = PATIENCE) -> None:
        """Return once the node has no lock. Raises TimeoutError.

        The API server is asked, for the watch may not even have shown the lock yet; while it is
        away nobody knows.
        """

        async def is_free() -> bool:
            try:
                node = await self.api.get(NODE_PATH)
            except (aiohttp.ClientError, OSError, RefusedError):
                return False
            return annotations.MUTEX_LOCK not in notes_of(node)

        await until_answer(is_free, within, lambda: f"the lock stays: {self.node_of()}")

    async def until_allocatable(self, slices: int = 80, within: float = 20.0) -> None:
        """Return once PodResources tells of so many slices. Raises TimeoutError."""
        found: frozenset[str] | None = None

        async def is_told() -> bool:
            nonlocal found
            found = await self.kubelet.offered(RESOURCE)
            return found is not None and slices == len(found)

        def why() -> str:
            told = "no answer" if found is None else f"{len(found)} slices"
            return f"{told} in PodResources, not {slices}: {self.refusals()}"

        await until_answer(is_told, within, why)

    async def until_offered(self, slices: int, within: float = 20.0) -> None:
        def offered() -> int:
            status = self.node_of()["status"]
            return int(status.get("allocatable", {}).get(RESOURCE, "0"))

        await self.nodes.until(lambda: slices == offered(), within, f"{slices} slices on the Node")

    @contextlib.asynccontextmanager
    async def watched_capacity(self, whole: int = 80) -> AsyncIterator[list[float]]:
        """Seconds of each time in which the kubelet offered fewer slices, until the block ends.

        The kubelet must live; what it does not answer is no look.
        """
        gaps = list[float]()
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(self._look(whole, gaps))
            try:
                yield gaps
            finally:
                looking.cancel()

    async def _look(self, whole: int, gaps: list[float]) -> None:
        loop = asyncio.get_running_loop()
        began: float | None = None
        while True:
            found = await self.kubelet.offered(RESOURCE)
            if found is not None and len(found) < whole:
                began = loop.time() if began is None else began
            elif found is not None and began is not None:
                gaps.append(loop.time() - began)
                began = None
            await asyncio.sleep(_STEP)


def registered_health(node: Object) -> dict[GpuUuid, bool]:
    """The GPUs of the register annotation by index, read by nothing of ours in both its forms.

    In JSON what is zero is absent. Source of the other: HAMi v2.7.1 pkg/device/devices.go.
    """
    text = notes_of(node).get(annotations.REGISTER, "[]")
    if text.startswith("["):
        gpus = json.loads(text)
        found = [(one.get("index", 0), one["id"], bool(one.get("health"))) for one in gpus]
    else:
        records = [one.split(",") for one in text.split(":")[:-1]]
        found = [(int(one[7]), one[0], one[6] == "true") for one in records]
    return {GpuUuid(uuid): is_healthy for _, uuid, is_healthy in sorted(found)}


def _version(item: Object) -> int:
    return int(item["metadata"]["resourceVersion"])


async def account_token(api: Api) -> str:
    """A token of the ServiceAccount that deploy/ gives the agent, with deploy/'s rights."""
    for file in sorted(_MANIFESTS.glob("*.yaml")):
        for document in yaml.safe_load_all(file.read_text()):
            if path := _RBAC.get(document["kind"]):
                await api.ask("POST", path, document)  # it may be there
    path = f"{_RBAC['ServiceAccount']}/hami-agent/token"
    token: str = (await api.create(path, {"spec": {"expirationSeconds": 3600}}))["status"]["token"]
    return token


# What agents may ask of the API server, and asked.

_FORBIDDEN: Final = 403


def refused(requests: list[Asked]) -> list[Asked]:
    return [one for one in requests if one.code == _FORBIDDEN]


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

"""A node's switch between HAMi's plugin and the agent, step by step.

What the plugin's stand-in does is in lab/hami_plugin.py.
"""

import contextlib
import json
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import yaml

from agent.cluster import Role
from tests.peers.lab.agents import RESOURCE, SOURCE, Agent
from tests.peers.lab.api import Object
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.grants import Container, SeenGrant, grants, rows
from tests.peers.lab.identities import ADMIN, NODE
from tests.peers.lab.part import Part
from tests.peers.lab.placement import wall
from tests.peers.lab.pods import as_seen, key, lives
from tests.peers.lab.servers import NODE_PATH, NODES, OTHER_NODE, Server, User, marks, real_server
from tests.peers.lab.space import until, until_answer

MANAGER: Final = "nvidia-device-plugin"
"""Who writes, as the API server notes it."""
BACK: Final = 2.0
"""Seconds that a node may be without slices."""
WITHIN: Final = 30.0
"""Seconds for what takes one or two on a quiet machine."""

Shares = dict[Container, list[SeenGrant]]
Manner = Literal["stopped", "killed", "beside"]
"""How HAMi's plugin ends; beside: when the agent serves already."""


@contextlib.asynccontextmanager
async def open_hami_plugin(cluster: Cluster) -> AsyncIterator[Part]:
    """HAMi's plugin, which serves the node with 80 slices; ended afterwards.

    Raises OSError, TimeoutError: it does not start.
    """
    command = (
        *(sys.executable, "-m", "tests.peers.lab.hami_plugin", "--node", NODE, "--gpus", "h100:8"),
        *("--kubeconfig", str(cluster.plane.kubeconfig(ADMIN))),
        *("--lock", lock_directory(cluster), "--manager", MANAGER),
        *(("--old",) if cluster.release.is_old else ()),
    )
    environment = {"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"}
    logs = cluster.root / "logs"
    part = Part("hami-plugin", command, logs, space=cluster.space, environment=environment)
    part.log.unlink(missing_ok=True)
    await part.start()
    try:
        await until_serving(cluster, part)
        yield part
    finally:
        await part.stop()


def lock_directory(cluster: Cluster) -> str:
    """What stands for the host's /tmp/vgpulock, which is outside of the node's space."""
    return str(cluster.root / "vgpulock")


async def until_serving(cluster: Cluster, plugin: Part) -> None:
    """Return once the kubelet and the Node have what HAMi's plugin says. Raises TimeoutError."""
    await until_answer(lambda: offers(cluster, 80), WITHIN, plugin.tail)
    await cluster.nodes.until(cluster.is_sharing, WITHIN, "the Node has no slices")


async def offers(cluster: Cluster, slices: int) -> bool:
    """Whether the kubelet answers and counts so many healthy slices."""
    return await cluster.kubelet.offers(RESOURCE, slices)


def promised(cluster: Cluster, names: Iterable[str]) -> Shares:
    """What the scheduler wrote for each container with GPUs of those pods, but init containers."""
    return {
        (key(name), container): sorted(given, key=str)
        for name in names
        for container, given in grants(as_seen(cluster, name)).items()
        if given and container in lives(as_seen(cluster, name))
    }


def booked(cluster: Cluster) -> tuple[Shares, dict[Container, frozenset[str]]]:
    """The same, as the ledger on disk has it, confirmed; and the ids of each. Raises OSError."""
    found = {who: row for who, row in rows(cluster).items() if row.role is not Role.INIT}
    shares = {
        who: sorted(
            (SeenGrant(one.uuid, one.memory_mib, one.core_percent) for one in row.shares), key=str
        )
        for who, row in found.items()
        if row.confirmed
    }
    return shares, {who: frozenset(row.slice_ids) for who, row in found.items()}


async def until_adopted(
    cluster: Cluster, agent: Agent, names: Iterable[str], within: float = WITHIN
) -> None:
    """Return once the ledger has the rows of those pods and no others. Raises TimeoutError."""
    wanted = promised(cluster, names)

    def are_rows() -> bool:
        try:
            return booked(cluster)[0] == wanted
        except FileNotFoundError:
            return False

    await until(are_rows, within, agent.part.tail)


async def hand_over(
    cluster: Cluster, theirs: Part, manner: Manner = "stopped"
) -> tuple[Agent, float]:
    """The agent in the place of HAMi's plugin; with the seconds for which slices were away.

    Raises OSError, TimeoutError: it does not come so far.
    """
    if manner == "beside":
        agent = await cluster.start_agent("--takeover")
        await until(lambda: bool(agent.events("registration.serving")), WITHIN, agent.part.tail)
        assert await offers(cluster, 80)
        began = wall()
        await theirs.stop()
        # Up to kubelet 1.36 the end of the one stream is that of both.
        await until(lambda: len(agent.events("registration.serving")) > 1, WITHIN, agent.part.tail)
    else:
        began = wall()
        await (theirs.kill() if manner == "killed" else theirs.stop())
        agent = await cluster.start_agent()
    await until_answer(lambda: offers(cluster, 80), WITHIN, agent.part.tail)
    return agent, wall() - began


def allocated(plugin: Part) -> list[str]:
    """The pods that HAMi's plugin has served, in order."""
    lines = map(json.loads, plugin.said().splitlines())
    return [line["pod"] for line in lines if line["event"] == "allocated"]


# A chart in the place of HAMi's: of all its values the one that switches the device plugin off.

_CHART: Final = {"apiVersion": "v2", "name": "hami", "version": "2.10.0"}


def write_hami_chart(folder: Path, plugin: Object) -> None:
    """Write it; `plugin` is the DaemonSet of HAMi's plugin. Raises OSError."""
    templates = folder / "templates"
    templates.mkdir(parents=True)
    (folder / "Chart.yaml").write_text(json.dumps(_CHART))
    (folder / "values.yaml").write_text(json.dumps({"devicePlugin": {"enabled": True}}))
    manifest = json.dumps({"apiVersion": "apps/v1", "kind": "DaemonSet", **plugin}, indent=1)
    text = f"{{{{- if .Values.devicePlugin.enabled }}}}\n{manifest}\n{{{{- end }}}}\n"
    (templates / "daemonset.yaml").write_text(text)


# What the chart makes around the Job after `helm uninstall`, created by hand at an API server.

NAME: Final = "hami-agent-uninstall"
NAMESPACE: Final = "kube-system"
_RIGHTS: Final = "/apis/rbac.authorization.k8s.io/v1"
_POLICIES: Final = "/apis/admissionregistration.k8s.io/v1"
_INSIDE: Final = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
_COLLECTIONS: Final = {
    "ServiceAccount": _INSIDE,
    "ClusterRole": f"{_RIGHTS}/clusterroles",
    "ClusterRoleBinding": f"{_RIGHTS}/clusterrolebindings",
    "Role": f"{_RIGHTS}/namespaces/{NAMESPACE}/roles",
    "RoleBinding": f"{_RIGHTS}/namespaces/{NAMESPACE}/rolebindings",
    "ValidatingAdmissionPolicy": f"{_POLICIES}/validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": f"{_POLICIES}/validatingadmissionpolicybindings",
}
_IN_FORCE: Final = 60.0
"""Seconds until the server's own watch has brought it a policy: one or two on a quiet machine."""


@dataclass(frozen=True, slots=True)
class Confined:
    """An API server on which the Job could run; `job` has its account's token."""

    server: Server
    job: User
    kubeconfig: Path
    arguments: tuple[str, ...]
    """What the Job's container is told, behind the program's name."""


def hooks(helm: Path) -> list[Object]:
    """The objects, by the program that renders them. Raises subprocess.CalledProcessError."""
    chart = SOURCE / "deploy" / "chart" / "hami-agent"
    command = (helm, "template", "hami-agent", chart, f"--namespace={NAMESPACE}")
    options = ("--kube-version=1.36", "--show-only=templates/uninstall.yaml")
    done = subprocess.run(  # noqa: S603 -- built by this repository
        [*command, *options, "--set=image.repository=hami-agent"],
        check=True,
        capture_output=True,
        text=True,
    )
    return [one for one in yaml.safe_load_all(done.stdout) if one]


@contextlib.asynccontextmanager
async def open_confined(binaries: Path, tools: Path) -> AsyncIterator[Confined]:
    """Returns once the policy is in force. Raises TimeoutError: it is not."""
    made = hooks(tools / "helm")
    async with real_server(binaries) as server, contextlib.AsyncExitStack() as stack:
        for one in made:
            if one["kind"] in _COLLECTIONS:
                await server.admin.have("POST", _COLLECTIONS[one["kind"]], one)
        review = await server.admin.have("POST", f"{_INSIDE}/{NAME}/token", {"spec": {}})
        token = review["status"]["token"]
        assert server.plane is not None
        context = ssl.create_default_context(cafile=server.plane.certificates.ca)
        job = User(server.plane.server, token, context)
        stack.push_async_callback(job.close)

        async def is_in_force() -> bool:
            paths = (NODE_PATH, f"{NODES}/{OTHER_NODE}")
            tried = [
                await job.ask("PATCH", f"{path}?dryRun=All", marks(seen="1")) for path in paths
            ]
            return {403} == {answer.code for answer in tried} and all(
                "who cleans up" in answer.told[2] for answer in tried
            )

        await until_answer(is_in_force, _IN_FORCE, lambda: "the policy is not in force")
        (container,) = next(
            one["spec"]["template"]["spec"]["containers"] for one in made if one["kind"] == "Job"
        )
        kubeconfig = server.plane.kubeconfig_for("job", token)
        yield Confined(server, job, kubeconfig, tuple(container["args"]))

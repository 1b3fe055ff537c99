"""An API server with the chart's policies in force, and the accounts that they confine."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from agent.cluster import NodeEvent, PodUid
from agent.kit.timing import SystemClock
from agent.kube.objects import EventSeries, event_object
from tests.chart.lab.helm import CHART, Helm
from tests.peers.lab.agents import SOURCE
from tests.peers.lab.api import STRATEGIC, Answer, Api, Object
from tests.peers.lab.control import NODE, ControlPlane
from tests.peers.lab.part import until_answer
from tests.peers.lab.servers import (
    EVENTS,
    NODE_PATH,
    NODES,
    OTHER_NODE,
    OTHER_POD,
    OWN_POD,
    PODS,
    marks,
    plain_pod,
    real_server,
)

_ADMISSION: Final = "/apis/admissionregistration.k8s.io/v1"
_RBAC: Final = "/apis/rbac.authorization.k8s.io/v1"
_SYSTEM: Final = "namespaces/kube-system"
ACCOUNTS: Final = f"/api/v1/{_SYSTEM}/serviceaccounts"
POLICIES: Final = {
    "ValidatingAdmissionPolicy": f"{_ADMISSION}/validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": f"{_ADMISSION}/validatingadmissionpolicybindings",
}
_COLLECTIONS: Final = POLICIES | {
    "ServiceAccount": ACCOUNTS,
    "ClusterRole": f"{_RBAC}/clusterroles",
    "ClusterRoleBinding": f"{_RBAC}/clusterrolebindings",
    "Role": f"{_RBAC}/{_SYSTEM}/roles",
    "RoleBinding": f"{_RBAC}/{_SYSTEM}/rolebindings",
}
JOB: Final = "hami-agent-uninstall"
IN_FORCE: Final = 60.0
"""Seconds until the server's own watch has brought it a policy: one or two on a quiet machine."""
_VALUES: Final = (
    *("namespaceOverride=kube-system", "image.repository=example/hami-agent"),
    "config.report.nodeCondition=true",
)


@dataclass(frozen=True, slots=True)
class Guarded:
    """One API server with the policies in force."""

    plane: ControlPlane
    admin: Api
    node: Api
    agent: Api
    """With the token of an agent's pod on node-a."""
    unbound: Api
    """With a token of the same account that names no pod."""
    job: Api
    """With the account of the Job after `helm uninstall`."""
    kubeconfig: Path
    """The Job's."""
    arguments: tuple[str, ...]
    """What the Job's container is told, behind the program's name."""


def policies() -> list[Object]:
    """The policies and bindings of deploy/manifests."""
    text = (SOURCE / "deploy" / "manifests" / "admission.yaml").read_text()
    return [one for one in yaml.safe_load_all(text) if one["kind"] in POLICIES]


async def create_missing(admin: Api, documents: Iterable[Object]) -> None:
    """Create what is not there; a role that is there gets its rules."""
    for document in documents:
        path, name = _COLLECTIONS[document["kind"]], document["metadata"]["name"]
        if name not in {one["metadata"]["name"] for one in (await admin.get(path))["items"]}:
            await admin.create(path, document)
        elif document["kind"] == "ClusterRole":
            await admin.patch(f"{path}/{name}", {"rules": document["rules"]})


async def token_of(
    admin: Api, account: str, kind: str | None = None, obj: Object | None = None
) -> str:
    """A token of an account; with an object, one that ends with it and names its node."""
    spec: Object = {"expirationSeconds": 3600}
    if obj is not None:
        about = {key: obj["metadata"][key] for key in ("name", "uid")}
        spec["boundObjectRef"] = {"kind": kind, "apiVersion": "v1", **about}
    review = await admin.create(f"{ACCOUNTS}/{account}/token", {"spec": spec})
    token: str = review["status"]["token"]
    return token


def an_event(name: str, host: str, pod: str = OWN_POD) -> Object:
    """An Event as the agent on a node writes it; without a pod, it is about the Node."""
    about = ("default", pod, PodUid(pod)) if pod else ()
    event = NodeEvent("Tried", "a test", False, *about)
    found = event_object(EventSeries(event), host, SystemClock().now())
    return {**found, "metadata": {"name": name, "namespace": "default"}}


def conditions(*some: tuple[str, str]) -> Object:
    """A patch of these conditions, each with its status."""
    return {
        "status": {
            "conditions": [
                {"type": kind, "status": status, "reason": "r", "message": "m"}
                for kind, status in some
            ]
        }
    }


def _is_of_policy(answer: Answer) -> bool:
    """Whether a policy refused: where a right is not known yet, the refusal is another one."""
    return "ValidatingAdmissionPolicy" in answer.told[2]


@contextlib.asynccontextmanager
async def open_guarded(binaries: Path, helm: Helm) -> AsyncIterator[Guarded]:
    """Returns once rights and policies are in force. Raises TimeoutError: they are not."""
    objects = helm.told("hami-agent", CHART, _VALUES)
    async with real_server(binaries) as server, contextlib.AsyncExitStack() as stack:
        plane, admin = server.plane, server.admin
        assert plane is not None
        await create_missing(admin, (one for one in objects if one["kind"] in _COLLECTIONS))
        pod = plain_pod("agent-of-node-a", NODE, namespace="kube-system")
        pod["spec"]["serviceAccountName"] = "hami-agent"
        made = await admin.create(f"/api/v1/{_SYSTEM}/pods", pod)
        tokens = await token_of(admin, "hami-agent", "Pod", made), await token_of(admin, JOB)
        agent, job = (plane.client(token) for token in tokens)
        stack.push_async_callback(agent.close)
        stack.push_async_callback(job.close)
        for node in (NODE_PATH, f"{NODES}/{OTHER_NODE}"):
            await admin.patch(f"{node}/status", conditions(("Ready", "True")), STRATEGIC)
        asked: list[Callable[[], Awaitable[Answer]]] = [
            lambda: agent.ask("PATCH", f"{NODES}/{OTHER_NODE}?dryRun=All", marks(seen="1")),
            lambda: agent.ask("PATCH", f"{PODS}/{OTHER_POD}/status?dryRun=All", marks(seen="1")),
            lambda: agent.ask("POST", f"{EVENTS}?dryRun=All", an_event("probe", OTHER_NODE)),
            lambda: job.ask("PATCH", f"{NODES}/{OTHER_NODE}?dryRun=All", marks(seen="1")),
            lambda: job.ask("PATCH", f"{NODE_PATH}/status?dryRun=All", marks(seen="1")),
        ]
        degraded = conditions(("GpuDegraded", "True"))

        async def is_in_force() -> bool:
            told = await agent.ask(
                "PATCH", f"{NODE_PATH}/status?dryRun=All", degraded, kind=STRATEGIC
            )
            return told.code < 300 and all([_is_of_policy(await ask()) for ask in asked])

        await until_answer(is_in_force, IN_FORCE, lambda: "the policies are not in force")
        (container,) = next(
            one["spec"]["template"]["spec"]["containers"] for one in objects if one["kind"] == "Job"
        )
        kubeconfig = plane.kubeconfig_for("job", tokens[1])
        users = admin, server.node, agent, server.account, job
        yield Guarded(plane, *users, kubeconfig, tuple(container["args"]))

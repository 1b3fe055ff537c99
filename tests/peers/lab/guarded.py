"""An API server with the chart's policies in force, and the agent's account on one of its Nodes."""

import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from agent.cluster import NodeEvent, PodUid
from agent.kit.timing import SystemClock
from agent.kube.objects import EventSeries, event_object
from tests.peers.lab.agents import SOURCE
from tests.peers.lab.api import Object
from tests.peers.lab.identities import NODE
from tests.peers.lab.servers import (
    EVENTS,
    NODES,
    OTHER_NODE,
    OTHER_POD,
    OWN_POD,
    PODS,
    Answer,
    User,
    marks,
    plain_pod,
    real_server,
)
from tests.peers.lab.space import until_answer

MANIFESTS: Final = SOURCE / "deploy" / "manifests"
COLLECTIONS: Final = {
    kind: f"/apis/admissionregistration.k8s.io/v1/{plural}"
    for kind, plural in (
        ("ValidatingAdmissionPolicy", "validatingadmissionpolicies"),
        ("ValidatingAdmissionPolicyBinding", "validatingadmissionpolicybindings"),
    )
}
ACCOUNTS: Final = "/api/v1/namespaces/kube-system/serviceaccounts"
IN_FORCE: Final = 60.0
"""Seconds until the server's own watch has brought it a policy: one or two on a quiet machine."""
_FORBIDDEN: Final = 403

Call = Callable[[str, str, object], Awaitable[Object]]


@dataclass(frozen=True, slots=True)
class Guarded:
    """One API server with the policies in force. `agent` has the token of a pod on node-a."""

    admin: User
    agent: User
    unbound: User


def policies() -> list[Object]:
    """The policies and bindings of deploy/manifests."""
    text = (MANIFESTS / "admission.yaml").read_text()
    return [one for one in yaml.safe_load_all(text) if one["kind"] in COLLECTIONS]


async def apply_policies(call: Call, documents: Sequence[Object]) -> None:
    """Create what is not there; `call` is the admin's way to ask."""
    for document in documents:
        path = COLLECTIONS[document["kind"]]
        present = {item["metadata"]["name"] for item in (await call("GET", path, None))["items"]}
        if document["metadata"]["name"] not in present:
            await call("POST", path, document)


def bound_to(kind: str, obj: Object) -> Object:
    """What asks for a token that ends with an object and names its node."""
    about = {"kind": kind, "apiVersion": "v1", "name": obj["metadata"]["name"]}
    return {
        "spec": {
            "expirationSeconds": 3600,
            "boundObjectRef": {**about, "uid": obj["metadata"]["uid"]},
        }
    }


def an_event(name: str, host: str, pod: str = OWN_POD) -> Object:
    """An Event as the agent on a node writes it; without a pod, it is about the Node."""
    about = ("default", pod, PodUid(pod)) if pod else ()
    event = NodeEvent("Tried", "a test", False, *about)
    found = event_object(EventSeries(event), host, SystemClock().now())
    return {**found, "metadata": {"name": name, "namespace": "default"}}


def is_of_policy(answer: Answer) -> bool:
    """Whether a policy refused: where a right is not known yet, the refusal is another one."""
    code, _, text = answer.told
    return code == _FORBIDDEN and "ValidatingAdmissionPolicy" in text


@contextlib.asynccontextmanager
async def open_guarded(binaries: Path, documents: Sequence[Object]) -> AsyncIterator[Guarded]:
    """Returns once these policies are in force. Raises TimeoutError: they are not."""
    async with real_server(binaries) as server, contextlib.AsyncExitStack() as stack:
        await apply_policies(server.admin.have, documents)
        pod = plain_pod("agent-of-node-a", NODE, namespace="kube-system")
        pod["spec"]["serviceAccountName"] = "hami-agent"
        made = await server.admin.have("POST", "/api/v1/namespaces/kube-system/pods", pod)
        review = await server.admin.have(
            "POST", f"{ACCOUNTS}/hami-agent/token", bound_to("Pod", made)
        )
        assert server.plane is not None
        context = ssl.create_default_context(cafile=server.plane.certificates.ca)
        agent = User(server.plane.server, review["status"]["token"], context)
        stack.push_async_callback(agent.close)
        node, other = f"{NODES}/{OTHER_NODE}?dryRun=All", f"{PODS}/{OTHER_POD}/status?dryRun=All"

        async def is_in_force() -> bool:
            answers = [
                await agent.ask("PATCH", node, marks(seen="1")),
                await agent.ask("PATCH", other, marks(seen="1")),
                await agent.ask("POST", f"{EVENTS}?dryRun=All", an_event("probe", OTHER_NODE)),
            ]
            return all(map(is_of_policy, answers))

        await until_answer(is_in_force, IN_FORCE, lambda: "the policies are not in force")
        yield Guarded(server.admin, agent, server.account)

"""What the chart makes around the Job after `helm uninstall`, created by hand at an API server."""

import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from tests.peers.lab.agents import SOURCE
from tests.peers.lab.api import Object
from tests.peers.lab.servers import NODE_PATH, NODES, OTHER_NODE, Server, User, marks, real_server
from tests.peers.lab.waiting import until_answer

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

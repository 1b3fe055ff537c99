"""What brings pods to the node: controllers, kube-scheduler, and HAMi's part of it beside them."""

import base64
import json
import sys
from pathlib import Path
from typing import Final

from tests.peers.lab.agents import SOURCE
from tests.peers.lab.control import ControlPlane
from tests.peers.lab.identities import CONTROLLERS, EXTENDER, SCHEDULER
from tests.peers.lab.part import Part
from tests.peers.lab.space import NodeSpace

HAMI_SCHEDULER: Final = "hami-scheduler"
_UNLESS_IGNORED: Final = {"key": "hami.io/webhook", "operator": "NotIn", "values": ["ignore"]}
_RESOURCES: Final = ("gpu", "gpumem", "gpucores", "gpumem-percentage", "priority")


def lay_out_placing(plane: ControlPlane, ports: list[int]) -> None:
    """Write kube-scheduler's configuration. `ports`: extender, kube-scheduler, controllers."""
    extender = {
        "urlPrefix": f"https://127.0.0.1:{ports[0]}",
        "enableHTTPS": True,
        "tlsConfig": {"caFile": str(plane.certificates.ca)},
        "filterVerb": "filter",
        "bindVerb": "bind",
        "nodeCacheCapable": True,
        "weight": 1,
        "httpTimeout": "30s",
        "managedResources": [
            {"name": f"nvidia.com/{name}", "ignoredByScheduler": True} for name in _RESOURCES
        ],
    }
    configuration = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(_kubeconfig(plane, SCHEDULER))},
        "profiles": [{"schedulerName": "default-scheduler"}, {"schedulerName": HAMI_SCHEDULER}],
        "extenders": [extender],
    }
    (plane.root / "scheduler.json").write_text(json.dumps(configuration, indent=2))


def placing_parts(
    plane: ControlPlane, binaries: Path, space: NodeSpace, ports: list[int]
) -> tuple[Part, ...]:
    """The three programs, in the order of their start."""
    files, logs = plane.certificates, plane.root / "logs"
    environment = {"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"}
    extender = (
        *(sys.executable, "-m", "agent", "sandbox", "scheduler"),
        *("--kubeconfig", str(_kubeconfig(plane, EXTENDER)), "--listen", f"127.0.0.1:{ports[0]}"),
        *("--tls-cert", str(files.cert), "--tls-key", str(files.key)),
    )
    scheduler = (
        str(binaries / "kube-scheduler"),
        f"--config={plane.root / 'scheduler.json'}",
        *("--bind-address=127.0.0.1", f"--secure-port={ports[1]}"),
    )
    controllers = (
        str(binaries / "kube-controller-manager"),
        f"--kubeconfig={_kubeconfig(plane, CONTROLLERS)}",
        *("--use-service-account-credentials", "--leader-elect=false"),
        f"--service-account-private-key-file={files.service_account_key}",
        *(f"--root-ca-file={files.ca}", "--bind-address=127.0.0.1", f"--secure-port={ports[2]}"),
    )
    return (
        Part("kube-controller-manager", controllers, logs, space=space),
        Part("extender", extender, logs, space=space, environment=environment),
        Part("kube-scheduler", scheduler, logs, space=space),
    )


async def register_webhook(plane: ControlPlane, port: int) -> None:
    """Have the API server show each new pod to the webhook, as HAMi's chart does."""
    client = {
        "url": f"https://localhost:{port}/webhook",
        "caBundle": base64.b64encode(plane.certificates.ca.read_bytes()).decode(),
    }
    rule = {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "operations": ["CREATE"],
        "resources": ["pods"],
        "scope": "*",
    }
    webhook = {
        "name": "vgpu.hami.io",
        "admissionReviewVersions": ["v1"],
        "clientConfig": client,
        "failurePolicy": "Ignore",
        "sideEffects": "None",
        "rules": [rule],
        "objectSelector": {"matchExpressions": [_UNLESS_IGNORED]},
        "timeoutSeconds": 10,
        "matchPolicy": "Equivalent",
    }
    body = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "hami-webhook"},
        "webhooks": [webhook],
    }
    group = "/apis/admissionregistration.k8s.io/v1"
    await plane.admin.create(f"{group}/mutatingwebhookconfigurations", body)


def _kubeconfig(plane: ControlPlane, user: str) -> Path:
    return plane.root / f"{user.replace(':', '-')}.kubeconfig"

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
from tests.peers.lab.programs import Programs
from tests.peers.lab.space import NodeSpace

HAMI_SCHEDULER: Final = "hami-scheduler"
_UNLESS_IGNORED: Final = {"key": "hami.io/webhook", "operator": "NotIn", "values": ["ignore"]}
_DEVICE_CONFIG: Final = {
    "nvidia": {
        "resourceCountName": "nvidia.com/gpu",
        "resourceMemoryName": "nvidia.com/gpumem",
        "resourceMemoryPercentageName": "nvidia.com/gpumem-percentage",
        "resourceCoreName": "nvidia.com/gpucores",
        "resourcePriorityName": "nvidia.com/priority",
        "overwriteEnv": False,
        "defaultMemory": 0,
        "defaultCores": 0,
        "defaultGPUNum": 1,
        "memoryFactor": 1,
        "deviceSplitCount": 10,
        "deviceMemoryScaling": 1,
        "deviceCoreScaling": 1,
        "gpuCorePolicy": "default",
        "libCudaLogLevel": 1,
        "runtimeClassName": "",
    }
}
"""HAMi's device-config.yaml with the values of its chart."""
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
    device_config(plane).write_text(json.dumps(_DEVICE_CONFIG))


def device_config(plane: ControlPlane) -> Path:
    """HAMi's device-config.yaml, which scheduler and agents read."""
    return plane.root / "device-config.yaml"


def placing_parts(
    plane: ControlPlane, programs: Programs, space: NodeSpace, ports: list[int]
) -> tuple[Part, ...]:
    """The three programs, in the order of their start."""
    files, logs, binaries = plane.certificates, plane.root / "logs", programs.folder
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
        _extender(plane, programs, space, ports[0]),
        Part("kube-scheduler", scheduler, logs, space=space),
    )


def _extender(plane: ControlPlane, programs: Programs, space: NodeSpace, port: int) -> Part:
    """Our model of HAMi's scheduler, or HAMi's own if there is one."""
    files, logs = plane.certificates, plane.root / "logs"
    kubeconfig, address = _kubeconfig(plane, EXTENDER), f"127.0.0.1:{port}"
    command: tuple[str, ...]
    if programs.hami_scheduler is None:
        command = (
            *(sys.executable, "-m", "tests.peers.lab.extender", str(kubeconfig), str(port)),
            *(str(files.cert), str(files.key)),
        )
        environment = {"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"}
        return Part("extender", command, logs, space=space, environment=environment)
    command = (
        *(str(programs.hami_scheduler), f"--http_bind={address}"),
        *(f"--cert_file={files.cert}", f"--key_file={files.key}"),
        *(f"--scheduler-name={HAMI_SCHEDULER}", "--metrics-bind-address=127.0.0.1:0"),
        *(f"--device-config-file={device_config(plane)}", "-v=4"),
    )
    environment = {"KUBECONFIG": str(kubeconfig), "PATH": "/usr/bin:/bin", "HOME": "/root"}
    return Part("extender", command, logs, space=space, environment=environment)


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

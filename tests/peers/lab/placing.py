"""What brings pods to the node: controllers, kube-scheduler, and HAMi's part of it beside them."""

import asyncio
import base64
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent import cluster as annotations
from agent.hami.annotations import read_register
from tests.peers.lab.agents import RESOURCE, SOURCE
from tests.peers.lab.api import Object, Watched
from tests.peers.lab.control import ControlPlane
from tests.peers.lab.identities import CONTROLLERS, EXTENDER, NODE, SCHEDULER
from tests.peers.lab.part import Part
from tests.peers.lab.releases import MODEL, Release
from tests.peers.lab.space import NodeSpace

# The programs that a cluster is made of.


@dataclass(frozen=True, slots=True)
class Programs:
    """`folder` is what tests/peers/build made; `hami_scheduler` is HAMi's own, if there is one.

    `release`: of which release that is, or whose rules the model has.
    """

    folder: Path
    hami_scheduler: Path | None = None
    release: Release = MODEL


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


# What HAMi's scheduler has read of the Node, as far as it lets others see that.
#
# Before 2.8 it looks every 15 s, and reads only where the handshake is none of its own; it answers
# with `Requesting_`, and after a minute without an answer with `Deleted_`. Later ones look as
# often, but do not always show that they have read: tests wait for their pods alone, unless other
# GPUs were read than the Node has now. Source: HAMi v2.7.1 and v2.10 pkg/scheduler/scheduler.go,
# RegisterFromNodeAnnotations.

WITHIN: Final = 75.0
"""Seconds for a sign of life (every 30 s), a look (every 15 s), and some."""

_LOOK: Final = 16.0
"""Seconds in which it has looked at the Node (every 15 s)."""
_READS_CHANGES: Final = (2, 10)
"""From this release on it reads a changed text though nobody answers its handshake."""


class Reading:
    """Follows the handshake in the watch of the nodes. `forget` before the watch forgets."""

    def __init__(self, release: Release, nodes: Watched, scheduler: Part) -> None:
        self._release = release
        self._nodes = nodes
        self._scheduler = scheduler
        self._seen = 0
        self._handshake = ""
        self._offer: tuple[str | None, str] = None, "0"
        self._offered = 0.0
        """Since when the Node says so, by the loop's clock."""
        self._read: tuple[int, str | None] | None = None
        """Which process has read what."""

    async def until_current(self) -> None:
        """Return once the scheduler knows what the Node says now, or nobody is there to tell."""
        is_known = self._is_current if self._release.is_old else self._knows_the_gpus
        await self._nodes.until(is_known, WITHIN, "HAMi's scheduler does not read")

    def forget(self) -> None:
        """What was seen until now is known; the watch may forget it."""
        self._look()
        self._seen = 0

    def _is_current(self) -> bool:
        self._look()
        text = self._notes().get(annotations.REGISTER)
        is_there = self._scheduler.is_alive and text is not None
        return not is_there or self._read == (self._scheduler.pid, text)

    def _knows_the_gpus(self) -> bool:
        """Whether it would not place a pod on GPUs that an earlier agent had."""
        self._look()
        if self._read is None or not self._scheduler.is_alive:
            return True
        pid, text = self._read
        now = _uuids(self._notes().get(annotations.REGISTER))
        return pid != self._scheduler.pid or not now or _uuids(text) == now or self._has_looked()

    def _has_looked(self) -> bool:
        """Whether it has looked at the Node as it is, and not said so: HAMi's plugin says nothing.

        A Node with slices alone is read.
        """
        _, slices = self._offer
        reads = self._release.number >= _READS_CHANGES and slices != "0"
        return reads and asyncio.get_running_loop().time() - self._offered > _LOOK

    def _notes(self) -> dict[str, str]:
        node = self._nodes.objects.get(NODE)
        return (node["metadata"].get("annotations") or {}) if node else {}

    def _look(self) -> None:
        history = self._nodes.history.get(NODE, [])
        for one in history[self._seen :]:
            notes = one.object["metadata"].get("annotations") or {}
            if (offer := _offer(one.object)) != self._offer:
                self._offer, self._offered = offer, one.at
            handshake = notes.get(annotations.HANDSHAKE, "")
            if handshake == self._handshake:
                continue
            self._handshake = handshake
            if handshake.startswith("Requesting"):
                self._read = self._scheduler.pid, notes.get(annotations.REGISTER)
            elif handshake.startswith("Deleted"):
                self._read = None
        self._seen = len(history)


def _offer(node: Object) -> tuple[str | None, str]:
    """What the scheduler compares: the register annotation, and the slices of the kubelet."""
    slices = node.get("status", {}).get("allocatable", {}).get(RESOURCE, "0")
    return (node["metadata"].get("annotations") or {}).get(annotations.REGISTER), slices


def _uuids(text: str | None) -> set[str]:
    """The GPUs of a register annotation; empty if there is none."""
    return {gpu.uuid for gpu in read_register(text)}

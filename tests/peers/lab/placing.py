"""What brings pods to the node: controllers, kube-scheduler, and HAMi's part of it beside them."""

import base64
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from typing_extensions import override

from agent import cluster as annotations
from agent.hami.annotations import read_register
from tests.peers.lab.agents import SOURCE
from tests.peers.lab.api import Object, Watched, key_of, notes_of
from tests.peers.lab.control import CONTROLLERS, EXTENDER, NODE, SCHEDULER, ControlPlane
from tests.peers.lab.part import NodeSpace, Part

_WORD: Final = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")
_OLDEST: Final = (2, 5, 0)
_DEADLINE: Final = 20.0


@dataclass(frozen=True, slots=True, order=True)
class Release:
    """One release of HAMi's scheduler."""

    number: tuple[int, int, int]

    @property
    def is_old(self) -> bool:
        """True before 2.8: it reads records of fields, and only after a sign of life."""
        return self.number < (2, 8, 0)

    @property
    def flags(self) -> tuple[str, ...]:
        """What an agent must be told so that this scheduler reads its report."""
        return ("--report-profile", "colon") if self.is_old else ()

    @property
    def serves_inits(self) -> bool:
        """True where it gives init containers GPUs of their own.

        Source: HAMi v2.9 pkg/device/devices.go, Resourcereqs.
        """
        return self.number >= (2, 9, 0)

    def __str__(self) -> str:
        return ".".join(map(str, self.number))


MODEL: Final = Release((2, 10, 0))
"""The one whose rules our model of the scheduler has."""


def release_of(scheduler: Path, named: str | None) -> Release:
    """The release of a scheduler: what the user says of it, else what it says itself.

    Raises ValueError: nobody knows, or no agent can serve it; in a sentence.
    """
    said = (
        named
        or subprocess.run(  # noqa: S603 -- whoever runs the tests has named it
            (scheduler, "version"),
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_DEADLINE,
        ).stdout.partition("\n")[0]
    )
    found = _WORD.fullmatch(said.rpartition(" ")[2].strip())
    release = Release((int(found[1]), int(found[2]), int(found[3])) if found else (0, 0, 0))
    if release.number < _OLDEST:
        # One that was built without being told says 0.0.0.
        raise ValueError(
            f"HAMI_PEERS_SCHEDULER is {said!r}: name its release in HAMI_PEERS_SCHEDULER_RELEASE"
            " as in 2.7.1; the oldest that is tried is 2.5.0"
        )
    return release


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
_WEBHOOKS: Final = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
_UNLESS_IGNORED: Final = {"key": "hami.io/webhook", "operator": "NotIn", "values": ["ignore"]}
_NAMES: Final = {
    "Count": "gpu",
    "Memory": "gpumem",
    "MemoryPercentage": "gpumem-percentage",
    "Core": "gpucores",
    "Priority": "priority",
}
_DEVICE_CONFIG: Final = {
    "nvidia": {
        **{f"resource{which}Name": f"nvidia.com/{name}" for which, name in _NAMES.items()},
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
            {"name": f"nvidia.com/{name}", "ignoredByScheduler": True} for name in _NAMES.values()
        ],
    }
    configuration = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(plane.kubeconfig(SCHEDULER))},
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
        f"--kubeconfig={plane.kubeconfig(CONTROLLERS)}",
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
    kubeconfig, address = plane.kubeconfig(EXTENDER), f"127.0.0.1:{port}"
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
    authority = base64.b64encode(plane.certificates.ca.read_bytes()).decode()
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "scope": "*"}
    webhook = {
        "name": "vgpu.hami.io",
        "admissionReviewVersions": ["v1"],
        "clientConfig": {"url": f"https://localhost:{port}/webhook", "caBundle": authority},
        "failurePolicy": "Ignore",
        "sideEffects": "None",
        "matchPolicy": "Equivalent",
        "rules": [rule | {"operations": ["CREATE"]}],
        "objectSelector": {"matchExpressions": [_UNLESS_IGNORED]},
        "timeoutSeconds": 10,
    }
    body = {"metadata": {"name": "hami-webhook"}, "webhooks": [webhook]}
    await plane.admin.create(_WEBHOOKS, body)


# What HAMi's scheduler has read of the Node, as far as it lets others see that.
#
# Before 2.8 it looks every 15 s, and reads only where the handshake is none of its own; it answers
# with `Requesting_`, and after a minute without an answer with `Deleted_`. Later ones look as
# often, but do not always show that they have read: tests wait for their pods alone, unless other
# GPUs were read than the Node has now. Source: HAMi v2.7.1 and v2.10 pkg/scheduler/scheduler.go,
# RegisterFromNodeAnnotations.

WITHIN: Final = 75.0
"""Seconds for a sign of life (every 30 s), a look (every 15 s), and some."""


class Reading(Watched):
    """The Nodes as a watch shows them, and what HAMi's scheduler has read of ours."""

    def __init__(self, release: Release, scheduler: Part) -> None:
        super().__init__()
        self._release = release
        self._scheduler = scheduler
        self._handshake = ""
        self._read: tuple[int, str | None] | None = None
        """Which process has read what."""

    @override
    def take(self, what: str, item: Object) -> None:
        notes = notes_of(item)
        handshake = notes.get(annotations.HANDSHAKE, "")
        if handshake != self._handshake and key_of(item) == NODE:
            self._handshake = handshake
            if handshake.startswith("Requesting"):
                self._read = self._scheduler.pid, notes.get(annotations.REGISTER)
            elif handshake.startswith("Deleted"):
                self._read = None
        super().take(what, item)

    async def until_current(self) -> None:
        """Return once the scheduler knows what the Node says now, or nobody is there to tell."""
        await self.until(self._is_current, WITHIN, "HAMi's scheduler does not read")

    def _is_current(self) -> bool:
        """Whether it has read this; from 2.8 on, whether it knows these GPUs."""
        text = notes_of(self.objects[NODE]).get(annotations.REGISTER)
        if not self._scheduler.is_alive or text is None:
            return True
        if self._release.is_old:
            return self._read == (self._scheduler.pid, text)
        pid, known = self._read or (0, None)
        return pid != self._scheduler.pid or not _uuids(text) or _uuids(known) == _uuids(text)


def _uuids(text: str | None) -> set[str]:
    """The GPUs of a register annotation; empty if there is none."""
    return {gpu.uuid for gpu in read_register(text)}

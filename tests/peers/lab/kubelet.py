"""The kubelet, in a node's space: configured, restarted, robbed of its records, and asked."""

import contextlib
import json
from pathlib import Path
from typing import Any, Final

from grpclib.exceptions import GRPCError, StreamTerminatedError

from agent.wire.v1 import PodResources
from tests.peers.lab.identities import NODE
from tests.peers.lab.part import Part
from tests.peers.lab.pod_resources import PodResourcesClient
from tests.peers.lab.ports import free_ports
from tests.peers.lab.space import NodeSpace
from tests.peers.lab.waiting import until_answer

CHECKPOINT: Final = "kubelet_internal_checkpoint"
_TICK: Final = "1s"
_READY: Final = 30.0
_NO_ANSWER: Final = (OSError, GRPCError, StreamTerminatedError)
"""What a question raises while the kubelet starts or ends, or has been asked too often."""


class Kubelet:
    """One kubelet; its directory is `root`/kubelet outside and /var/lib/kubelet inside."""

    def __init__(self, root: Path, binaries: Path, space: NodeSpace, authority: Path) -> None:
        self.plugins: Final = root / "kubelet" / "device-plugins"
        self.pod_resources: Final = root / "kubelet" / "pod-resources" / "kubelet.sock"
        self.resources: Final = PodResourcesClient(self.pod_resources)
        self._root = root
        self._authority = authority
        config, kubeconfig = root / "kubelet.json", root / f"system-node-{NODE}.kubeconfig"
        command = (
            *(str(binaries / "kubelet"), f"--config={config}", f"--kubeconfig={kubeconfig}"),
            *(f"--hostname-override={NODE}", "--node-ip=127.0.0.1"),
            *("--cert-dir=/var/lib/kubelet/pki", "--v=2"),
        )
        self.part: Final = Part("kubelet", command, root / "logs", space=space)

    def configure(self, runtime: Path, **more: object) -> None:
        """Write its configuration; `more` are members of KubeletConfiguration."""
        (port,) = free_ports(1)
        settings: dict[str, object] = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(self._authority)},
            },
            "authorization": {"mode": "Webhook"},
            "address": "127.0.0.1",
            "port": port,
            "healthzPort": 0,
            "containerRuntimeEndpoint": f"unix://{runtime}",
            "cgroupDriver": "cgroupfs",
            "failCgroupV1": False,
            "failSwapOn": False,
            "enforceNodeAllocatable": [],
            "localStorageCapacityIsolation": False,
            "makeIPTablesUtilChains": False,
            "nodeStatusUpdateFrequency": _TICK,
            "syncFrequency": "10s",
            "maxPods": 250,
            "imageGCHighThresholdPercent": 100,
            "evictionHard": {"memory.available": "1Mi"},
            "registerWithTaints": [],
            "volumePluginDir": "/var/lib/kubelet/volume-plugins",
            "featureGates": {"ResourceHealthStatus": True},
        }
        (self._root / "kubelet.json").write_text(json.dumps(settings | more, indent=2))

    async def start(self) -> None:
        """Start it; returns when its PodResources socket answers.

        Raises:
            TimeoutError, OSError: it does not; the text holds its last words.
        """
        await self.part.start()
        await self.until_serving()

    async def until_serving(self) -> None:
        """Return once its PodResources socket answers. Raises TimeoutError."""
        await until_answer(self._is_serving, _READY, self.part.tail)

    async def _is_serving(self) -> bool:
        if not (self.plugins / "kubelet.sock").exists():
            return False
        with contextlib.suppress(*_NO_ANSWER):
            await self.list()
            return True
        return False

    async def restart(self, *, lose_checkpoint: bool = False) -> None:
        """SIGKILL, and start it again."""
        await self.part.kill()
        if lose_checkpoint:
            (self.plugins / CHECKPOINT).unlink()
        await self.start()

    async def allocatable(self, resource: str) -> frozenset[str]:
        """The healthy ids of a resource, as PodResources tells. Raises OSError, GRPCError."""
        return _ids(await self.resources.allocatable(resource), resource)

    async def offered(self, resource: str) -> frozenset[str] | None:
        """The same; None: it cannot answer now. It may just end, or be asked too often."""
        with contextlib.suppress(*_NO_ANSWER):
            return await self.allocatable(resource)
        return None

    async def offers(self, resource: str, count: int) -> bool:
        """Whether it answers and counts so many healthy ids."""
        found = await self.offered(resource)
        return found is not None and count == len(found)

    async def list(self) -> dict[str, PodResources]:
        """All active pods by `namespace/name`. Raises OSError, GRPCError."""
        return {f"{one.namespace}/{one.name}": one for one in await self.resources.list()}

    async def held(self, resource: str) -> dict[tuple[str, str], frozenset[str]]:
        """Which ids each container holds, by (`namespace/name`, container)."""
        return {
            (key, container.name): ids
            for key, pod in (await self.list()).items()
            for container in pod.containers
            if (ids := _ids(container.devices, resource))
        }


def _ids(devices: list[Any], resource: str) -> frozenset[str]:
    return frozenset(
        text for entry in devices if entry.resource_name == resource for text in entry.device_ids
    )

"""A client of the kubelet's PodResources socket.

All clients together are answered a burst of 10 questions and 100 a second.
"""

import asyncio
import contextlib
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

from grpclib.client import Channel
from grpclib.exceptions import GRPCError, StreamTerminatedError

from agent.wire.v1 import (
    AllocatableResourcesRequest,
    ContainerDevices,
    GetPodResourcesRequest,
    ListPodResourcesRequest,
    PodResources,
    PodResourcesListerStub,
)
from tests.peers.lab.control import NODE, NODE_USER, ControlPlane, free_ports
from tests.peers.lab.part import NodeSpace, Part, until, until_answer

_DEADLINE: Final = 5.0


class PodResourcesClient:
    """Each question has a connection of its own. All raise OSError, GRPCError."""

    def __init__(self, socket: Path) -> None:
        self.socket: Final = socket

    @contextlib.asynccontextmanager
    async def lister(self) -> AsyncIterator[PodResourcesListerStub]:
        """The stub itself, for several questions on one connection."""
        async with Channel(path=str(self.socket)) as channel:
            yield PodResourcesListerStub(channel)

    async def allocatable(self, resource: str) -> list[ContainerDevices]:
        """The entries of a resource's healthy ids."""
        async with self.lister() as lister:
            answer = await lister.get_allocatable_resources(
                AllocatableResourcesRequest(), timeout=_DEADLINE
            )
        return [entry for entry in answer.devices if entry.resource_name == resource]

    async def list(self) -> list[PodResources]:
        async with self.lister() as lister:
            return (await lister.list(ListPodResourcesRequest(), timeout=_DEADLINE)).pod_resources

    async def get(self, namespace: str, name: str) -> PodResources:
        async with self.lister() as lister:
            asked = GetPodResourcesRequest(name, namespace)
            return (await lister.get(asked, timeout=_DEADLINE)).pod_resources or PodResources()

    async def find(self, namespace: str, name: str) -> PodResources | None:
        """The same; None: the kubelet does not know the pod."""
        try:
            return await self.get(namespace, name)
        except GRPCError as error:
            if "not found" in (error.message or ""):
                return None
            raise


# The kubelet, in a node's space: configured, restarted, robbed of its records, and asked.

CHECKPOINT: Final = "kubelet_internal_checkpoint"
_TICK: Final = "1s"
_READY: Final = 30.0
_NO_ANSWER: Final = (OSError, GRPCError, StreamTerminatedError)
"""What a question raises while the kubelet starts or ends, or has been asked too often."""


class Kubelet:
    """One kubelet; its directory is `root`/kubelet outside and /var/lib/kubelet inside."""

    def __init__(self, root: Path, binaries: Path, space: NodeSpace, plane: ControlPlane) -> None:
        self.plugins: Final = root / "kubelet" / "device-plugins"
        self.pod_resources: Final = root / "kubelet" / "pod-resources" / "kubelet.sock"
        self.resources: Final = PodResourcesClient(self.pod_resources)
        self._root = root
        self._authority = plane.certificates.ca
        config = root / "kubelet.json"
        command = (
            *(
                str(binaries / "kubelet"),
                f"--config={config}",
                f"--kubeconfig={plane.kubeconfig(NODE_USER)}",
            ),
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

    async def list(self) -> dict[str, PodResources]:
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


# Container images without a registry, for this machine alone.

APPLETS = ("cat", "cp", "env", "kill", "ls", "mkdir", "mv", "sh", "sleep", "true", "touch")
DIRECTORIES = {"dev": 0o755, "etc": 0o755, "proc": 0o555, "sys": 0o555, "tmp": 0o1777}
"""Stand in every image, with these modes."""
BUSYBOX_FILE = Path("/bin/busybox")
PASSWD = b"root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"
FOREVER = "trap 'exit 0' TERM INT; sleep 2147483647 & wait"
"""`wait` takes in every orphan that process 1 inherits, and lets the trap through at once."""

_PROGRAMS = (b"#!", b"\x7fELF")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def write_image(
    path: Path,
    name: str,
    files: Mapping[str, Path | bytes],
    links: Mapping[str, str],
    command: Sequence[str],
) -> None:
    """Write the image `name`, a full reference, as `docker save` does.

    `files` by place in the image: content, or the file to copy; what is a program by its first
    bytes may be run. `links` by place: what they point to.
    """
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        folders = {str(one): 0o755 for place in files for one in PurePosixPath(place).parents}
        for place, mode in sorted((folders | DIRECTORIES).items()):
            _add(tar, place, mode=mode, kind=tarfile.DIRTYPE)
        for place, source in files.items():
            content = source if isinstance(source, bytes) else source.read_bytes()
            mode = 0o755 if content.startswith(_PROGRAMS) else 0o644
            _add(tar, place, content, mode=mode)
        for place, target in links.items():
            _add(tar, place, mode=0o777, kind=tarfile.SYMTYPE, target=target)
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    config = {
        "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {"Cmd": list(command), "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    with tarfile.open(path, mode="w") as tar:
        _add(tar, "config.json", json.dumps(config).encode())
        _add(tar, "layer.tar", layer.getvalue())
        _add(tar, "manifest.json", json.dumps(manifest).encode())


def _add(
    tar: tarfile.TarFile,
    place: str,
    content: bytes = b"",
    *,
    mode: int = 0o644,
    kind: bytes = tarfile.REGTYPE,
    target: str = "",
) -> None:
    member = tarfile.TarInfo(place)
    member.size, member.mode, member.type, member.linkname = len(content), mode, kind, target
    tar.addfile(member, io.BytesIO(content))


def write_busybox(path: Path, name: str, command: Sequence[str] = ("/bin/sh",)) -> None:
    """Write an image of a static busybox with the programs that tests run; alone it is a shell."""
    files: dict[str, Path | bytes] = {"bin/busybox": BUSYBOX_FILE, "etc/passwd": PASSWD}
    write_image(path, name, files, {f"bin/{applet}": "busybox" for applet in APPLETS}, command)


# containerd with its runc, CNI and images, in a node's space.

BUSYBOX: Final = "peers.test/busybox:1"
_PAUSE: Final = "peers.test/pause:1"
_RUNTIME_READY: Final = 20.0

# Lowering oom_score_adj is denied on machines without CAP_SYS_RESOURCE, and runc then dies.
_CONFIG: Final = """\
version = 2
root = "{root}/containerd/root"
state = "{root}/containerd/state"
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  disable_tcp_service = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{root}/cni"
"""
# Pods use the host's network; the runtime only has to find that there is one.
_NETWORK: Final = {"cniVersion": "0.4.0", "name": "peers", "plugins": [{"type": "loopback"}]}


class Runtime:
    """The container runtime. `socket` is a path that is the same inside and outside."""

    def __init__(self, root: Path, space: NodeSpace) -> None:
        self.socket: Final = root / "containerd.sock"
        self._root = root
        self._space = space
        config = root / "containerd.toml"
        self.part: Final = Part(
            "containerd", ("containerd", "--config", str(config)), root / "logs", space=space
        )

    async def start(self) -> None:
        network = self._root / "cni" / "10-peers.conflist"
        network.parent.mkdir(exist_ok=True)
        network.write_text(json.dumps(_NETWORK))
        text = _CONFIG.format(root=self._root, socket=self.socket, pause=_PAUSE)
        (self._root / "containerd.toml").write_text(text)
        await self.part.start()
        await self.until_ready()

    async def until_ready(self) -> None:
        await until(self.socket.exists, _RUNTIME_READY, self.part.tail)
        await until_answer(self._answers, _RUNTIME_READY, self.part.tail)

    async def _answers(self) -> bool:
        code, _ = await self._ctr("version")
        return code == 0

    async def import_images(self) -> None:
        """Make the two images that pods are made of, and hand them over."""
        for name, script in ((_PAUSE, ("-c", FOREVER)), (BUSYBOX, ())):
            path = self._root / "image.tar"
            write_busybox(path, name, ("/bin/sh", *script))
            await self.images("import", str(path))

    async def images(self, *arguments: str) -> None:
        """`ctr images import ARCHIVE`, or another command. Raises RuntimeError: it is refused."""
        code, words = await self._ctr("--namespace", "k8s.io", "images", *arguments)
        if code:
            raise RuntimeError(f"containerd refused to {' '.join(arguments)}: {words}")

    async def _ctr(self, *arguments: str) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            *self._space.command(("ctr", "--address", str(self.socket), *arguments)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        words, _ = await process.communicate()
        return process.returncode or 0, words.decode(errors="replace")

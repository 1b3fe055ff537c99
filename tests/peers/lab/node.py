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
from tests.peers.lab.identities import NODE, free_ports
from tests.peers.lab.part import Part
from tests.peers.lab.space import NodeSpace, until, until_answer

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
        """All active pods."""
        async with self.lister() as lister:
            return (await lister.list(ListPodResourcesRequest(), timeout=_DEADLINE)).pod_resources

    async def get(self, namespace: str, name: str) -> PodResources:
        """One pod's answer."""
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

        Raises TimeoutError, OSError: it does not; the text holds its last words.
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


# Container images without a registry: OCI layouts in one tar, as `ctr images import` takes them.
#
# One layer, one platform: this machine's. The same arguments give the same bytes, whoever runs it.

APPLETS = (
    "cat",
    "cp",
    "env",
    "false",
    "kill",
    "ls",
    "mkdir",
    "mount",
    "mv",
    "nc",
    "sh",
    "sleep",
    "tail",
    "true",
)
DIRECTORIES = {"dev": 0o755, "etc": 0o755, "proc": 0o555, "sys": 0o555, "tmp": 0o1777}
"""Stand in every image, with these modes."""
BUSYBOX_FILE = Path("/bin/busybox")
PASSWD = b"root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"
FOREVER = "trap 'exit 0' TERM INT; sleep 2147483647 & wait"
"""`wait` takes in every orphan that process 1 inherits, and lets the trap through at once."""

_PROGRAMS = (b"#!", b"\x7fELF")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_IMAGE_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"

_Member = tuple[tarfile.TarInfo, bytes]


def write_image(
    path: Path,
    name: str,
    files: Mapping[str, Path | bytes],
    links: Mapping[str, str],
    command: Sequence[str],
) -> None:
    """Write the image `name` to the tar `path`.

    Args:
        path: The tar, replaced where it exists.
        name: The full reference by which containerd will know it, with registry and tag.
        files: By place in the image, without a leading slash: content, or the file to copy. What
            is a program by its first bytes may be run by everybody; all else is only readable.
        links: Symbolic links, by place in the image: what they point to.
        command: What a container runs that names nothing else.

    Raises:
        OSError: A file cannot be read, or the tar not written.
    """
    layer = _layer({place: _content(source) for place, source in files.items()}, links)
    described = {"architecture": _architecture(), "os": "linux"}
    config = _json(
        described
        | {
            "config": {"Cmd": list(command), "Env": ["PATH=/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": _descriptor(_IMAGE_CONFIG, config),
            "layers": [_descriptor(_LAYER, layer)],
        }
    )
    named = _descriptor(_MANIFEST, manifest) | {
        "platform": described,
        "annotations": {
            "io.containerd.image.name": name,
            "org.opencontainers.image.ref.name": name.rpartition(":")[2],
        },
    }
    blobs = {f"blobs/sha256/{_hex(blob)}": blob for blob in (layer, config, manifest)}
    path.write_bytes(
        _tar(
            {
                "blobs": _directory(0o755),
                "blobs/sha256": _directory(0o755),
                "index.json": _file(_json({"schemaVersion": 2, "manifests": [named]})),
                "oci-layout": _file(_json({"imageLayoutVersion": "1.0.0"})),
            }
            | {place: _file(blob) for place, blob in blobs.items()}
        )
    )


def write_busybox(path: Path, name: str) -> None:
    """Write an image of a static busybox with the programs that tests run; alone it is a shell.

    Raises OSError: There is no busybox, or the tar cannot be written.
    """
    _write_busybox(path, name, ["/bin/sh"])


def write_pause(path: Path, name: str) -> None:
    """Write the image of a pod's sandbox: sleeps until it is told to end, and reaps orphans.

    Raises OSError: There is no busybox, or the tar cannot be written.
    """
    _write_busybox(path, name, ["/bin/sh", "-c", FOREVER])


def _write_busybox(path: Path, name: str, command: Sequence[str]) -> None:
    files: dict[str, Path | bytes] = {"bin/busybox": BUSYBOX_FILE, "etc/passwd": PASSWD}
    write_image(path, name, files, {f"bin/{applet}": "busybox" for applet in APPLETS}, command)


def _content(source: Path | bytes) -> bytes:
    return source if isinstance(source, bytes) else source.read_bytes()


def _layer(files: Mapping[str, bytes], links: Mapping[str, str]) -> bytes:
    folders = {
        str(folder): _directory(0o755)
        for place in [*files, *links]
        for folder in PurePosixPath(place).parents
        if folder.name
    }
    return _tar(
        folders
        | {place: _directory(mode) for place, mode in DIRECTORIES.items()}
        | {place: _file(content) for place, content in files.items()}
        | {place: _link(target) for place, target in links.items()}
    )


def _tar(members: Mapping[str, _Member]) -> bytes:
    """Of root, of 1970 and sorted by name, so a folder comes before what is in it."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, (member, content) in sorted(members.items()):
            member.name = name
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return written.getvalue()


def _directory(mode: int) -> _Member:
    member = tarfile.TarInfo()
    member.type, member.mode = tarfile.DIRTYPE, mode
    return member, b""


def _file(content: bytes) -> _Member:
    member = tarfile.TarInfo()
    member.mode = 0o755 if content.startswith(_PROGRAMS) else 0o644
    return member, content


def _link(target: str) -> _Member:
    member = tarfile.TarInfo()
    member.type, member.linkname, member.mode = tarfile.SYMTYPE, target, 0o777
    return member, b""


def _descriptor(media_type: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}


def _digest(blob: bytes) -> str:
    return f"sha256:{_hex(blob)}"


def _hex(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _architecture() -> str:
    """By Go's name, which containerd compares with its own."""
    return _ARCHITECTURES.get(platform.machine(), platform.machine())


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
        """Start it; returns when it answers.

        Raises TimeoutError, OSError: it does not; the text holds its last words.
        """
        network = self._root / "cni" / "10-peers.conflist"
        network.parent.mkdir(exist_ok=True)
        network.write_text(json.dumps(_NETWORK))
        text = _CONFIG.format(root=self._root, socket=self.socket, pause=_PAUSE)
        (self._root / "containerd.toml").write_text(text)
        await self.part.start()
        await self.until_ready()

    async def until_ready(self) -> None:
        """Return once it answers. Raises TimeoutError."""
        await until(self.socket.exists, _RUNTIME_READY, self.part.tail)
        await until_answer(self._answers, _RUNTIME_READY, self.part.tail)

    async def _answers(self) -> bool:
        code, _ = await self._ctr("version")
        return code == 0

    async def import_images(self) -> None:
        """Make the two images that pods are made of, and hand them over.

        Raises RuntimeError: they are refused.
        """
        for name, write in ((_PAUSE, write_pause), (BUSYBOX, write_busybox)):
            path = self._root / f"{name.rpartition('/')[2].partition(':')[0]}.tar"
            write(path, name)
            await self.load(path)

    async def load(self, archive: Path) -> None:
        """Hand an archive of an image over. Raises RuntimeError: it is refused."""
        await self._image("import", str(archive))

    async def tag(self, name: str, other: str) -> None:
        """Give an image that is there a second name. Raises RuntimeError: it is refused."""
        await self._image("tag", name, other)

    async def _image(self, *arguments: str) -> None:
        code, words = await self._ctr("--namespace", "k8s.io", "images", *arguments)
        if code:
            raise RuntimeError(f"containerd refused to {' '.join(arguments)}: {words}")

    async def restart(self) -> None:
        """SIGKILL, and start it again; containers run on."""
        await self.part.kill()
        await until(lambda: not self.part.is_alive, 5.0, lambda: "containerd lives on")
        await self.part.start()
        await self.until_ready()

    async def _ctr(self, *arguments: str) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            *self._space.command(("ctr", "--address", str(self.socket), *arguments)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        words, _ = await process.communicate()
        return process.returncode or 0, words.decode(errors="replace")

"""containerd with its runc, CNI and images, in a node's space."""

import asyncio
import json
from pathlib import Path
from typing import Final

from tests.peers.lab.image import write_busybox, write_pause
from tests.peers.lab.part import Part
from tests.peers.lab.space import NodeSpace
from tests.peers.lab.waiting import until, until_answer

BUSYBOX: Final = "peers.test/busybox:1"
_PAUSE: Final = "peers.test/pause:1"
_READY: Final = 20.0

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
_NETWORK: Final = {
    "cniVersion": "0.4.0",
    "name": "peers",
    "plugins": [{"type": "loopback"}],
}


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

        Raises:
            TimeoutError, OSError: it does not; the text holds its last words.
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
        await until(self.socket.exists, _READY, self.part.tail)
        await until_answer(self._answers, _READY, self.part.tail)

    async def _answers(self) -> bool:
        code, _ = await self._ctr("version")
        return code == 0

    async def import_images(self) -> None:
        """Make the two images that pods are made of, and hand them over.

        Raises:
            RuntimeError: they are refused.
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

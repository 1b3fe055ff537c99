"""The paths of one sandbox, in one directory that is short enough for unix socket names."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MOST_CHARACTERS: Final = 60
"""A unix socket's path has at most 107 bytes, and the longest one here adds 47."""

STAND_IN: Final = b"stand-in for HAMi-core's library; the sandbox starts no container\n"


class Places:
    """The directory of a sandbox and the paths in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.plugins = root / "device-plugins"
        self.pod_resources = root / "pod-resources"
        self.hardware_socket = root / "gpus.sock"
        self.kubeconfig = root / "kubeconfig"
        """The one with the agent's identity."""
        self.log = root / "agent.log"
        """The agents' log, while a sandbox stays up."""
        self.config = root / "config.yaml"
        """The agent's settings file; absent unless a person or test writes it."""
        self.hook = root / "hook"
        """HAMi's HOOK_PATH: above vgpu/."""
        self.state = root / "state"
        self.run = root / "run"
        self.cgroup = root / "cgroup"
        """The cgroup tree of the running containers."""


@contextlib.contextmanager
def open_places(*, keep: bool = False) -> Iterator[Places]:
    """Create the directory with the files that a node has without an agent; remove or `keep` it.

    Raises:
        OSError: it cannot be created.
    """
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > MOST_CHARACTERS - len("/hami-12345678"):
        parent = Path("/tmp")  # noqa: S108 -- mkdtemp below makes a private directory in it
    root = Path(tempfile.mkdtemp(prefix="hami-", dir=parent))
    try:
        places = Places(root)
        for directory in (places.hook / "vgpu", places.state, places.run, places.cgroup):
            directory.mkdir(parents=True, mode=0o755)
        place_library(places.hook / "vgpu", places.hook)
        yield places
    finally:
        if not keep:
            shutil.rmtree(root)


def place_library(directory: Path, hook: Path) -> None:
    """Write a stand-in for libvgpu.so and the ld.so.preload that names it in containers.

    `directory`: the one that the agent has as vgpu/ below `hook`, its hook path.

    Raises:
        OSError: they cannot be written.
    """
    (directory / "libvgpu.so").write_bytes(stand_in())
    (directory / "ld.so.preload").write_text(f"{hook}/vgpu/libvgpu.so\n")


def stand_in() -> bytes:
    """What begins as a library for this machine. Raises OSError."""
    with Path("/proc/self/exe").open("rb") as program:
        return program.read(64) + STAND_IN

"""An agent with settings files, and the way from an edit to kubelet and scheduler."""

import asyncio
import itertools
import json
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.peers.lab.agents import Agent
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.identities import NODE
from tests.peers.lab.node_state import Told, until_allocatable, until_told
from tests.peers.lab.table import FAR, Table

# Settings files as a node has them: mounted from a ConfigMap, or written by hand.

NODE_CONFIG: Final = "config.json"
DEVICE_CONFIG: Final = "device-config.yaml"

_NUMBERS: Final = itertools.count()


class MountedFiles:
    """A directory of files as the kubelet mounts a ConfigMap: all of them change at once.

    Each file is a link through `..data`, a link to a directory that is never written again: the new
    one is made whole, the link is swapped by a rename, the old one is removed.
    Source: kubernetes pkg/volume/util/atomic_writer.go, Write.
    """

    def __init__(self, directory: Path) -> None:
        self.directory: Final = directory
        directory.mkdir(parents=True)

    def write(self, name: str, text: str) -> Path:
        """Write one file; the others stay. Its path."""
        version = self._version()
        (version / name).write_text(text)
        self._swap(version)
        path = self.directory / name
        if not path.is_symlink():
            path.symlink_to(f"..data/{name}")
        return path

    def remove(self, name: str) -> None:
        """Remove one file; the others stay."""
        version = self._version()
        (version / name).unlink()
        self._swap(version)
        (self.directory / name).unlink()

    def _version(self) -> Path:
        """A new directory with what the last one has."""
        version = self.directory / f"..version_{next(_NUMBERS)}"
        if self._data.exists():
            shutil.copytree(self._data, version)
        else:
            version.mkdir()
        return version

    def _swap(self, version: Path) -> None:
        old, link = self._data.resolve(), self.directory / "..data_tmp"
        link.symlink_to(version.name)
        link.rename(self._data)
        if old != self._data:
            shutil.rmtree(old)

    @property
    def _data(self) -> Path:
        return self.directory / "..data"


class RenamedFiles:
    """A directory of files that somebody edits: an editor writes another file and renames it."""

    def __init__(self, directory: Path) -> None:
        self.directory: Final = directory
        directory.mkdir(parents=True)

    def write(self, name: str, text: str) -> Path:
        """Put a new file in the place of the old one. Its path."""
        path, fresh = self.directory / name, self.directory / f".{name}.new"
        fresh.write_text(text)
        fresh.rename(path)
        return path


Files = MountedFiles | RenamedFiles


def open_files(cluster: Cluster, kind: type[Files] = MountedFiles) -> Files:
    """An empty directory of such files, which the node's programs see at the same path."""
    return kind(cluster.root / f"settings-{next(_NUMBERS)}")


def node_config(**entry: Any) -> str:
    """HAMi's config.json with an entry for this node, beside one that is another's."""
    other: Mapping[str, object] = {"name": "another-node", "devicesplitcount": 2}
    entries = [other, {"name": NODE, **entry}]
    return json.dumps({"nodeconfig": entries}, indent=2) + "\n"


BOUND: Final = 2.0
"""Seconds from a reload to its effect; the agent spreads the writes of many nodes over one.

Without a reload the agent reads a changed file within 6 s.
"""

QUIET: Final = 3.0
"""Seconds in which a write that is one too many would be there."""

ALL: Final = Told(gpus=8, count=10)
"""What an agent without settings tells."""


def ask_to_reload(agent: Agent) -> None:
    """SIGHUP, for who does not wait for the agent to look."""
    agent.part.send(signal.SIGHUP)


async def with_node_config(cluster: Cluster, count: int) -> tuple[Agent, Files]:
    """A registered agent to which HAMi's config.json says a split count; and where that lies."""
    files = open_files(cluster)
    path = files.write(NODE_CONFIG, node_config(devicesplitcount=count))
    agent = await cluster.start_registered_agent("--nodeconfig", str(path), slices=8 * count)
    return agent, files


async def until_everywhere(
    cluster: Cluster, table: Table, wanted: Told, began: float, what: str
) -> None:
    """Return once kubelet and Node know; how long both took since `began` is in the table.

    `began` is a moment of the loop's clock.

    Raises TimeoutError, AssertionError: one of them took far too long.
    """
    loop = asyncio.get_running_loop()
    await until_allocatable(cluster, wanted.gpus * wanted.count, FAR * BOUND)
    table.hold(f"{what} → allocatable slices", loop.time() - began, BOUND)
    at = await until_told(cluster, wanted, began, FAR * BOUND)
    table.hold(f"{what} → register annotation", at - began, BOUND)

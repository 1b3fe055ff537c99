"""Settings files as a node has them: mounted from a ConfigMap, or written by hand."""

import itertools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.peers.lab.cluster import Cluster
from tests.peers.lab.identities import NODE

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

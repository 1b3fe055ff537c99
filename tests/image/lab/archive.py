"""An image in an OCI archive: its configuration, and the files of each layer."""

import dataclasses
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class ImageArchive:
    """`layers` from the bottom up, each the members by their names without a leading `./`."""

    digest: str
    platform: str
    config: Mapping[str, Any]
    layers: Sequence[Mapping[str, tarfile.TarInfo]]


def opened(archive: Path) -> ImageArchive:
    """Read the archive, whose one manifest is meant."""
    with tarfile.open(archive) as files:

        def blob(digest: str) -> Any:
            member = files.extractfile(f"blobs/{digest.replace(':', '/')}")
            assert member is not None, digest
            return json.loads(member.read())

        index = files.extractfile("index.json")
        assert index is not None
        (entry,) = json.loads(index.read())["manifests"]
        manifest = blob(entry["digest"])
        described = blob(manifest["config"]["digest"])
        layers = [_members(files, layer["digest"]) for layer in manifest["layers"]]
    platform = f"{described['os']}/{described['architecture']}"
    return ImageArchive(entry["digest"], platform, described["config"], layers)


def _members(files: tarfile.TarFile, digest: str) -> Mapping[str, tarfile.TarInfo]:
    layer = files.extractfile(f"blobs/{digest.replace(':', '/')}")
    with tarfile.open(fileobj=layer) as members:
        return {member.name.removeprefix("./"): member for member in members}

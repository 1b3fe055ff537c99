"""Reads CDI specifications as container runtimes do: which device names they define.

Source: container-device-interface pkg/cdi cache.go, spec-dirs.go, spec.go, device.go.
"""

import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from agent.kit.offload import Offload

FILES: Final = 1024
FILE_BYTES: Final = 1 << 20
"""NVIDIA's for 8 GPUs has less than 0.1 MiB."""

DEPTH: Final = 20
_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?")
_File = tuple[Path, int, int, int]
"""Path, inode, bytes and time of change."""


class CdiDirectories:
    """The Specifications port. It reads files again only if one of them changed.

    `in_pod`: a directory that is missing is not mounted, so nothing is known of it. On the host it
    has no specification.
    """

    def __init__(self, offload: Offload, *, in_pod: bool) -> None:
        self._offload = offload
        self._in_pod = in_pod
        self._files: list[list[_File]] = []
        self._defined: frozenset[str] = frozenset()

    async def names(self, directories: Sequence[str]) -> frozenset[str] | None:
        """See agent.core.ports.Specifications."""
        return await self._offload.call(self._names, directories)

    def _names(self, directories: Sequence[str]) -> frozenset[str] | None:
        try:
            files = [list(self._listed(Path(directory))) for directory in directories]
            if files != self._files:
                self._defined, self._files = _defined(files), files
        except OSError:
            return None
        return self._defined

    def _listed(self, directory: Path) -> Iterator[_File]:
        """The files of the directory. Raises OSError: some of them cannot be known."""
        if not self._in_pod and not directory.exists():
            return
        paths = [path for path in directory.iterdir() if path.suffix in {".json", ".yaml"}]
        if len(paths) > FILES or not directory.stat().st_nlink:
            # The host's directory that was mounted here is removed: it may have another one now.
            raise OSError(f"{directory}: too many files, or removed")
        for path in sorted(paths):
            status = path.stat()  # a link may lead to where only the host's root leads
            if status.st_size > FILE_BYTES:
                raise OSError(f"{path}: too large")
            if stat.S_ISREG(status.st_mode):
                yield path, status.st_ino, status.st_size, status.st_ctime_ns


def _defined(directories: Sequence[Sequence[_File]]) -> frozenset[str]:
    """The names in these files. One that a directory has twice counts as none. Raises OSError."""
    defined: set[str] = set()
    twice: set[str] = set()
    for files in directories:
        here: set[str] = set()
        for path, *_ in files:
            names = read_specification(path.read_bytes())
            twice |= here & names
            here |= names
        defined |= here
    return frozenset(defined - twice)


def read_specification(content: bytes) -> frozenset[str]:
    """The names `vendor/class=device` that a JSON or YAML file defines.

    None if a runtime drops the file: one wrong device is enough. Versions and unknown fields are
    not judged, because it depends on the runtime which ones it knows.
    """
    import yaml  # noqa: PLC0415 -- late: only the CDI strategies need it

    loader: type[yaml.BaseLoader] = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    names: list[str] = []
    depth = 0
    try:
        for event in yaml.parse(content, Loader=loader):  # libyaml's composer has no limit
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > DEPTH:
                return frozenset()
        document: Any = next(iter(yaml.load_all(content, Loader=loader)), {})
        for device in document["devices"] if document["cdiVersion"] else ():
            if not any(device["containerEdits"].values()) or not _NAME.fullmatch(device["name"]):
                return frozenset()
            names.append(f"{document['kind']}={device['name']}")
    except (yaml.YAMLError, UnicodeError, RecursionError, LookupError, TypeError, AttributeError):
        return frozenset()
    return frozenset(names) if len(names) == len(set(names)) else frozenset()

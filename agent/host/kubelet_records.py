"""Reads the kubelet's checkpoint file on the worker thread."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import structlog

from agent.codec.kubelet_records import decode_held, decode_records
from agent.core.errors import MalformedText
from agent.core.inventory.slices import SliceId
from agent.core.state.ledger import ContainerKey
from agent.kit.offload import Offload

T = TypeVar("T")

log = structlog.get_logger(__name__)

FILE_NAME = "kubelet_internal_checkpoint"


class KubeletRecordsFile:
    """The ports KubeletRecords and KubeletHolds over the kubelet's checkpoint in `directory`."""

    def __init__(self, directory: Path, offload: Offload) -> None:
        self._path = directory / FILE_NAME
        self._offload = offload

    async def read(self, resource: str) -> frozenset[ContainerKey] | None:
        """Return the containers with ids of `resource`; None if absent or unreadable."""
        return await self._offload.call(self._read, decode_records, resource)

    async def held(self, resource: str) -> tuple[frozenset[SliceId], ...] | None:
        """Return each container's ids of `resource`; None if absent or unreadable."""
        return await self._offload.call(self._read, decode_held, resource)

    def _read(self, decode: Callable[[bytes, str], T], resource: str) -> T | None:
        try:
            return decode(self._path.read_bytes(), resource)
        except FileNotFoundError:
            return None
        except (OSError, MalformedText) as error:
            log.warning("kubelet.records_unreadable", path=str(self._path), err=str(error))
            return None

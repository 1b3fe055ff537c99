"""Reads the kubelet's checkpoint file on the worker thread."""

from collections.abc import Mapping
from pathlib import Path

import structlog

from agent.codec.kubelet_records import decode_records
from agent.core.errors import MalformedText
from agent.core.inventory.slices import SliceId
from agent.core.state.ledger import ContainerKey
from agent.kit.offload import Offload

log = structlog.get_logger(__name__)

FILE_NAME = "kubelet_internal_checkpoint"


class KubeletRecordsFile:
    """The port KubeletRecords over the kubelet's checkpoint in `directory`."""

    def __init__(self, directory: Path, offload: Offload) -> None:
        self._path = directory / FILE_NAME
        self._offload = offload

    async def read(self, resource: str) -> Mapping[ContainerKey, frozenset[SliceId]] | None:
        """The ids of `resource` of each container it records; None when absent or unreadable."""
        return await self._offload.call(self._read, resource)

    def _read(self, resource: str) -> Mapping[ContainerKey, frozenset[SliceId]] | None:
        try:
            return decode_records(self._path.read_bytes(), resource)
        except FileNotFoundError:
            return None
        except (OSError, MalformedText) as error:
            log.warning("kubelet.records_unreadable", path=str(self._path), err=str(error))
            return None

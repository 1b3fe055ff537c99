"""What the kubelet says about containers: by PodResources, and in its checkpoint file."""

from collections import defaultdict
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog
from grpclib import GRPCError
from grpclib.client import Channel
from grpclib.config import Configuration
from grpclib.const import Status
from grpclib.exceptions import ProtocolError, StreamTerminatedError
from grpclib.protocol import H2Protocol
from typing_extensions import override

from agent.cluster import PodUid
from agent.errors import KubeletError, MalformedText, WitnessThrottled, WitnessUnsupported, cap
from agent.kit.tasks import Offload, in_own_task
from agent.kit.timing import Lag
from agent.ledger import ContainerKey, Holding
from agent.model import SliceId
from agent.wire.v1 import GetPodResourcesRequest, PodResources, PodResourcesListerStub

log = structlog.get_logger(__name__)

T = TypeVar("T")

FILE_NAME = "kubelet_internal_checkpoint"


class UnixChannel(Channel):
    """A Channel that raises an OSError, not an AttributeError, if it is lost while it opens."""

    @override
    async def __connect__(self) -> H2Protocol:
        protocol = await super().__connect__()
        if not self._connected:
            raise ConnectionResetError("the connection was lost while it was opened")
        return protocol


CALL_DEADLINE = 10.0
"""Seconds for one answer: a kubelet that gets little CPU is slow, and a refusal fails the pod."""

WINDOW = 16 * 1024 * 1024
"""Bytes: the list of a big node is longer than grpclib's window of 4 MiB."""


class PodResourcesWitness:
    """The Witness port over the kubelet's socket. Create it on the loop that uses it.

    It keeps one connection and opens it again after a loss. It does not repeat a failed call: the
    caller knows how much time is left.
    """

    def __init__(self, socket: Path, *, deadline: float = CALL_DEADLINE) -> None:
        self._socket = socket
        self._deadline = deadline
        self._lag = Lag()
        self._channel = UnixChannel(
            path=str(socket),
            config=Configuration(
                http2_connection_window_size=WINDOW, http2_stream_window_size=WINDOW
            ),
        )
        self._stub = PodResourcesListerStub(self._channel)

    async def get(self, namespace: str, pod: str) -> Holding | None:
        """As in the port."""
        request = GetPodResourcesRequest(pod_name=pod, pod_namespace=namespace)
        answer = await self._call("Get", self._stub.get(request))
        known = answer.pod_resources if answer else None
        return None if known is None else _holding(known)

    async def list(self) -> tuple[Holding, ...]:
        """As in the port."""
        answer = await self._call("List", self._stub.list())
        return tuple(map(_holding, answer.pod_resources if answer else ()))

    def close(self) -> None:
        """Close the connection; a further call would open it again."""
        self._channel.close()

    async def _call(self, method: str, call: Awaitable[T]) -> T | None:
        """The answer to one call, connecting included, within the deadline; None: no such pod."""
        what = f"PodResources {method}"
        try:
            async with self._lag.within(self._deadline):
                return await in_own_task(call)
        except GRPCError as error:
            message, status, kind = error.message or "", error.status, KubeletError
            is_of_pod = method == "Get" and status in {Status.UNKNOWN, Status.NOT_FOUND}
            if is_of_pod and message.endswith("not found"):
                return None
            if status is Status.RESOURCE_EXHAUSTED:
                kind = WitnessThrottled
            elif status is Status.UNIMPLEMENTED or "method disabled" in message:  # before 1.34
                kind = WitnessUnsupported
            raise kind(f"{what} failed: {status.name}: {cap(message)}") from error
        except TimeoutError as error:
            raise KubeletError(f"{what} was not answered within {self._deadline:g} s") from error
        except (OSError, StreamTerminatedError, ProtocolError) as error:
            reason = cap(getattr(error, "strerror", None) or str(error))
            raise KubeletError(f"{what} got no answer at {self._socket}: {reason}") from error
        except (EOFError, KeyError, ValueError) as error:
            # The generated parser raises these on bytes that are no message.
            raise KubeletError(f"the answer of {what} is malformed") from error


def _holding(pod: PodResources) -> Holding:
    containers = {}
    for container in pod.containers:
        # Ids by resource. The kubelet sends one entry for each id and NUMA node.
        merged: defaultdict[str, set[SliceId]] = defaultdict(set)
        for entry in container.devices:
            merged[entry.resource_name].update(map(SliceId, entry.device_ids))
        containers[container.name] = {name: frozenset(ids) for name, ids in merged.items()}
    return Holding(pod.namespace, pod.name, containers)


# Reads the kubelet's checkpoint file. It does not verify the checksum: the kubelet rewrites it with
# each list of a plugin, so before its first call (kubelet pkg/kubelet/cm/devicemanager).


class _Entry(msgspec.Struct, frozen=True):
    """DeviceIDs are grouped by NUMA node, -1 for none."""

    pod_uid: str = msgspec.field(name="PodUID")
    container: str = msgspec.field(name="ContainerName")
    resource: str = msgspec.field(name="ResourceName")
    ids: dict[str, list[str] | None] | None = msgspec.field(name="DeviceIDs", default=None)


class _Data(msgspec.Struct, frozen=True):
    entries: list[_Entry] | None = msgspec.field(name="PodDeviceEntries", default=None)


class _File(msgspec.Struct, frozen=True):
    data: _Data = msgspec.field(name="Data")


def decode_records(content: bytes, resource: str) -> Mapping[ContainerKey, frozenset[SliceId]]:
    """The ids of `resource` of each container that holds some. Raises MalformedText.

    Init containers are among them until their pod ends.
    """
    try:
        entries = msgspec.json.decode(content, type=_File).data.entries or ()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedText(f"the kubelet's checkpoint: {cap(str(error), 120)}") from error

    return {
        ContainerKey(PodUid(entry.pod_uid), entry.container): frozenset(
            SliceId(text) for ids in (entry.ids or {}).values() for text in ids or ()
        )
        for entry in entries
        if entry.resource == resource
    }


async def read_records(
    directory: Path, worker: Offload, resource: str
) -> Mapping[ContainerKey, frozenset[SliceId]] | None:
    """By the checkpoint in `directory`; None: it is absent or unreadable."""
    path = directory / FILE_NAME
    try:
        return await worker.call(lambda: decode_records(path.read_bytes(), resource))
    except FileNotFoundError:
        return None
    except (OSError, MalformedText) as error:
        log.warning("kubelet.records_unreadable", path=str(path), err=str(error))
        return None

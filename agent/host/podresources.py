"""The PodResources client: it asks the kubelet which devices it recorded for which pod.

It keeps one connection and opens it again after a loss. It does not repeat a failed call: the
caller knows how much time is left.
"""

import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from types import MappingProxyType

from grpclib import GRPCError
from grpclib.config import Configuration
from grpclib.const import Status
from grpclib.exceptions import ProtocolError, StreamTerminatedError

from agent.core.errors import KubeletError, WitnessThrottled, WitnessUnsupported, cap
from agent.core.inventory.slices import SliceId
from agent.core.state.holdings import ContainerHolding, Holding
from agent.kit.running_time import Lag
from agent.kit.tasks import apart
from agent.kit.unix import UnixChannel
from agent.wire.v1 import (
    GetPodResourcesRequest,
    PodResources,
    PodResourcesListerStub,
)

CALL_DEADLINE = 10.0
"""Seconds for one answer: a kubelet that gets little CPU is slow, and a refusal fails the pod."""

WINDOW = 16 * 1024 * 1024
"""Bytes: the list of a big node is longer than grpclib's window of 4 MiB."""


class PodResourcesWitness:
    """The Witness port over the kubelet's unix socket. Create it on the loop that uses it."""

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
        """Return the pod as the kubelet knows it, or None.

        Raises:
            WitnessThrottled, WitnessUnsupported, KubeletError: there was no answer.
        """
        request = GetPodResourcesRequest(pod_name=pod, pod_namespace=namespace)
        try:
            async with self._asking("Get"):
                answer = await apart(self._stub.get(request))
        except _PodUnknown:
            return None
        return None if answer.pod_resources is None else _holding(answer.pod_resources)

    async def list(self) -> tuple[Holding, ...]:
        """Return all active pods.

        Raises:
            WitnessThrottled, KubeletError: there was no answer.
        """
        async with self._asking("List"):
            answer = await apart(self._stub.list())
        return tuple(map(_holding, answer.pod_resources))

    def close(self) -> None:
        """Close the connection; a further call would open it again."""
        self._channel.close()

    @contextlib.asynccontextmanager
    async def _asking(self, method: str) -> AsyncIterator[None]:
        """Limit one call, connecting included, to the deadline, and translate its errors."""
        try:
            async with self._lag.within(self._deadline):
                yield
        except GRPCError as error:
            raise _translated(method, error) from error
        except TimeoutError as error:
            text = f"PodResources {method} was not answered within {self._deadline:g} s"
            raise KubeletError(text) from error
        except (OSError, StreamTerminatedError, ProtocolError) as error:
            text = f"PodResources at {self._socket} cannot be asked: {cap(str(error))}"
            raise KubeletError(text) from error
        except (EOFError, KeyError, ValueError) as error:
            # The generated parser raises these on bytes that are no message.
            raise KubeletError(f"the answer of PodResources {method} is malformed") from error


class _PodUnknown(KubeletError):  # noqa: N818 -- names what happened
    """The kubelet answered that it does not know the pod."""


def _translated(method: str, error: GRPCError) -> KubeletError:
    message = error.message or error.status.name
    text = cap(message)
    match error.status:
        case Status.RESOURCE_EXHAUSTED:
            return WitnessThrottled(f"PodResources {method} is over its rate limit: {text}")
        case Status.UNIMPLEMENTED:
            return WitnessUnsupported(f"this kubelet has no PodResources {method}: {text}")
        case Status.UNKNOWN if "method disabled" in text:  # before 1.34, behind a feature gate
            return WitnessUnsupported(f"this kubelet has no PodResources {method}: {text}")
        case Status.UNKNOWN | Status.NOT_FOUND if message.endswith("not found"):
            return _PodUnknown(text)
        case _:
            return KubeletError(f"PodResources {method} failed: {error.status.name}: {text}")


def _holding(pod: PodResources) -> Holding:
    containers = []
    for container in pod.containers:
        # Ids by resource. The kubelet sends one entry for each id and NUMA node.
        merged: defaultdict[str, set[SliceId]] = defaultdict(set)
        for entry in container.devices:
            merged[entry.resource_name].update(map(SliceId, entry.device_ids))
        ids = {resource: frozenset(ids) for resource, ids in merged.items()}
        containers.append(ContainerHolding(container.name, MappingProxyType(ids)))
    return Holding(pod.namespace, pod.name, tuple(containers))

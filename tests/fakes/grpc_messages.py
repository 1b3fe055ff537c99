"""Google's gRPC and protobuf on the kubelet's side of the socket: a peer that shares no code.

The messages are made from protos/ when a test first asks for one.
"""

import asyncio
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pool, message_factory

from tests.wire import peer

DEADLINE = 5.0


@functools.cache
def _pool() -> descriptor_pool.DescriptorPool:
    with tempfile.TemporaryDirectory() as folder:
        return peer.descriptors(Path(folder))


def message(name: str) -> Any:
    """Google's class of the message `name` of v1beta1."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"v1beta1.{name}"))


class GrpcPlugin:
    """A blocking client of the plugin at `path`: call it from a thread.

    Answers are Google's messages; errors are grpc.RpcError.
    """

    def __init__(self, path: Path, authority: str = "localhost") -> None:
        self._channel = grpc.insecure_channel(
            f"unix:{path}",
            options=[("grpc.default_authority", authority), ("grpc.use_local_subchannel_pool", 1)],
        )

    def close(self) -> None:
        self._channel.close()

    def raw(self, method: str, request: bytes, answer: str, **call: Any) -> Any:
        """Send `request` as it is."""
        path = f"/v1beta1.DevicePlugin/{method}"
        ask = self._channel.unary_unary(path, None, message(answer).FromString)
        return ask(request, timeout=DEADLINE, **call)

    def options(self) -> Any:
        return self.raw("GetDevicePluginOptions", b"", "DevicePluginOptions")

    def allocate(self, *containers: list[str]) -> Any:
        request = message("AllocateRequest")()
        for ids in containers:
            request.container_requests.add(devices_ids=ids)
        return self.raw("Allocate", request.SerializeToString(), "AllocateResponse")

    def prefer(self, available: list[str], must_include: list[str], size: int) -> list[str]:
        request = message("PreferredAllocationRequest")()
        request.container_requests.add(
            available_deviceIDs=available, must_include_deviceIDs=must_include, allocation_size=size
        )
        answer = self.raw(
            "GetPreferredAllocation", request.SerializeToString(), "PreferredAllocationResponse"
        )
        return list(answer.container_responses[0].deviceIDs)

    def pre_start(self, ids: list[str]) -> Any:
        request = message("PreStartContainerRequest")(devices_ids=ids)
        return self.raw(
            "PreStartContainer", request.SerializeToString(), "PreStartContainerResponse"
        )

    def lists(self) -> Any:
        """An open ListAndWatch; next() waits for a list, cancel() ends it."""
        watch = self._channel.unary_stream(
            "/v1beta1.DevicePlugin/ListAndWatch", None, message("ListAndWatchResponse").FromString
        )
        return watch(b"")


async def refused(call: Callable[..., object], *arguments: object) -> tuple[str, str]:
    """Code and text of the status that the call ends in."""
    try:
        await asyncio.to_thread(call, *arguments)
    except grpc.RpcError as error:
        return error.code().name, error.details()
    raise AssertionError("it was answered")

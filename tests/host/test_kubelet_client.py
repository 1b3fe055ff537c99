"""Register as the kubelet's side of the socket sees it, and what its answers become."""

import asyncio
import socket
from pathlib import Path

import pytest
from grpclib import GRPCError
from grpclib.const import Status
from typing_extensions import override

from agent.errors import KubeletError, RegistrationRefused
from agent.kubelet.register import KubeletRegistrar
from agent.wire.v1beta1 import DevicePluginOptions, Empty, RegisterRequest, RegistrationBase
from tests.fakes.unix_grpc import dialled_in_vain, served

pytestmark = pytest.mark.looptime(False)

ENDPOINT = "hami-gpu-00000001.sock"
RESOURCE = "nvidia.com/gpu"


class RecordedRegistration(RegistrationBase):
    def __init__(self, refusal: GRPCError | None = None, *, hangs: bool = False) -> None:
        self.requests: list[RegisterRequest] = []
        self.refusal = refusal
        self.hangs = hangs

    @override
    async def register(self, message: RegisterRequest) -> Empty:
        self.requests.append(message)
        if self.hangs:
            await asyncio.Event().wait()
        if self.refusal is not None:
            raise self.refusal
        return Empty()


async def register(path: Path, *, deadline: float = 2.0) -> None:
    await KubeletRegistrar(path, deadline=deadline).register(ENDPOINT, RESOURCE, preferred=True)


async def test_the_request_says_who_we_are_and_what_we_offer(tmp_path: Path):
    kubelet = RecordedRegistration()
    async with served(tmp_path / "kubelet.sock", kubelet):
        await register(tmp_path / "kubelet.sock")

    options = DevicePluginOptions(get_preferred_allocation_available=True)
    assert [RegisterRequest("v1beta1", ENDPOINT, RESOURCE, options)] == kubelet.requests


async def test_with_a_fence_the_request_says_that_the_kubelet_is_to_ask_before_a_start(tmp_path):
    kubelet = RecordedRegistration()
    path = tmp_path / "kubelet.sock"
    async with served(path, kubelet):
        await KubeletRegistrar(path, fenced=True).register(ENDPOINT, RESOURCE, preferred=True)

    assert [True] == [request.options.pre_start_required for request in kubelet.requests]


async def test_a_refusal_carries_the_kubelets_words(tmp_path: Path):
    refusal = GRPCError(Status.UNKNOWN, 'the ResourceName "x" is invalid')
    async with served(tmp_path / "kubelet.sock", RecordedRegistration(refusal)):
        with pytest.raises(RegistrationRefused, match=r'^the ResourceName "x" is invalid$'):
            await register(tmp_path / "kubelet.sock")


async def test_a_long_refusal_is_cut(tmp_path: Path):
    refusal = GRPCError(Status.UNKNOWN, "x" * 5_000)
    async with served(tmp_path / "kubelet.sock", RecordedRegistration(refusal)):
        with pytest.raises(RegistrationRefused) as caught:
            await register(tmp_path / "kubelet.sock")

    assert 256 == len(str(caught.value))


async def test_a_socket_that_is_not_there_is_said_by_name(tmp_path: Path):
    with pytest.raises(KubeletError, match=r"kubelet\.sock is not there"):
        await register(tmp_path / "kubelet.sock")


async def test_the_socket_of_a_dead_kubelet_refuses(tmp_path: Path):
    path = tmp_path / "kubelet.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))

    with pytest.raises(KubeletError, match="refuses connections"):
        await register(path)


async def test_a_kubelet_that_does_not_answer_is_given_up(tmp_path: Path):
    kubelet = RecordedRegistration(hangs=True)
    async with served(tmp_path / "kubelet.sock", kubelet):
        with pytest.raises(KubeletError) as caught:
            await register(tmp_path / "kubelet.sock", deadline=0.1)

    assert 1 == len(kubelet.requests)
    assert not isinstance(caught.value, RegistrationRefused)


async def test_a_kubelet_that_dies_during_the_call_is_no_refusal(tmp_path: Path):
    async def die(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_unix_server(die, tmp_path / "kubelet.sock")
    async with server:
        with pytest.raises(KubeletError) as caught:
            await register(tmp_path / "kubelet.sock")

    assert not isinstance(caught.value, RegistrationRefused)


async def test_a_kubelet_that_dies_while_it_is_dialled_is_no_refusal(tmp_path: Path):
    path = tmp_path / "kubelet.sock"

    assert KubeletError is type(await dialled_in_vain(path, register(path)))

"""Bytes that are no message of the API end in INVALID_ARGUMENT, and nobody is asked anything."""

import asyncio
from pathlib import Path

import grpc
import pytest
from grpclib import GRPCError
from grpclib.const import Status
from hypothesis import given
from hypothesis import strategies as st

from agent.plugin.guard import Guard
from agent.plugin.messages import SHAPES, StrictCodec
from agent.plugin.traffic import Traffic
from agent.wire.v1beta1 import (
    AllocateRequest,
    DevicePluginBase,
    Empty,
    PreferredAllocationRequest,
    PreStartContainerRequest,
)
from tests.fakes.chance import Seeded
from tests.fakes.door import a_door
from tests.fakes.grpc_messages import GrpcPlugin, message
from tests.fakes.raw_h2 import a_raw_call, prefixed

ALLOCATE = "/v1beta1.DevicePlugin/Allocate"

WORDS = {"a text that is cut short": "cut short", "a number where a message is due": "wrong kind"}
"""What is said of some."""
MALFORMED = {
    "a text that is cut short": b"\x0a\x05\x0a\x09abc",
    "a message that is cut short": b"\x0a\xff\x01\x0a\x03abc",
    "a length that does not end": b"\x0a\xff\xff",
    "a number of eleven bytes": b"\x0a" + b"\xff" * 11,
    "no UTF-8": b"\x0a\x04\x0a\x02\xc3\x28",
    "a number where a message is due": b"\x08\x01",
    "a number where a text is due": b"\x0a\x02\x08\x01",
    "a group": b"\x0b\x0c",
    "an unknown kind": b"\x0f",
    "field zero": b"\x02\x00",
    "fixed bytes that are missing": b"\x11\x01\x02",
    "a half number": b"\x15\x01",
}


@pytest.mark.looptime(False)
@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_bytes_are_refused_as_such(tmp_path: Path, name: str):
    async with a_door(tmp_path) as door:
        plugin = GrpcPlugin(door.path)

        with pytest.raises(grpc.RpcError) as caught:
            await asyncio.to_thread(plugin.raw, "Allocate", MALFORMED[name], "AllocateResponse")

        assert grpc.StatusCode.INVALID_ARGUMENT == caught.value.code()
        assert WORDS.get(name, "") in caught.value.details()
        assert caught.value.details().endswith("[HA-1002]")
        assert [] == door.allocator.asked
        assert 2 == len(
            (await asyncio.to_thread(plugin.allocate, ["a"], ["b"])).container_responses
        )
        plugin.close()


@pytest.mark.looptime(False)
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", "3"),
        (prefixed(b"abc", claim=9), "3"),
        (b"\x00\x00", "3"),
        (prefixed(b"", flag=1), "12"),
    ],
    ids=["no message", "shorter than stated", "half a prefix", "compressed"],
)
async def test_a_call_that_breaks_the_framing_gets_a_status(
    tmp_path: Path, body: bytes, status: str
):
    async with a_door(tmp_path) as door, a_raw_call(door.path) as call:
        await call.request(ALLOCATE, body)
        await call.until_ended()

        assert status == call.headers["grpc-status"]
        assert call.headers["grpc-message"]


@pytest.mark.looptime(False)
async def test_a_method_that_is_not_of_the_api_is_unimplemented(tmp_path: Path):
    async with a_door(tmp_path) as door:
        plugin = GrpcPlugin(door.path)

        with pytest.raises(grpc.RpcError) as caught:
            await asyncio.to_thread(plugin.raw, "Deallocate", b"", "Empty")

        assert grpc.StatusCode.UNIMPLEMENTED == caught.value.code()
        plugin.close()


def test_unknown_fields_are_allowed():
    known = bytes(AllocateRequest.FromString(b"\x0a\x03\x0a\x01a"))

    decoded = StrictCodec().decode(known + b"\x7a\x01x\x78\x07\x79" + b"\0" * 8, AllocateRequest)

    assert ["a"] == decoded.container_requests[0].devices_ids
    assert Empty() == StrictCodec().decode(b"", Empty)


def test_a_tag_that_is_longer_than_it_need_be_is_read_all_the_same():
    texts = b"\x8a\x00\x01a" + b"\x8a\x00\x01b" + b"\x0a\x01c"

    assert ["a", "b", "c"] == StrictCodec().decode(texts, PreStartContainerRequest).devices_ids


def told(request) -> tuple[list[str], list[str], int]:
    """What a request says, whoever has read it."""
    return (
        list(request.available_deviceIDs),
        list(request.must_include_deviceIDs),
        request.allocation_size,
    )


TEXTS = st.lists(st.text(max_size=3) | st.sampled_from(["", "\0", "é" * 70, "x" * 127, "x" * 128]))


@given(TEXTS, TEXTS, st.integers(-(2**31), 2**31 - 1))
def test_what_google_encodes_is_read_as_it_was_meant(available, must, size):
    whole = message("PreferredAllocationRequest")()
    for _ in range(2):
        whole.container_requests.add(
            available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=size
        )

    read = StrictCodec().decode(whole.SerializeToString(), PreferredAllocationRequest)

    assert [(available, must, size)] * 2 == [told(one) for one in read.container_requests]


def test_noise_is_decoded_as_google_decodes_it_or_refused():
    chance = Seeded(7)
    whole = message("PreferredAllocationRequest")()
    whole.container_requests.add(
        available_deviceIDs=["a", "bc"], must_include_deviceIDs=["a"], allocation_size=300
    )
    codec = StrictCodec()
    taken = 0
    for _ in range(5_000):
        noisy = bytearray(whole.SerializeToString())
        for _ in range(chance.randint(1, 2)):
            noisy[chance.randrange(len(noisy))] = chance.randrange(256)
        try:
            ours = codec.decode(bytes(noisy), PreferredAllocationRequest)
        except GRPCError:
            continue
        theirs = message("PreferredAllocationRequest").FromString(bytes(noisy))
        taken += 1
        assert [told(one) for one in theirs.container_requests] == [
            told(one) for one in ours.container_requests
        ]
    assert 100 < taken < 4_900


def test_every_request_of_the_api_has_a_shape():
    assert {h.request_type for h in DevicePluginBase().__mapping__().values()} == set(SHAPES)


async def unasked(_: object) -> None:
    raise AssertionError("nothing was received, so nothing is to be answered")


class SilentPeer:
    """A call whose request never comes."""

    async def recv_message(self) -> None:
        await asyncio.Event().wait()


async def test_a_request_that_never_comes_is_given_up():
    traffic = Traffic()
    serve = Guard(traffic).unary("allocate", unasked)
    began = asyncio.get_running_loop().time()

    with pytest.raises(GRPCError) as caught:
        await serve(SilentPeer())  # type: ignore[arg-type]

    assert Status.DEADLINE_EXCEEDED == caught.value.status
    assert 10 == asyncio.get_running_loop().time() - began
    assert ((("allocate", "DEADLINE_EXCEEDED"), 1),) == traffic.calls.items()


def test_an_answer_of_another_kind_is_a_fault_of_ours():
    with pytest.raises(TypeError, match="expected a AllocateRequest, not a Empty"):
        StrictCodec().encode(Empty(), AllocateRequest)

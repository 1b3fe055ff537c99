"""The two paths that no generated class takes, against Google's protobuf, and malformed calls."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import SettingsError
from agent.kubelet import door as door_module
from agent.kubelet.door import PluginCodec, encode_list
from agent.model import LIST_BYTES, GpuUuid, SliceGroup, SliceId, SliceList
from agent.wire.v1beta1 import (
    AllocateRequest,
    Device,
    ListAndWatchResponse,
    NumaNode,
    PreferredAllocationRequest,
    TopologyInfo,
)
from tests.fakes.chance import Seeded
from tests.fakes.door import a_group, a_plugin
from tests.fakes.grpc_messages import message, refused
from tests.fakes.raw_h2 import a_raw_call, prefixed

ALLOCATE = "/v1beta1.DevicePlugin/Allocate"

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=150)
groups = st.builds(
    SliceGroup,
    uuid=texts.map(GpuUuid),
    ids=st.lists(texts.map(SliceId), max_size=4).map(tuple),
    healthy=st.booleans(),
    numa=st.none() | st.integers(-1, 2**63 - 1),
)
lists = st.builds(
    SliceList, generation=st.integers(), groups=st.lists(groups, max_size=4).map(tuple)
)


@given(lists)
def test_a_list_has_the_bytes_of_the_generated_message_and_of_googles(listed):
    devices = []
    for group in listed.groups:
        numa = -1 if group.numa is None else group.numa
        topology = None if numa < 0 else TopologyInfo([NumaNode(numa)])
        health = "Healthy" if group.healthy else "Unhealthy"
        devices += [Device(text, health, topology) for text in group.ids]

    encoded = encode_list(listed)

    assert bytes(ListAndWatchResponse(devices)) == encoded
    theirs = message("ListAndWatchResponse").FromString(encoded)
    assert theirs.SerializeToString(deterministic=True) == encoded


def test_a_list_is_refused_from_the_first_byte_too_many_even_while_all_is_well():
    ill = a_group(slices=1, healthy=False)
    per_slice = len(encode_list(SliceList(1, (ill,))))
    fitting, rest = divmod(LIST_BYTES, per_slice)
    assert rest < per_slice
    ids = tuple(SliceId(f"{ill.uuid}-{number % 10}") for number in range(fitting))
    assert len(encode_list(SliceList(1, (SliceGroup(ill.uuid, ids, True, 0),)))) < LIST_BYTES

    with pytest.raises(SettingsError) as caught:
        encode_list(SliceList(1, (SliceGroup(ill.uuid, (*ids, ids[0]), True, 0),)))

    size = (fitting + 1) * per_slice
    for part in (f"{fitting + 1} slices make", f"{size} bytes", f"to {fitting} slices"):
        assert part in str(caught.value)


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
    preferred = message("PreferredAllocationRequest")()
    allocate = message("AllocateRequest")()
    for _ in range(2):
        preferred.container_requests.add(
            available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=size
        )
        allocate.container_requests.add(devices_ids=must)
    unknown = b"\x7a\x01x\x78\x07\x79" + b"\0" * 8

    def read(theirs, ours):
        return PluginCodec().decode(theirs.SerializeToString() + unknown, ours)

    requests = read(preferred, PreferredAllocationRequest).container_requests
    assert [(available, must, size)] * 2 == [told(one) for one in requests]
    requests = read(allocate, AllocateRequest).container_requests
    assert [must] * 2 == [list(one.devices_ids) for one in requests]


def test_noise_is_decoded_as_google_decodes_it_or_refused():
    chance = Seeded(7)
    whole = message("PreferredAllocationRequest")()
    whole.container_requests.add(
        available_deviceIDs=["a", "bc"], must_include_deviceIDs=["a"], allocation_size=300
    )
    taken = 0
    for _ in range(2_000):
        noisy = bytearray(whole.SerializeToString())
        for _ in range(chance.randint(1, 2)):
            noisy[chance.randrange(len(noisy))] = chance.randrange(256)
        try:
            ours = PluginCodec().decode(bytes(noisy), PreferredAllocationRequest)
        except (ValueError, EOFError):
            continue
        theirs = message("PreferredAllocationRequest").FromString(bytes(noisy))
        taken += 1
        assert [told(one) for one in theirs.container_requests] == [
            told(one) for one in ours.container_requests
        ]
    assert 100 < taken < 1_900


MALFORMED = {
    "a text that is cut short": b"\x0a\x05\x0a\x09abc",
    "a message that is cut short": b"\x0a\xff\x01\x0a\x03abc",
    "a length that does not end": b"\x0a\xff\xff",
    "a number of eleven bytes": b"\x0a" + b"\xff" * 11,
    "no UTF-8": b"\x0a\x04\x0a\x02\xc3\x28",
    "no container": b"\x08\x01",
    "a container without ids": b"\x0a\x02\x08\x01",
    "a group": b"\x0b\x0c",
    "an unknown kind": b"\x0f",
    "field zero": b"\x02\x00",
    "fixed bytes that are missing": b"\x11\x01\x02",
    "a half number": b"\x15\x01",
}


@pytest.mark.looptime(False)
async def test_a_malformed_message_is_refused_in_a_sentence_and_nobody_is_asked(tmp_path, capsys):
    async with a_plugin(tmp_path) as (door, plugin):
        for name, data in MALFORMED.items():
            code, text = await refused(plugin.raw, "Allocate", data, "AllocateResponse")
            assert ("INVALID_ARGUMENT", True) == (code, "[HA-100" in text), name
        for body in (b"", prefixed(b"abc", claim=9), b"\x00\x00", prefixed(b"", flag=1)):
            async with a_raw_call(door.path) as call:
                await call.request(ALLOCATE, body)
                await call.until_ended()
            assert ("3", True) == (
                call.headers["grpc-status"],
                call.headers["grpc-message"].endswith("[HA-1002]"),
            ), body
        code, _ = await refused(plugin.raw, "Deallocate", b"", "Empty")
        assert "UNIMPLEMENTED" == code

        assert [] == door.allocator.asked
        assert "Traceback" not in capsys.readouterr().out
        answer = await asyncio.to_thread(plugin.allocate, ["b"], ["a"], ["c", "d"])
        assert ["b", "a", "c,d"] == [one.envs["IDS"] for one in answer.container_responses]


@pytest.mark.looptime(False)
async def test_a_request_that_never_comes_is_given_up_after_ten_seconds(tmp_path, monkeypatch):
    assert 10 == door_module.RECEIVE_DEADLINE
    monkeypatch.setattr(door_module, "RECEIVE_DEADLINE", 0.1)
    async with a_plugin(tmp_path) as (door, _), a_raw_call(door.path) as call:
        await call.request(ALLOCATE, prefixed(b"abc", claim=9), end=False)
        await call.until_ended()

    assert ("4", "the request is incomplete") == (
        call.headers["grpc-status"],
        call.headers["grpc-message"],
    )
    assert [] == door.allocator.asked

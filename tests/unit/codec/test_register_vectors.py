"""The register annotation against HAMi v2.10's own encoder and decoder."""

from typing import Any

import pytest

from agent.errors import MalformedText
from agent.hami import gojson
from agent.hami.register import (
    MigProfile,
    Placement,
    RegisteredGpu,
    decode_register,
    encode_register,
)
from agent.model import GpuUuid
from tests.builders import G1
from tests.hami_vectors import Vector, cases, vectors

DECODED_OTHERWISE = {
    "register_decode_json-028": "a scheduler calls null `no gpu found`: an error here too",
    "register_decode_json-029": "a scheduler calls an empty list `no gpu found`: an error too",
    "register_decode_json-181": "input holds a second annotation, tested below",
    "register_decode_json-182": "input holds a second annotation, tested below",
    "register_decode_json-183": "input holds a second annotation, tested below",
    "register_decode_json-184": "input holds a second annotation, tested below",
}
SCORE = "register_encode_json-185"


def gpu_of(device: dict[str, Any]) -> RegisteredGpu:
    """HAMi's DeviceInfo in our words; what the encoder drops is dropped here."""
    return RegisteredGpu(
        uuid=GpuUuid(device.get("id", "")),
        index=device.get("index", 0),
        split_count=device.get("count", 0),
        registered_mib=device.get("devmem", 0),
        core_percent=device.get("devcore", 0),
        type_name=device.get("type", ""),
        numa=device.get("numa", 0),
        mode=device.get("mode", ""),
        mig_profiles=tuple(
            MigProfile(
                name=profile["name"],
                memory_mib=profile["memoryMB"],
                core_percent=profile["core"],
                slice_count=profile["sliceCount"],
                placements=tuple(Placement(**place) for place in profile["placements"]),
            )
            for profile in device.get("migProfiles", ())
        ),
        healthy=device.get("health", False),
    )


@pytest.mark.parametrize(
    "vector", cases("register_encode_json", without={SCORE: "another annotation"}), ids=str
)
def test_the_text_is_byte_for_byte_what_hami_writes(vector: Vector):
    assert vector.expected == encode_register([gpu_of(device) for device in vector.given])


def test_the_score_annotation_follows_the_same_rules_of_json():
    vector = vectors("register_encode_json")[SCORE]
    assert vector.expected == gojson.encode(vector.given)


@pytest.mark.parametrize(
    "vector", cases("register_decode_json", without=DECODED_OTHERWISE), ids=str
)
def test_a_text_is_read_or_refused_as_hami_does(vector: Vector):
    if vector.expected["error"] is None:
        expected = tuple(gpu_of(device) for device in vector.expected["devices"])
        assert expected == decode_register(vector.given)
    else:
        with pytest.raises(MalformedText):
            decode_register(vector.given)


@pytest.mark.parametrize("number", ["023", "024", "025", "027"])
def test_beside_an_error_no_half_read_gpu_is_handed_out(number: str):
    vector = vectors("register_decode_json")[f"register_decode_json-{number}"]
    assert vector.expected["devices"], "HAMi hands out what it read before the error"
    with pytest.raises(MalformedText, match=r"GPU 0, (count|index|devmem)"):
        decode_register(vector.given)


@pytest.mark.parametrize("number", ["028", "029"])
def test_null_and_an_empty_list_are_errors_as_for_a_scheduler(number: str):
    vector = vectors("register_decode_json")[f"register_decode_json-{number}"]
    with pytest.raises(MalformedText, match="names no GPU"):
        decode_register(vector.given)


@pytest.mark.parametrize("number", ["181", "182", "183", "184"])
def test_a_score_annotation_beside_it_changes_nothing(number: str):
    vector = vectors("register_decode_json")[f"register_decode_json-{number}"]
    register = vector.given["register"]
    if register == "[]":
        with pytest.raises(MalformedText, match="names no GPU"):
            decode_register(register)
    else:
        assert (RegisteredGpu(uuid=G1, split_count=1),) == decode_register(register)

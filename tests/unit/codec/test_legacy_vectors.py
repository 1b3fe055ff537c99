"""What HAMi 2.4 to 2.9 wrote is read here; where their code read more or less, it is named."""

import datetime as dt

import pytest

from agent.errors import MalformedText
from agent.hami.annotations import decode_pod_devices, decode_register, decode_register_colon
from agent.model import type_name
from agent.sandbox.scheduler.registry import decode_handshake
from tests.hami_vectors import Vector, vectors
from tests.unit.codec.test_pod import groups_of
from tests.unit.codec.test_register import gpu_of

JSON = "register JSON of two GPUs"
COLON = "register colon text of two GPUs"
SEVEN = "v2.4.0 register text, 7 fields"
TOLERANT = "colon decoder tolerance"
PODS = "pod annotation decode (empty groups, bad numbers)"
NEXT = "next container, old decoder drops empty groups"
SECOND = "second Allocate of a two-container pod"
NO_GPU = "v2.4.x/v2.5.x text for a GPU-less container"
TYPE = "type string by version"
HANDSHAKE = "handshake value written by the plugin"

READ_OTHERWISE = {
    "legacy-209": "a number that is none is refused and not read as 0",
    "legacy-219": "a number that is none is refused and not read as 0",
    "legacy-229": "a number that is none is refused and not read as 0",
    "legacy-210": "a device of three fields is refused, not dropped with all others",
    "legacy-220": "a device of three fields is refused, not dropped with all others",
    "legacy-230": "a device of three fields is refused, not dropped with all others",
}


def named(*names: str) -> list[Vector]:
    return [vector for vector in vectors("legacy").values() if vector.name in names]


def test_every_vector_of_old_versions_has_its_test():
    names = {JSON, COLON, SEVEN, TOLERANT, PODS, NEXT, SECOND, NO_GPU, TYPE, HANDSHAKE}

    assert names == {vector.name for vector in vectors("legacy").values()}
    assert set(READ_OTHERWISE) <= {vector.id for vector in named(PODS)}


@pytest.mark.parametrize("vector", named(JSON), ids=str)
def test_the_register_annotation_of_2_7_to_2_9_is_read(vector: Vector):
    assert tuple(map(gpu_of, vector.given)) == decode_register(vector.expected)


@pytest.mark.parametrize("vector", named(COLON, SEVEN), ids=str)
def test_the_register_annotation_without_json_is_read(vector: Vector):
    given = [{"mode": "hami-core", **device} for device in vector.given]

    assert tuple(map(gpu_of, given)) == decode_register_colon(vector.expected)


@pytest.mark.parametrize(
    "vector", [one for one in named(PODS) if one.id not in READ_OTHERWISE], ids=str
)
def test_the_groups_of_a_pod_are_the_same_but_for_empty_ones_and_placeholders(vector: Vector):
    """Up to 2.8 empty groups were dropped, so that the rest lost its place."""
    theirs = [[one for one in group if one["UUID"]] for group in vector.expected["map"]["NVIDIA"]]

    ours = decode_pod_devices(vector.given)

    assert groups_of([group for group in theirs if group]) == tuple(filter(None, ours))
    assert len(vector.given.split(";")) == len(ours)


@pytest.mark.parametrize(
    "vector",
    [one for one in named(TOLERANT, PODS) if one.name == TOLERANT or one.id in READ_OTHERWISE],
    ids=str,
)
def test_a_text_that_they_guessed_at_is_refused(vector: Vector):
    """A count that is no number, a negative index and a record of one field passed there."""
    decode = decode_register_colon if vector.name == TOLERANT else decode_pod_devices
    assert "" == vector.expected["error"]
    with pytest.raises(MalformedText):
        decode(vector.given)


def test_the_type_is_written_as_2_8_and_later_do():
    """Up to 2.7.1 it was `NVIDIA-NVIDIA …`; schedulers of that age are not served."""
    (vector,) = named(TYPE)
    ours = [type_name(name) for name in vector.given["nvmlNames"]]

    assert vector.expected[">=v2.8.0"] == ours
    assert vector.expected["<=v2.7.1"] != ours


def test_the_handshake_of_an_old_plugin_is_read():
    (vector,) = named(HANDSHAKE)

    word, stamp = decode_handshake(vector.expected)

    assert "Reported" == word
    written = dt.datetime.fromisoformat(vector.given[:26] + "+00:00")
    assert stamp is not None
    assert abs(written - stamp) < dt.timedelta(microseconds=1)

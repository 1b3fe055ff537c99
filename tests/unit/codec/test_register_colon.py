"""The register annotation of schedulers up to 2.7.1, against HAMi v2.10's own decoder."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.codec.register import RegisteredGpu
from agent.codec.register_colon import decode_register_colon
from agent.core.annotations import TEXT_LIMIT
from agent.core.errors import MalformedText
from agent.core.gpu import GpuUuid
from tests.builders import G1
from tests.hami_vectors import Vector, cases, vectors

EMPTY = "register_decode_colon-017"
RECORD = f"{G1},10,1,100,T,0,true,0,hami-core:"


def gpu_of(device: dict) -> RegisteredGpu:
    return RegisteredGpu(
        uuid=GpuUuid(device["id"]),
        index=device.get("index", 0),
        split_count=device["count"],
        registered_mib=device["devmem"],
        core_percent=device["devcore"],
        type_name=device["type"],
        numa=device.get("numa", 0),
        mode=device.get("mode", ""),
        healthy=device.get("health", False),
    )


@pytest.mark.parametrize(
    "vector", cases("register_decode_colon", without={EMPTY: "no GPU is an error here"}), ids=str
)
def test_a_text_is_read_or_refused_as_hami_does(vector: Vector):
    if vector.expected["error"] is None:
        expected = tuple(gpu_of(device) for device in vector.expected["devices"])
        assert expected == decode_register_colon(vector.given)
    else:
        with pytest.raises(MalformedText):
            decode_register_colon(vector.given)


def test_a_text_without_a_record_names_no_gpu():
    with pytest.raises(MalformedText, match="names no GPU"):
        decode_register_colon(vectors("register_decode_colon")[EMPTY].given)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (f"{G1},2147483648,1,100,T,0,true,0,m:", "GPU 1, count is '2147483648'"),
        (f"{G1},10,-2147483649,100,T,0,true,0,m:", "GPU 1, memory is"),
        (f"{G1},10,1,1_0,T,0,true,0,m:", "GPU 1, cores is '1_0'"),
        (f"{G1},10,1,100,T,,true,0,m:", "GPU 1, NUMA node is ''"),
        (f"{G1},10,1,100,T,0,yes,0,m:", "GPU 1, health is 'yes'"),
        (f"{G1},10,1,100,T,0,true,9223372036854775808,m:", "GPU 1, index is"),
        (f"{G1},10,1,100,T,0,true,0,m,x:", "GPU 1: .* has 10 fields; expected 7 or 9"),
    ],
)
def test_a_mistake_is_told_with_its_gpu_and_field(record: str, says: str):
    with pytest.raises(MalformedText, match=says):
        decode_register_colon(RECORD + record)


def test_leading_zeros_and_a_plus_sign_are_read_as_go_reads_them():
    (gpu,) = decode_register_colon(f"{G1},+010,00,100,T,0,F,0000000000000000000000007,:")
    assert (10, 0, 7, False) == (gpu.split_count, gpu.registered_mib, gpu.index, gpu.healthy)


def test_a_text_that_fits_no_annotation_is_refused():
    with pytest.raises(MalformedText, match="over 262144 characters"):
        decode_register_colon(RECORD + ":" * TEXT_LIMIT)


@given(st.text() | st.text(alphabet="0123456789,:-+truefalsGPU ", max_size=80))
def test_any_text_is_read_or_refused_and_nothing_else(text: str):
    try:
        gpus = decode_register_colon(text)
    except MalformedText:
        return
    assert gpus

"""The register annotation of schedulers up to 2.7.1, against HAMi v2.10's own decoder."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.cluster import TEXT_LIMIT
from agent.errors import MalformedText
from agent.hami import gojson
from agent.hami.register import (
    RegisteredGpu,
    decode_register_colon,
    encode_register_colon,
    registered_colon,
    same_meaning_colon,
)
from agent.model import GpuUuid
from tests.builders import G1, G2, a_gpu, a_shared_gpu, an_inventory
from tests.hami_vectors import Vector, cases, vectors
from tests.unit.codec.test_register_vectors import gpu_of

EMPTY = "register_decode_colon-017"
int32 = st.integers(*gojson.INT32)
words = st.text(max_size=20)
gpus = st.builds(
    RegisteredGpu,
    uuid=words.map(GpuUuid),
    index=st.integers(0, gojson.INT64[1]),
    split_count=int32,
    registered_mib=int32,
    core_percent=int32,
    type_name=words,
    numa=st.integers(*gojson.INT64),
    mode=words,
    healthy=st.booleans(),
)
RECORD = f"{G1},10,1,100,T,0,true,0,hami-core:"


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


@pytest.mark.parametrize("vector", cases("register_encode_colon"), ids=str)
def test_the_text_is_byte_for_byte_what_hami_writes(vector: Vector):
    assert vector.expected == encode_register_colon(map(gpu_of, vector.given))


@pytest.mark.parametrize("number", ["203", "213", "223"])
def test_so_did_every_version_of_nine_fields(number: str):
    vector = vectors("legacy")[f"legacy-{number}"]

    assert vector.expected == encode_register_colon(map(gpu_of, vector.given))


@given(st.lists(gpus, min_size=1, max_size=4))
def test_what_is_written_is_read_back_but_for_separators_in_words(found: list[RegisteredGpu]):
    def cleaned(gpu: RegisteredGpu) -> RegisteredGpu:
        uuid, name, mode = (
            word.replace(",", " ").replace(":", " ") for word in (gpu.uuid, gpu.type_name, gpu.mode)
        )
        return msgspec.structs.replace(gpu, uuid=GpuUuid(uuid), type_name=name, mode=mode)

    text = encode_register_colon(found)

    assert tuple(map(cleaned, found)) == decode_register_colon(text)
    assert same_meaning_colon(text, encode_register_colon(reversed(found)))


def test_a_comma_or_colon_in_a_name_does_not_spoil_the_other_gpus():
    (odd, plain) = decode_register_colon(
        encode_register_colon([RegisteredGpu(G1, type_name="A:B,C"), RegisteredGpu(G2)])
    )

    assert ("A B C", G2) == (odd.type_name, plain.uuid)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("NVIDIA H20-3e", "NVIDIA-NVIDIA H20-3e"), ("Tesla P4", "NVIDIA-Tesla P4")],
)
def test_every_name_has_the_prefix_that_these_versions_wrote(name: str, expected: str):
    inventory = an_inventory(gpus=[a_shared_gpu(gpu=a_gpu(name=name))])

    assert [expected] == [gpu.type_name for gpu in registered_colon(inventory)]


SHORTER = f"{G1},10,1,100,T,0,true:"
OTHER = f"{G2},10,1,100,T,0,true,1,hami-core:"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (None, None, True),
        (RECORD, None, False),
        (None, RECORD, False),
        (RECORD + OTHER, OTHER + ":" + RECORD, True),
        (RECORD, RECORD.replace("true", "T"), True),
        (RECORD, RECORD.replace("true", "false"), False),
        (RECORD, RECORD + RECORD, False),
        (RECORD, SHORTER, False),
        (RECORD, '[{"id":"a"}]', False),
        ("broken", "broken", True),
    ],
)
def test_texts_are_the_same_when_every_such_scheduler_reads_the_same(one, other, same):
    assert same is same_meaning_colon(one, other)

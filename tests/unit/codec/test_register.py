"""The register annotation: what is registered, what is equal, what is refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.cluster import TEXT_LIMIT
from agent.errors import MalformedText
from agent.hami import gojson
from agent.hami.register import (
    MigProfile,
    Placement,
    RegisteredGpu,
    decode_register,
    encode_register,
    registered,
    same_meaning,
)
from agent.model import Condition, GpuUuid
from tests.builders import G1, G2, a_gpu, a_health, a_shared_gpu, an_inventory

int32 = st.integers(*gojson.INT32)
uint32 = st.integers(*gojson.UINT32)
words = st.text(max_size=20)
placements = st.builds(Placement, start=uint32, size=uint32)
profiles = st.builds(
    MigProfile,
    name=words,
    memory_mib=int32,
    core_percent=int32,
    slice_count=uint32,
    placements=st.lists(placements, max_size=3).map(tuple),
)
gpus = st.builds(
    RegisteredGpu,
    uuid=words.map(GpuUuid),
    index=st.integers(*gojson.UINT64),
    split_count=int32,
    registered_mib=int32,
    core_percent=int32,
    type_name=words,
    numa=st.integers(*gojson.INT64),
    mode=words,
    mig_profiles=st.lists(profiles, max_size=2).map(tuple),
    healthy=st.booleans(),
)


@given(st.lists(gpus, min_size=1, max_size=4).map(tuple))
def test_decoding_what_was_encoded_gives_the_same_gpus(several: tuple[RegisteredGpu, ...]):
    assert several == decode_register(encode_register(several))


keys = st.sampled_from(["id", "Count", "numa", "migProfiles", "placements", "health", "new"])
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
structures = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)
)


@given(st.text() | structures.map(json.dumps) | st.lists(structures).map(json.dumps))
def test_any_text_is_read_or_refused_and_nothing_else(text: str):
    try:
        found = decode_register(text)
    except MalformedText:
        return
    assert found == decode_register(encode_register(found))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[" + "9" * 5_000 + "]",
        "[NaN]",
        "\ufeff[{}]",
        "[null]",
        '["GPU-1"]',
        '[{"health":1}]',
        '[{"id":1}]',
        '[{"id":[[]]}]',
        '[{"count":true}]',
        '[{"count":{}}]',
        '[{"migProfiles":{}}]',
        '[{"migProfiles":[{"placements":[{"start":-1}]}]}]',
        " " * (TEXT_LIMIT + 1),
    ],
    ids=lambda text: text[:30],
)
def test_a_text_that_no_scheduler_could_use_is_refused(text: str):
    with pytest.raises(MalformedText, match=r"^register annotation"):
        decode_register(text)


def test_a_refusal_says_which_gpu_and_which_field():
    text = '[{"id":"a"},{"migProfiles":[{"placements":[{"size":"x"}]}]}]'
    with pytest.raises(
        MalformedText, match=r"GPU 1, migprofiles\[0\], placements\[0\], size is 'x'"
    ):
        decode_register(text)


def test_keys_of_later_versions_and_null_fields_are_ignored():
    text = '[{"id":"a","count":3,"custominfo":{"deep":[1,{}]},"COUNT":null,"newKey":7}]'
    assert (RegisteredGpu(uuid=GpuUuid("a"), split_count=3),) == decode_register(text)


def test_the_last_of_two_equal_keys_wins():
    assert 2 == decode_register('[{"Count":1,"count":2}]')[0].split_count


def test_half_a_character_becomes_the_replacement_character_both_ways():
    assert "\ufffd" == decode_register('[{"id":"\\ud800"}]')[0].uuid
    assert '[{"id":"\ufffd"}]' == encode_register([RegisteredGpu(uuid=GpuUuid("\udc80"))])


def test_line_separators_are_escaped_as_go_does():
    text = encode_register([RegisteredGpu(type_name="a\u2028b\u2029c\td")])
    assert r'[{"type":"a\u2028b\u2029c\td"}]' == text


def test_a_healthy_gpu_is_registered_with_all_its_facts():
    shared = a_shared_gpu(gpu=a_gpu(uuid=G1, index=1, numa=1), registered_mib=122338, mode="mps")
    expected = RegisteredGpu(
        uuid=G1,
        index=1,
        split_count=10,
        registered_mib=122338,
        core_percent=100,
        type_name="NVIDIA H100 80GB HBM3",
        numa=1,
        mode="mps",
        healthy=True,
    )
    assert (expected,) == registered(an_inventory(gpus=[shared]))


def test_a_gpu_that_was_never_described_is_left_out():
    unknown = a_shared_gpu(gpu=a_gpu(index=1, name="", memory_mib=None), present=False)

    assert () == registered(an_inventory(gpus=(unknown,)))


def test_gpus_are_registered_by_index_and_an_unknown_numa_node_is_zero():
    second = a_shared_gpu(gpu=a_gpu(uuid=G1, index=3, numa=None))
    first = a_shared_gpu(gpu=a_gpu(uuid=G2, index=2))
    found = registered(an_inventory(gpus=[second, first]))
    assert [(2, G2, 0), (3, G1, 0)] == [(gpu.index, gpu.uuid, gpu.numa) for gpu in found]


@pytest.mark.parametrize(
    "shared",
    [a_shared_gpu(health=a_health(condition=Condition.BAD)), a_shared_gpu(present=False)],
    ids=["bad", "vanished"],
)
def test_a_gpu_that_serves_nobody_stays_in_the_text_without_health(shared):
    text = encode_register(registered(an_inventory(gpus=[shared])))
    assert shared.uuid in text
    assert "health" not in text


ONE = '[{"id":"a","count":1},{"id":"b","index":1}]'


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (None, None, True),
        (ONE, ONE, True),
        (ONE, None, False),
        (None, ONE, False),
        (ONE, '[ {"index":1,"id":"b","devicepairscore":{}}, {"count":1,"id":"a"} ]', True),
        (ONE, '[{"id":"a","count":1},{"id":"b","index":1},{"id":"b","index":1}]', False),
        (ONE, '[{"id":"a","count":1,"health":true},{"id":"b","index":1}]', False),
        ("broken", "broken", True),
        (ONE, "broken", False),
        (ONE, "[]", False),
    ],
)
def test_texts_are_the_same_when_a_scheduler_reads_the_same(one, other, same):
    assert same is same_meaning(one, other)


SINGLE = '[{"id":"a","count":1}]'


@pytest.mark.parametrize(
    "field",
    [
        '"custominfo":[]',
        '"CustomInfo":"x"',
        '"custominfo":{"a":{"b":[1e999]}}',
        '"migtemplate":{}',
        '"migtemplate":[{}]',
        '"migtemplate":[[{"core":"1"}]]',
        '"migtemplate":[[{"memory":2147483648}]]',
        '"devicevendor":1',
        '"DEVICEVENDOR":["NVIDIA"]',
        '"devicepairscore":[]',
        '"devicepairscore":{"uuid":1}',
        '"devicepairscore":{"score":{"a":1.5}}',
        '"devicepairScore":{"score":{"a":1,"a":"x","b":2}}',
        '"count":"x","count":1',
        '"Count":1.0,"count":1',
        '"migProfile\u017f":{}',
        '"migProfiles":[{}],"migProfiles":[]',
    ],
)
def test_a_text_that_hamis_decoder_refuses_is_not_the_same(field: str):
    assert not same_meaning(SINGLE, SINGLE.replace('"id"', f'{field},"id"'))


@pytest.mark.parametrize(
    "field",
    [
        '"custominfo":null',
        '"custominfo":{"a":null,"b":[1e308,true,{}]}',
        '"migtemplate":[null,[],[null,{"NAME":"a","core":1,"unknown":[]}]]',
        '"devicevendor":"x"',
        '"devicepairscore":{"UUID":"a","score":{"A":1,"a":null}}',
        '"migProfiles":null',
        '"id":"b","id":null',
        '"COUNT":7',
        '"unknown":{"count":"x"}',
    ],
)
def test_a_text_that_hamis_decoder_takes_says_what_it_says_without_the_unread(field: str):
    assert same_meaning(SINGLE, SINGLE.replace('"id"', f'{field},"id"'))


def test_a_null_profile_is_one_without_any_field():
    (gpu,) = decode_register('[{"migProfiles":[null,{"placements":[null]}]}]')
    assert (MigProfile(), MigProfile(placements=(Placement(),))) == gpu.mig_profiles

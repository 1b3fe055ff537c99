"""The annotations of the Node's GPUs: against HAMi's own code, what is equal, what is refused."""

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest

from agent.cluster import TEXT_LIMIT
from agent.errors import MalformedText
from agent.hami.annotations import (
    NodeReport,
    RegisteredGpu,
    ReportProfile,
    ReportSettings,
    decode_register,
    decode_register_colon,
    encode_json,
    encode_register_colon,
    encode_reported,
    encode_scores,
    read_register,
    report_of,
)
from agent.model import Condition, GpuUuid, Inventory
from agent.sandbox.scheduler.registry import decode_handshake, read_offer
from tests.builders import G1, G2, a_gpu, a_health, a_shared_gpu, an_inventory
from tests.hami_vectors import Vector, cases, vectors


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
        healthy=device.get("health", False),
    )


JSON = "register_decode_json"
COLON = "register_decode_colon"
SCORE = "register_encode_json-185"
NOT_WRITTEN = {SCORE: "another annotation", "register_encode_json-005": "has MIG profiles"}
DECODED_OTHERWISE = {
    f"{JSON}-022": "has keys in another case, which HAMi takes and nobody writes",
    **{f"{JSON}-{number}": "holds a second annotation, tested below" for number in range(181, 185)},
}


@pytest.mark.parametrize("vector", cases("register_encode_json", without=NOT_WRITTEN), ids=str)
def test_the_text_is_byte_for_byte_what_hami_writes(vector: Vector):
    assert vector.expected == encode_json([gpu_of(device) for device in vector.given])


@pytest.mark.parametrize(
    "vector",
    [
        *cases("register_encode_colon"),
        *(vectors("legacy")[f"legacy-{number}"] for number in ("203", "213", "223")),
    ],
    ids=str,
)
def test_the_text_of_records_is_byte_for_byte_what_every_version_of_nine_fields_wrote(vector):
    assert vector.expected == encode_register_colon(map(gpu_of, vector.given))


@pytest.mark.parametrize("group", [JSON, COLON])
def test_a_text_is_read_or_refused_as_hami_does(group: str):
    read = decode_register if group == JSON else decode_register_colon
    without = {name: why for name, why in DECODED_OTHERWISE.items() if name.startswith(group)}
    for vector in cases(group, without=without):
        # A text that names no GPU is an error here, as it is for a scheduler.
        if vector.expected["error"] is None and vector.expected["devices"]:
            expected = tuple(gpu_of(device) for device in vector.expected["devices"])
            assert expected == read(vector.given), vector
        else:
            with pytest.raises(MalformedText):
                read(vector.given)


RECORD = f"{G1},10,1,100,T,0,true,0,hami-core:"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, ""),
        ("[" + "9" * 5_000 + "]", ""),
        ("[NaN]", ""),
        ("\ufeff[{}]", ""),
        ("[null]", ""),
        ("null", ""),
        ("[]", "names no GPU"),
        ('["GPU-1"]', ""),
        ('[{"health":1}]', ""),
        ('[{"id":[[]]}]', ""),
        ('[{"count":true}]', ""),
        ('[{"numa":1.5}]', ""),
        ('[{"count":"\\ud800"}]', ""),
        ("7", ""),
        ("", ""),
        (" " * (TEXT_LIMIT + 1), "is over 262144 characters"),
        ('[{"id":"a"},{"count":"x"}]', r"Expected `int`, got `str` - at `\$\[1\].count`"),
    ],
    ids=lambda text: text[:30],
)
def test_a_text_that_no_scheduler_could_use_is_refused(text: str, says: str):
    with pytest.raises(MalformedText, match=rf"^register annotation.*{says}"):
        decode_register(text)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (f"{G1},2147483648,1,100,T,0,true,0,m:", "GPU 1, count is '2147483648'"),
        (f"{G1},10,-2147483649,100,T,0,true,0,m:", "GPU 1, memory is"),
        (f"{G1},10,1,1_0,T,0,true,0,m:", "GPU 1, cores is '1_0'"),
        (f"{G1},10,1,100,T,,true,0,m:", "GPU 1, NUMA node is ''"),
        (f"{G1},\u0663,1,100,T,0,true,0,m:", "GPU 1, count is '\u0663'"),
        (f"{G1},10,1 ,100,T,0,true,0,m:", "GPU 1, memory is '1'"),
        ("\ud800:", "GPU 1: .* has 1 fields"),
        (f"{G1},10,1,100,T,0,yes,0,m:", "GPU 1, health is 'yes'"),
        (f"{G1},10,1,100,T,0,true,9223372036854775808,m:", "GPU 1, index is"),
        (f"{G1},10,1,100,T,0,true,0,m,x:", "GPU 1: .* has 10 fields; expected 7 or 9"),
        (":" * TEXT_LIMIT, "over 262144 characters"),
    ],
    ids=lambda text: text[-30:],
)
def test_a_mistake_in_a_record_is_told_with_its_gpu_and_field(record: str, says: str):
    with pytest.raises(MalformedText, match=says):
        decode_register_colon(RECORD + record)


def test_odd_texts_are_read_as_go_reads_them():
    text = '[{"id":"a","count":3,"custominfo":{"deep":[1,{}]},"newKey":7}]'
    assert (RegisteredGpu(uuid=GpuUuid("a"), split_count=3),) == decode_register(text)
    (gpu,) = decode_register_colon(f"{G1},+010,00,100,T,0,F,0000000000000000000000007,:")
    assert (10, 0, 7, False) == (gpu.split_count, gpu.registered_mib, gpu.index, gpu.healthy)


def test_odd_words_are_written_as_go_writes_them_and_spoil_no_other_gpu():
    text = encode_json([RegisteredGpu(type_name="a\u2028b\u2029c\td")])
    assert r'[{"type":"a\u2028b\u2029c\td"}]' == text
    odd, plain = decode_register_colon(
        encode_register_colon([RegisteredGpu(G1, type_name="A:B,C"), RegisteredGpu(G2)])
    )
    assert ("A B C", G2) == (odd.type_name, plain.uuid)


# The score annotation.


def test_scores_are_written_and_read_as_by_hami():
    vector = vectors("register_encode_json")[SCORE]
    given = {GpuUuid(one["uuid"]): one["score"] for one in vector.given}
    assert vector.expected == encode_scores(given)


# What HAMi's own decoders of five versions read from the agent's register annotation.
#
# The golden file was made by running those decoders on the texts; the scheduler's model must read
# the same, and the agent must go on writing those very texts.

GOLDEN = Path(__file__).parents[2] / "golden" / "register-annotation.json"
READ: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8"))["read"]
TEXTS: dict[str, str] = json.loads(GOLDEN.read_text(encoding="utf-8"))["texts"]
VERSIONS = ("2.7.1", "2.8", "2.9", "2.10")


def all_sorts() -> Inventory:
    """Another NUMA node, oversold memory, an old name, an ill GPU and an odd name."""
    oversold = a_gpu(index=1, numa=1)
    old = a_gpu(index=2, name="Tesla P4", memory_mib=7680)
    odd = a_gpu(index=3, name='NVIDIA A<B>&C "é"', memory_mib=16384)
    return an_inventory(
        gpus=[
            a_shared_gpu(gpu=a_gpu(index=0, numa=None)),
            a_shared_gpu(gpu=oversold, registered_mib=122338, core_percent=114, split_count=7),
            a_shared_gpu(gpu=old, health=a_health(condition=Condition.BAD)),
            a_shared_gpu(gpu=odd, mode="mps"),
            a_shared_gpu(gpu=a_gpu(index=4), present=False),
        ]
    )


def the_report(profile: ReportProfile) -> NodeReport:
    report = report_of(all_sorts(), {}, ReportSettings(profile))
    assert report is not None
    return report


def golden(version: str, profile: str) -> tuple[RegisteredGpu, ...] | None:
    read = READ[version][profile]
    return tuple(map(gpu_of, read["gpus"])) if "gpus" in read else None


@pytest.mark.parametrize("profile", ReportProfile)
def test_the_agent_writes_the_text_that_was_read(profile: ReportProfile):
    assert TEXTS[profile] == the_report(profile).register


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("text", TEXTS)
def test_each_version_reads_its_own_form_whole_and_the_model_reads_what_it_reads(version, text):
    read = golden(version, text)
    forms = {"2.7.1": {"colon", "colon-7"}}.get(version, {"json"})
    assert (read is not None) is (text in forms)
    if read and text in set(ReportProfile):
        assert read == read_register(the_report(ReportProfile(text)).register)
        assert all("nvidia" in gpu.type_name.lower() for gpu in read)
    if version == "2.10":
        offer = read_offer({"hami.io/node-nvidia-register": TEXTS[text]})
        assert read == (offer and tuple(view.capacity for view in offer.gpus))


# The handshake: which word it says, and when it was written, as HAMi's scheduler takes it.

MOMENT = dt.datetime(2026, 8, 21, 10, 0, 0)  # noqa: DTZ001 -- the scheduler names no zone
EAST = dt.timezone(dt.timedelta(hours=8))
NANOS = dt.datetime(2026, 8, 21, 18, 0, 0, 123456, tzinfo=EAST)


@pytest.mark.parametrize(
    "vector",
    cases("handshake_check", without={"handshake_check-145": "an absent annotation"}),
    ids=str,
)
def test_the_scheduler_reads_again_whatever_is_no_request_of_its_own(vector: Vector):
    word, _ = decode_handshake(vector.given["handshake"])
    assert vector.expected["needUpdate"] is (word != "Requesting")


@pytest.mark.parametrize(
    ("text", "word", "stamp"),
    [
        ("Requesting_2026-08-21 10:00:00", "Requesting", MOMENT),
        ("Requesting_2026.08.21 10:00:00", "Requesting", MOMENT),
        ("Deleted_2026-08-21 10:00:00", "Deleted", MOMENT),
        ("Reported 2026-08-21 18:00:00.123456789 +0800 CST m=+12.3", "Reported", NANOS),
        ("Reported anything", "Reported", None),
        ("Requesting_2026-13-21 10:00:00", "Requesting", None),
    ],
)
def test_each_writers_form_is_read(text: str, word: str, stamp: dt.datetime | None):
    assert (word, stamp) == decode_handshake(text)
    with pytest.raises(MalformedText, match="none of Reported, Requesting, Deleted"):
        decode_handshake(f" {text}")


def test_our_stamp_has_the_form_of_the_old_plugin():
    east = NANOS.replace(microsecond=42)
    assert "Reported 2026-08-21 10:00:00.000042 +0000 UTC" == encode_reported(east)
    assert ("Reported", east) == decode_handshake(encode_reported(east))

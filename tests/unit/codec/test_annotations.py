"""The annotations of GPUs, pods and locks: as HAMi's own code reads them, and what is stricter."""

import ast
import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest

from agent.cluster import MUTEX_LOCK, TEXT_LIMIT, NodeView
from agent.errors import MalformedText
from agent.hami.annotations import (
    GROUP_LIMIT,
    LENGTH_LIMIT,
    NodeReport,
    RegisteredGpu,
    ReportProfile,
    ReportSettings,
    consume,
    decode_node_lock,
    decode_pod_devices,
    decode_register,
    decode_register_colon,
    decode_stamp,
    encode_json,
    encode_register_colon,
    encode_reported,
    encode_scores,
    held_lock,
    read_register,
    report_of,
)
from agent.model import Condition, GpuUuid, Share
from agent.sandbox.scheduler.registry import decode_handshake, read_offer
from agent.sandbox.scheduler.verbs import encode_node_lock, encode_pod_devices
from tests.builders import G1, G2, NODE, a_gpu, a_health, a_lock, a_shared_gpu, an_inventory
from tests.hami_vectors import Vector, cases, vectors
from tests.unit.rows import rows_of

RECORD = f"{G1},10,1,100,T,0,true,0,hami-core:"


def read_text(kind: str, text: str) -> str:
    """What is read, in the words of the table."""
    match kind:
        case "json" | "colon":
            is_json = kind == "json"
            gpus = decode_register(text) if is_json else decode_register_colon(RECORD + text)
            words = (
                f"{one.uuid} {one.split_count}"
                + f" {one.index} ill" * (not one.healthy and not is_json)
                for one in gpus
            )
            return ", ".join(words)
        case "devices":
            return str(decode_pod_devices(text))
        case "served":
            found = (decode_pod_devices(f";{text};", is_served=one)[1] for one in (False, True))
            (count,) = set(map(len, found))
            return str(count)
        case "stamp":
            zone, moment = dt.timezone(dt.timedelta(hours=8)), decode_stamp(text)
            utc = moment.astimezone(dt.UTC).isoformat()
            assert f"{utc[:19]}Z,a,b" == encode_node_lock(moment.astimezone(zone), "a", "b")
            return utc
        case _:
            word, stamp = decode_handshake(text)
            return f"{word} {stamp and stamp.isoformat()}"


@pytest.mark.parametrize(("words", "expected"), rows_of(__file__, "texts.txt"))
def test_a_text_is_read_or_refused_as_the_table_says(words: str, expected: str):
    kind, _, text = words.replace("{G1}", G1).partition(" ")
    text = ast.literal_eval(text) if text.startswith("'") else text
    if not expected.startswith("! "):
        assert expected.replace("{G1}", G1) == read_text(kind, text)
        return
    with pytest.raises(MalformedText) as caught:
        read_text(kind, text)
    assert ast.literal_eval(f'"{expected[2:]}"') in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("json", "[" * 100_000, "register annotation"),
        ("json", f"[{'9' * 5_000}]", "register annotation"),
        ("json", " " * (TEXT_LIMIT + 1), "is over 262144 characters"),
        ("colon", ":" * TEXT_LIMIT, "over 262144 characters"),
        ("devices", f";G,NVIDIA,1{'0' * 5_000},5:;", "group 1: memory is '1000"),
        ("devices", ";" * (GROUP_LIMIT + 1), "257 characters and 257 groups"),
        ("devices", ":" * (LENGTH_LIMIT + 1), "65537 characters and 0 groups"),
    ],
    ids=lambda text: text[:20],
)
def test_a_text_that_nobody_needs_is_refused_unread(kind: str, text: str, says: str):
    with pytest.raises(MalformedText, match=says):
        read_text(kind, text)


def test_the_longest_text_of_a_pod_is_read():
    assert GROUP_LIMIT + 1 == len(decode_pod_devices(";" * GROUP_LIMIT))
    assert 1 == len(decode_pod_devices(":" * LENGTH_LIMIT))


# The register annotation.


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


def test_odd_words_are_written_as_go_writes_them_and_spoil_no_other_gpu():
    text = encode_json([RegisteredGpu(type_name="a\u2028b\u2029c\td")])
    assert r'[{"type":"a\u2028b\u2029c\td"}]' == text
    odd, plain = decode_register_colon(
        encode_register_colon([RegisteredGpu(G1, type_name="A:B,C"), RegisteredGpu(G2)])
    )
    assert ("A B C", G2) == (odd.type_name, plain.uuid)


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


def the_report(profile: ReportProfile) -> NodeReport:
    """Another NUMA node, oversold memory, an old name, an ill GPU and an odd name."""
    oversold = a_gpu(index=1, numa=1)
    old = a_gpu(index=2, name="Tesla P4", memory_mib=7680)
    odd = a_gpu(index=3, name='NVIDIA A<B>&C "é"', memory_mib=16384)
    gpus = [
        a_shared_gpu(gpu=a_gpu(index=0, numa=None)),
        a_shared_gpu(gpu=oversold, registered_mib=122338, core_percent=114, split_count=7),
        a_shared_gpu(gpu=old, health=a_health(condition=Condition.BAD)),
        a_shared_gpu(gpu=odd, mode="mps"),
        a_shared_gpu(gpu=a_gpu(index=4), present=False),
    ]
    report = report_of(an_inventory(gpus=gpus), {}, ReportSettings(profile))
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


@pytest.mark.parametrize(
    "vector",
    cases("handshake_check", without={"handshake_check-145": "an absent annotation"}),
    ids=str,
)
def test_the_scheduler_reads_again_whatever_is_no_request_of_its_own(vector: Vector):
    word, _ = decode_handshake(vector.given["handshake"])
    assert vector.expected["needUpdate"] is (word != "Requesting")


def test_our_stamp_has_the_form_of_the_old_plugin():
    east = dt.datetime(2026, 8, 21, 18, 0, 0, 42, tzinfo=dt.timezone(dt.timedelta(hours=8)))
    assert "Reported 2026-08-21 10:00:00.000042 +0000 UTC" == encode_reported(east)
    assert ("Reported", east) == decode_handshake(encode_reported(east))


# A pod's devices text.

PLACEHOLDER = "pod_decode-044"
KEY_ABSENT = "pod_decode-056"


def groups_of(containers: list[list[dict[str, Any]]]) -> tuple[tuple[Share, ...], ...]:
    """HAMi's PodSingleDevice in our words."""
    return tuple(
        tuple(Share(device["UUID"], device["Usedmem"], device["Usedcores"]) for device in group)
        for group in containers
    )


@pytest.mark.parametrize(
    "vector",
    cases("pod_decode", without={PLACEHOLDER: "tested below", KEY_ABSENT: "in test_objects"}),
    ids=str,
)
def test_a_pods_text_is_read_or_refused_as_hami_does(vector: Vector):
    if vector.expected["error"] is None:
        assert groups_of(vector.expected["containers"]) == decode_pod_devices(vector.given)
    else:
        with pytest.raises(MalformedText):
            decode_pod_devices(vector.given)


@pytest.mark.parametrize("vector", cases("pod_encode"), ids=str)
def test_a_pods_text_is_byte_for_byte_what_hami_writes(vector: Vector):
    assert vector.expected == encode_pod_devices(groups_of(vector.given or []))


def test_consuming_twice_or_beyond_the_end_changes_nothing():
    once = consume(f"{G1},NVIDIA,1,2:;junk;", {0})
    assert ";junk;" == once == consume(once, {0, 9})


# The node lock.


@pytest.mark.parametrize("vector", cases("node_lock_parse"), ids=str)
def test_a_lock_is_read_or_refused_as_hami_does(vector: Vector):
    if vector.expected["error"] is not None:
        with pytest.raises(MalformedText):
            decode_node_lock(vector.given)
        return
    lock = decode_node_lock(vector.given)
    assert dt.datetime.fromisoformat(vector.expected["time"]) == lock.stamp
    assert (vector.expected["namespace"], vector.expected["name"]) == (lock.namespace, lock.name)
    assert vector.given == lock.value


@pytest.mark.parametrize("text", [None, "a,b,c", a_lock().value])
def test_a_node_holds_the_lock_that_its_annotation_says_if_it_can_be_read(text: str | None):
    node = NodeView(NODE, "uid-1", "1", {} if text is None else {MUTEX_LOCK: text})
    assert (a_lock() if text == a_lock().value else None) == held_lock(node)
    assert held_lock(None) is None

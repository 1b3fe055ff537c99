"""The kubelet's checkpoint file by itself: bytes, checksum, corruption, atomic writes."""

import base64
import errno
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.sandbox.kubelet import checkpoint
from agent.sandbox.kubelet.checkpoint import Checkpoint, CheckpointEntry, CheckpointError
from tests.fakes.chance import Seeded

WHOLE = Checkpoint(
    entries=(
        CheckpointEntry(
            "2b1c3f5e-0001-4a6b-9c7d-000000000001",
            "train",
            "nvidia.com/gpu",
            {-1: ("GPU-a-0",), 0: ("GPU-b-3", "GPU-b-1"), 10: ("GPU-c-9",), 2: ("GPU-d-2",)},
            bytes([10, 3, 0, 255, 7]),
        ),
        CheckpointEntry("2b1c3f5e-0001-4a6b-9c7d-000000000002", "größe", "example.com/x", {}, b""),
    ),
    registered={
        "nvidia.com/gpu": ("GPU-b-3", "GPU-a-0"),
        "example.com/x": (),
        "b.example/é": ("<&>",),
    },
)

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
entries = st.builds(
    CheckpointEntry,
    pod_uid=names,
    container=names,
    resource=names,
    numa=st.dictionaries(st.integers(-1, 12), st.lists(names, max_size=3).map(tuple), max_size=3),
    response=st.binary(max_size=12),
)
contents = st.builds(
    Checkpoint,
    entries=st.lists(entries, max_size=3).map(tuple),
    registered=st.dictionaries(names, st.lists(names, max_size=3).map(tuple), max_size=3),
)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (WHOLE, 1698485784),
        (Checkpoint((), {"nvidia.com/gpu": ("GPU-a-0",)}), 570081339),
        (Checkpoint((), {}), 3467439661),
    ],
)
def test_the_checksum_is_the_one_that_go_computes(content, expected):
    assert expected == checkpoint.checksum(content)


def test_the_bytes_are_those_of_gos_encoder():
    content = Checkpoint(
        (CheckpointEntry("u", "c", "r", {10: ("b",), 2: ("a<b>&",), -1: ("é",)}, b"\x01"),),
        {"z": (), "a": ()},
    )

    assert (
        '{"Data":{"PodDeviceEntries":[{"PodUID":"u","ContainerName":"c","ResourceName":"r",'
        '"DeviceIDs":{"-1":["é"],"10":["b"],"2":["a\\u003cb\\u003e\\u0026"]},"AllocResp":"AQ=="}],'
        f'"RegisteredDevices":{{"a":[],"z":[]}}}},"Checksum":{checkpoint.checksum(content)}}}'
    ).encode() == checkpoint.encode(content)


def test_entries_are_null_when_there_are_none():
    assert b'{"Data":{"PodDeviceEntries":null,' in checkpoint.encode(Checkpoint((), {}))


@given(contents)
def test_what_was_encoded_is_decoded(content):
    assert content == checkpoint.decode(checkpoint.encode(content))


@given(contents, st.data())
def test_another_checksum_is_refused(content, data):
    document = json.loads(checkpoint.encode(content))
    document["Checksum"] ^= data.draw(st.integers(1, 2**32 - 1))

    with pytest.raises(CheckpointError, match="corrupted"):
        checkpoint.decode(json.dumps(document).encode())


@given(st.data())
def test_any_changed_field_is_refused(data):
    entry = data.draw(st.sampled_from(range(2)))
    key = data.draw(st.sampled_from(["PodUID", "ContainerName", "ResourceName", "AllocResp"]))
    document = json.loads(checkpoint.encode(WHOLE))
    fields = document["Data"]["PodDeviceEntries"][entry]
    changed = base64.b64encode(b"more").decode() if key == "AllocResp" else fields[key] + "x"
    fields[key] = changed

    with pytest.raises(CheckpointError, match="corrupted"):
        checkpoint.decode(json.dumps(document).encode())


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["RegisteredDevices"].pop("example.com/x"),
        lambda data: data["RegisteredDevices"]["nvidia.com/gpu"].reverse(),
        lambda data: data["PodDeviceEntries"].reverse(),
        lambda data: data["PodDeviceEntries"][0]["DeviceIDs"].update({"3": []}),
        lambda data: data["PodDeviceEntries"][0]["DeviceIDs"]["0"].reverse(),
        lambda data: data.update(PodDeviceEntries=None),
    ],
)
def test_a_changed_list_or_map_is_refused(change):
    document = json.loads(checkpoint.encode(WHOLE))
    change(document["Data"])

    with pytest.raises(CheckpointError, match="corrupted"):
        checkpoint.decode(json.dumps(document).encode())


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b'{"Data":{}}', b"\xff\xfe", b'"x"'])
def test_bytes_of_another_shape_are_refused(raw):
    with pytest.raises(CheckpointError, match="not readable"):
        checkpoint.decode(raw)


def test_a_missing_file_is_an_empty_state(tmp_path):
    assert Checkpoint() == checkpoint.load(tmp_path)


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path, monkeypatch):
    checkpoint.replace(tmp_path, WHOLE, Seeded())

    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr("agent.sandbox.kubelet.checkpoint.os.fsync", full)
    with pytest.raises(OSError, match="no space left"):
        checkpoint.replace(tmp_path, Checkpoint((), {}), Seeded(1))

    assert WHOLE == checkpoint.load(tmp_path)
    assert [checkpoint.FILE_NAME] == [path.name for path in tmp_path.iterdir()]


def test_the_file_is_private(tmp_path):
    checkpoint.replace(tmp_path, WHOLE, Seeded())

    assert 0o600 == (tmp_path / checkpoint.FILE_NAME).stat().st_mode & 0o777

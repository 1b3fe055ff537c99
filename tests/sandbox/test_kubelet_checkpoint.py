"""The kubelet's checkpoint file by itself: bytes, checksum, corruption, atomic writes."""

import asyncio
import errno
import json

import pytest
from grpclib.client import Channel
from hypothesis import given
from hypothesis import strategies as st

from agent.sandbox.kubelet import checkpoint
from agent.sandbox.kubelet.checkpoint import Checkpoint, CheckpointEntry, CheckpointError
from agent.sandbox.kubelet.model import KubeletModel
from tests.fakes.chance import Seeded
from tests.fakes.clock import ManualClock
from tests.fakes.kubelet_rig import a_pod_object, a_rig, a_rig_with_plugin
from tests.fakes.plugin import RESOURCE

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


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["PodDeviceEntries"][0].update(PodUID="x"),
        lambda data: data["PodDeviceEntries"][1].update(ContainerName="x"),
        lambda data: data["PodDeviceEntries"][1].update(ResourceName="x"),
        lambda data: data["PodDeviceEntries"][0].update(AllocResp="bW9yZQ=="),
        lambda data: data["RegisteredDevices"].pop("example.com/x"),
        lambda data: data["RegisteredDevices"]["nvidia.com/gpu"].reverse(),
        lambda data: data["PodDeviceEntries"].reverse(),
        lambda data: data["PodDeviceEntries"][0]["DeviceIDs"].update({"3": []}),
        lambda data: data["PodDeviceEntries"][0]["DeviceIDs"]["0"].reverse(),
        lambda data: data.update(PodDeviceEntries=None),
    ],
)
def test_a_changed_field_list_or_map_is_refused(change):
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


# What the kubelet makes of an empty checkpoint. Of others: tests/peers/test_kubelet_allocation.py.


async def test_a_file_without_a_byte_is_an_empty_state(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        await rig.admit(a_pod_object())
        await rig.kubelet.stop()
        (rig.plugins / checkpoint.FILE_NAME).write_bytes(b"")

        await rig.kubelet.start()

        assert {} == rig.ids()
        assert 1 == len(rig.seen("checkpoint_lost"))
        await rig.come_back(plugin)


# What a new kubelet process, a reboot or a lost checkpoint does to pods that were admitted.

NOTHING_HEALTHY = (
    "Pod was rejected: Allocate failed due to no healthy devices present; "
    f"cannot allocate unhealthy devices {RESOURCE}, which is unexpected"
)


async def test_a_reboot_without_the_plugin_rejects_every_pod_that_holds_ids(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, _):
        for uid in ("u1", "u2"):
            await rig.admit(a_pod_object(uid))
        await rig.admit(a_pod_object("plain", count=0))

        await rig.kubelet.reboot()
        await rig.until_seen("admitted", 4)

        rejected = {event.pod: event.text for event in rig.seen("rejected")}
        assert {"u1": NOTHING_HEALTHY, "u2": NOTHING_HEALTHY} == rejected


async def test_a_reboot_with_a_lost_checkpoint_allocates_in_order_of_creation(tmp_path):
    async with a_rig_with_plugin(tmp_path, count=8) as (rig, plugin):
        stamps = {"late": "2026-08-21T06:20:42Z", "early": "2026-08-21T06:20:40Z"}
        for uid, created in stamps.items():
            await rig.admit(a_pod_object(uid, created=created))

        await rig.kubelet.reboot(lose_checkpoint=True)
        await rig.come_back(plugin)
        await rig.until_seen("admitted", 4)

        assert ["late", "early", "early", "late"] == [e.pod for e in rig.seen("allocated")]


async def test_a_plugin_that_is_back_within_09_seconds_saves_every_pod(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        await rig.admit(a_pod_object("u1"))
        await rig.kubelet.reboot()
        await asyncio.sleep(0.85)
        await rig.come_back(plugin)

        await rig.until_seen("admitted", 2)
        assert [] == rig.seen("rejected")


# What a kubelet does to its directories when it starts, and leaves when it goes.


async def test_connections_break_when_the_kubelet_goes(tmp_path):
    async with a_rig(tmp_path) as rig:
        reader, writer = await asyncio.open_unix_connection(rig.pod_resources / "kubelet.sock")
        await reader.read(9)

        await rig.kubelet.kill()

        await rig.soon(reader.read())
        assert reader.at_eof()
        writer.close()
        await writer.wait_closed()


async def test_a_start_knows_resources_and_holds_from_the_checkpoint(tmp_path):
    async with a_rig_with_plugin(tmp_path, count=3) as (rig, _):
        await rig.admit(a_pod_object())
        held = rig.ids()

        await rig.kubelet.restart()

        assert held == rig.ids()
        tick = rig.kubelet.tick()
        assert ({RESOURCE: 0}, {RESOURCE: 0}) == (tick.capacity, tick.allocatable)
        await asyncio.sleep(299)
        assert not rig.kubelet.tick().removed, "the grace period starts anew"
        await asyncio.sleep(2)
        assert {RESOURCE} == rig.kubelet.tick().removed


async def test_a_directory_that_cannot_be_made_fails_the_start(tmp_path):
    (tmp_path / "file").touch()
    kubelet = KubeletModel(tmp_path / "file", tmp_path / "pr", ManualClock(), Seeded())

    with pytest.raises(ExceptionGroup) as caught:
        await kubelet.start()

    assert caught.group_contains(NotADirectoryError)
    assert not kubelet.is_up
    await kubelet.stop()


async def test_a_second_start_is_refused_and_a_second_stop_does_nothing(tmp_path):
    async with a_rig(tmp_path) as rig:
        with pytest.raises(RuntimeError, match="started already"):
            await rig.kubelet.start()
        await rig.kubelet.stop()
        await rig.kubelet.stop()

        assert not rig.kubelet.is_up
        assert 0 == rig.kubelet.capacity(RESOURCE) == rig.kubelet.allocatable(RESOURCE)
        assert {} == rig.ids()
        assert {} == rig.kubelet.tick().capacity


async def test_a_kubelet_that_is_killed_while_it_starts_does_not_come_up(tmp_path):
    kubelet = KubeletModel(tmp_path / "dp", tmp_path / "pr", ManualClock(), Seeded())
    async with asyncio.TaskGroup() as group:
        starting = group.create_task(kubelet.start())
        await asyncio.sleep(0.1)
        await kubelet.kill()
        await starting

    assert not kubelet.is_up
    with pytest.raises(FileNotFoundError):
        async with Channel(path=str(tmp_path / "dp" / "kubelet.sock")) as channel:
            await channel.__connect__()

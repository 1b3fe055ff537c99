"""The kubelet's checkpoint file: bytes, checksum, and what a new kubelet makes of it."""

import asyncio
import json

import pytest

from agent.sandbox.kubelet import checkpoint
from agent.sandbox.kubelet.checkpoint import Checkpoint, CheckpointEntry, CheckpointError
from tests.fakes.kubelet_rig import a_pod_object, a_rig_with_plugin

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


# What a new kubelet process, a reboot or a lost checkpoint does to pods that were admitted.


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

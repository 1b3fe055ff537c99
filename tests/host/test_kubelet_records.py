"""The kubelet's checkpoint file: read when it is there, silent when it is not."""

import json

from agent.ledger import ContainerKey
from agent.witness import FILE_NAME, KubeletRecordsFile
from tests.builders import POD_UID
from tests.fakes.offload import Inline

RESOURCE = "nvidia.com/gpu"


async def test_the_containers_in_the_file_are_found(tmp_path):
    entry = {"PodUID": POD_UID, "ContainerName": "init", "ResourceName": RESOURCE}
    text = json.dumps({"Data": {"PodDeviceEntries": [entry]}, "Checksum": 1})
    (tmp_path / FILE_NAME).write_text(text, encoding="utf-8")

    found = await KubeletRecordsFile(tmp_path, Inline()).read(RESOURCE)

    assert {ContainerKey(POD_UID, "init"): frozenset()} == found


async def test_the_ids_in_the_file_are_found(tmp_path):
    entry = {
        "PodUID": POD_UID,
        "ContainerName": "init",
        "ResourceName": RESOURCE,
        "DeviceIDs": {"0": ["GPU-1-0"]},
    }
    text = json.dumps({"Data": {"PodDeviceEntries": [entry]}, "Checksum": 1})
    (tmp_path / FILE_NAME).write_text(text, encoding="utf-8")

    found = await KubeletRecordsFile(tmp_path, Inline()).read(RESOURCE)

    assert {ContainerKey(POD_UID, "init"): frozenset({"GPU-1-0"})} == found


async def test_without_a_file_nothing_is_known(tmp_path):
    assert None is await KubeletRecordsFile(tmp_path, Inline()).read(RESOURCE)


async def test_of_a_torn_or_unreadable_file_nothing_is_known(tmp_path):
    records = KubeletRecordsFile(tmp_path, Inline())
    (tmp_path / FILE_NAME).write_bytes(b'{"Data":')
    assert None is await records.read(RESOURCE)

    (tmp_path / FILE_NAME).unlink()
    (tmp_path / FILE_NAME).mkdir()

    assert None is await records.read(RESOURCE)

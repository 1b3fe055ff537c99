"""Which containers the kubelet's own file records."""

import base64
import json

import pytest

from agent.errors import MalformedText
from agent.witness import decode_records
from tests.builders import a_pod_uid

RESOURCE = "nvidia.com/gpu"


def an_entry(number: int, container: str, resource: str = RESOURCE) -> dict:
    """One entry as the kubelet writes it."""
    return {
        "PodUID": a_pod_uid(number),
        "ContainerName": container,
        "ResourceName": resource,
        "DeviceIDs": {"-1": ["GPU-1-0"]},
        "AllocResp": base64.b64encode(b"\x0a\x00").decode(),
    }


def a_file(entries: list | None) -> bytes:
    data = {"PodDeviceEntries": entries, "RegisteredDevices": {RESOURCE: ["GPU-1-0"]}}
    return json.dumps({"Data": data, "Checksum": 3089331425}).encode()


BEFORE_1_20 = an_entry(1, "a") | {"DeviceIDs": ["GPU-1-0"]}
TORN = [b"", b"{}", b'{"Data": 1}', b"\xff", a_file([an_entry(1, "a")])[:-9], b'{"Data":' * 100_000]


@pytest.mark.parametrize("content", [*TORN, a_file([{"PodUID": 1}]), a_file([BEFORE_1_20])])
def test_a_file_that_is_torn_or_of_another_shape_is_malformed(content):
    with pytest.raises(MalformedText, match="the kubelet's checkpoint"):
        decode_records(content, RESOURCE)


def test_a_kubelet_without_allocations_records_nobody():
    assert {} == decode_records(a_file(None), RESOURCE) == decode_records(a_file([]), RESOURCE)


def test_the_ids_of_each_container_are_found_whatever_their_numa_nodes():
    spread = an_entry(1, "a") | {"DeviceIDs": {"0": ["GPU-1-0"], "1": ["GPU-2-0"], "-1": None}}
    without = an_entry(1, "b") | {"DeviceIDs": None}
    foreign = an_entry(2, "a", "example.com/nic")
    held = decode_records(a_file([spread, without, an_entry(3, "a"), foreign]), RESOURCE)
    assert [frozenset({"GPU-1-0", "GPU-2-0"}), frozenset(), frozenset({"GPU-1-0"})] == list(
        held.values()
    )

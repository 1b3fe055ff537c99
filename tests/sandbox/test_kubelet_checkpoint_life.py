"""When the kubelet writes its checkpoint, and what it makes of one that it finds."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.sandbox.kubelet import checkpoint
from agent.wire.v1beta1 import ContainerAllocateResponse
from tests.fakes.kubelet_rig import a_pod_object, a_rig_with_plugin
from tests.fakes.plugin import RESOURCE, a_device


async def test_it_is_written_on_each_list_and_each_allocation(tmp_path):
    async with a_rig_with_plugin(tmp_path, count=2) as (rig, plugin):
        plugin.publish([a_device("a", nodes=[1]), a_device("b", nodes=[1, 0]), a_device("c")])
        await rig.until_listed(3)
        assert () == checkpoint.load(rig.plugins).entries

        await rig.admit(a_pod_object(count=3))

        (entry,) = checkpoint.load(rig.plugins).entries
        response = ContainerAllocateResponse.parse(entry.response)
        assert ("u1", "main", RESOURCE) == (entry.pod_uid, entry.container, entry.resource)
        assert {"IDS": "a,b,c"} == response.envs
        assert {1: {"a", "b"}, 0: {"b"}, -1: {"c"}} == {n: {*i} for n, i in entry.numa.items()}


async def test_it_is_not_written_when_a_pod_ends(tmp_path):
    async with a_rig_with_plugin(tmp_path, count=2) as (rig, _):
        await rig.admit(a_pod_object())
        before = (rig.plugins / checkpoint.FILE_NAME).stat().st_ino

        await rig.soon(rig.kubelet.pod_gone("u1"))

        assert before == (rig.plugins / checkpoint.FILE_NAME).stat().st_ino
        assert 1 == len(checkpoint.load(rig.plugins).entries)


def another_sum(raw: bytes) -> bytes:
    document = json.loads(raw)
    return json.dumps(document | {"Checksum": document["Checksum"] ^ 1}).encode()


@pytest.mark.parametrize("spoil", [another_sum, lambda raw: raw[:-9], lambda _: b""])
async def test_a_file_that_cannot_be_believed_is_an_empty_state(tmp_path, spoil):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        await rig.admit(a_pod_object())
        await rig.kubelet.stop()
        rewrite(rig.plugins / checkpoint.FILE_NAME, spoil)

        await rig.kubelet.start()

        assert {} == rig.ids()
        assert 1 == len(rig.seen("checkpoint_lost"))
        await rig.come_back(plugin)


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))

"""The real process with the files of a HAMi release, and with profiles that follow the node."""

import json

import pytest

from agent.cluster import REGISTER
from agent.hami.register import decode_register
from agent.sandbox.lab.cluster import NODE, open_cluster
from tests.process.agent_process import PATIENCE, offers, options, started

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(60)]

DEVICES = "nvidia: {deviceSplitCount: 4, deviceMemoryScaling: 1.5, libCudaLogLevel: 3}\n"
NODES = {
    "nodeconfig": [
        {"name": "another", "devicesplitcount": 9},
        {"name": NODE, "devicesplitcount": 5, "filterdevices": {"index": [0]}},
    ]
}


async def test_hamis_files_make_the_list_and_the_annotation(tmp_path):
    (tmp_path / "d.yaml").write_text(DEVICES)
    (tmp_path / "config.json").write_text(json.dumps(NODES))
    files = ("--config-file", f"{tmp_path}/d.yaml", "--nodeconfig", f"{tmp_path}/config.json")
    async with open_cluster(options(*files, gpus=3)) as opened:
        cluster = await started(opened, slices=10)

        assert await cluster.until(lambda: REGISTER in cluster.node_annotations(), PATIENCE)
        told = decode_register(cluster.node_annotations()[REGISTER])
        assert [(1, 5, 122338), (2, 5, 122338)] == [
            (gpu.index, gpu.split_count, gpu.registered_mib) for gpu in told
        ]


BY_POOL = [
    {"nodelabelselector": {"matchLabels": {"Pool": "big"}}, "devicesplitcount": 20},
    {"name": "other", "operatingmode": "unknown"},
    {"name": "*", "devicesplitcount": 5},
]


@pytest.mark.parametrize("reachable", [True, False])
async def test_the_first_start_waits_for_labels_and_no_longer_than_for_two_seconds(
    tmp_path, reachable
):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"nodeconfig": BY_POOL}))
    async with open_cluster(options("--nodeconfig", str(file), gpus=2)) as cluster:

        def label(fresh):
            fresh["metadata"]["labels"]["Pool"] = "big"
            return fresh

        cluster.store.update("nodes", "", NODE, label)
        if not reachable:
            await cluster.api.begin_outage()
            await started(cluster, slices=10)
            await cluster.api.end_outage()
        await started(cluster, slices=40) if reachable else await offers(cluster, 40)

        assert 40 == cluster.allocatable(), cluster.log.last(20)
        assert (not reachable) == bool(cluster.log.of("config.labels_unknown"))
        assert (1 if reachable else 2) == len(cluster.kubelet.history.of("listed"))

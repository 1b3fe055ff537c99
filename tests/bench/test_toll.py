"""The floor of an Allocate: measured beside it, by the promised steps, and taken pair by pair."""

import asyncio
import sys

import pytest

from agent.wire.v1 import GetPodResourcesResponse, PodResources, PodResourcesListerBase
from tests.bench import toll
from tests.bench.floor import ROOT
from tests.fakes.unix_grpc import served


class TollKubelet(PodResourcesListerBase):
    """Knows every pod, and remembers who was asked for."""

    def __init__(self):
        self.asked = []

    async def get(self, message):
        self.asked.append((message.pod_namespace, message.pod_name))
        return GetPodResourcesResponse(PodResources(message.pod_name, message.pod_namespace))


def test_what_is_left_to_the_agent_is_taken_pair_by_pair():
    figures = {one.id: one for one in toll.figures([4.0, 40.0, 5.0], [(1, 1), (20, 10), (1, 2)])}

    assert {
        "allocate_p50": 5.0,
        "allocate_p99": 40.0,
        "allocate_disk": 1,
        "allocate_question": 2,
        "allocate_beyond": 2.0,
        "allocate_over_both": 5 / 3,
    } == {name: figure.shown for name, figure in figures.items()}
    assert [2.5, 10] == [figures[name].budget for name in ("allocate_p50", "allocate_p99")]


@pytest.mark.looptime(False)
@pytest.mark.process
@pytest.mark.timeout(60)
async def test_each_line_is_one_generation_on_disk_and_one_question(tmp_path):
    kubelet, socket = TollKubelet(), tmp_path / "kubelet.sock"
    directory = tmp_path / "toll"
    directory.mkdir()
    async with served(socket, kubelet):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.bench.toll", str(directory), str(socket)),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await process.communicate(b"70 demo a\n80 demo b\n")

    assert 0 == process.returncode
    assert [2, 2] == [len(line.split()) for line in said.splitlines()]
    assert all(float(word) > 0 for word in said.split())
    assert [("demo", "a"), ("demo", "b")] == kubelet.asked
    assert {"state": 80, "previous": 70} == {
        path.name: path.stat().st_size for path in directory.iterdir()
    }

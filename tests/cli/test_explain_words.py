"""`explain`: what is advised, and how requests and GPUs are put into words."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.fakes.explain_rig import ExplainRig, a_gpu, explain_rig

pytestmark = pytest.mark.looptime(False)
GPU, MEMORY, CORES = "nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores"


@pytest_asyncio.fixture
async def rig(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[ExplainRig]:
    async with explain_rig(tmp_path, capsys) as made:
        yield made


@pytest.mark.parametrize(("asked", "may_wait"), [(20_000, False), (16_000, True)])
async def test_to_wait_for_memory_is_advised_only_if_an_empty_gpu_has_so_much(
    rig: ExplainRig, asked: int, *, may_wait: bool
):
    rig.node("n1", a_gpu("GPU-a"))
    rig.holder("busy", "n1", "GPU-a", 500)
    rig.submit("p", {GPU: 1, MEMORY: asked})

    answer = await rig.explain("p")

    assert ("placement", "CardInsufficientMemory") == answer.blocked
    assert may_wait is any("wait for default/busy" in change for change in answer.changes)
    says = "no GPU of the cluster has so much memory, even without other pods"
    assert may_wait is (says not in answer.gate("placement")["facts"])


async def test_gpus_of_which_the_same_is_said_stand_on_one_line(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"), a_gpu("GPU-b", 1), a_gpu("GPU-c", 2, healthy=False))
    rig.submit("p", {GPU: 3, MEMORY: 1000})

    answer = await rig.explain("p", "-o", "table")

    assert "GPU 0, 1 AllocatedCardsInsufficientRequest: it fits, but 3 GPUs" in answer.out


async def test_a_gpu_that_is_wanted_alone_is_told_with_what_is_held(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"))
    rig.holder("busy", "n1", "GPU-a", 100)
    rig.submit("p", {GPU: 1, MEMORY: 1000, CORES: 100})

    answer = await rig.explain("p")

    (gpu,) = answer.data["nodes"][0]["gpus"]
    assert "the pod wants it alone, and 1 of its slices is held" == gpu["said"]


async def test_more_cores_than_a_gpu_has_count_as_all(rig: ExplainRig):
    rig.node("n1", a_gpu("GPU-a"))
    rig.submit("p", {GPU: 1, MEMORY: 1000, CORES: 150})

    answer = await rig.explain("p")

    assert "150 % of the cores (which counts as 100 %)." in answer.data["headline"]

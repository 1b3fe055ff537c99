"""`unlockedPods: legacy` under a kubelet without a witness: guessed, at worst swapped."""

import asyncio

import pytest

from agent.core.errors import Gate, Refusal
from agent.core.ledger import ContainerKey, EffectKind
from agent.core.match_settings import UnlockedPods
from agent.core.pods import Role
from tests.builders import a_container
from tests.services.allocating import G1, G2, Desk, a_desk, ids, placed

FIRST = f"{G1},NVIDIA,3000,30:;;"
SECOND = f"{G2},NVIDIA,4000,40:;;"


def init_only(number: int, text: str):
    """A pod whose only GPU container is an init container: HAMi takes no lock for it."""
    prepare = a_container(name="prepare", role=Role.INIT)
    return placed(number, text, containers=(prepare, a_container(count=0)))


async def asks(desk: Desk, pod, *numbers: int):
    """The old kubelet asks for the pod, and writes the answer into its file."""
    answer = await desk.service.allocate(ids(*numbers))
    desk.records.keys = (desk.records.keys or frozenset()) | {ContainerKey(pod.uid, "prepare")}
    return answer


def visible(answer) -> str:
    return dict(answer.envs)["NVIDIA_VISIBLE_DEVICES"]


def directory(answer) -> str:
    (found,) = {one.host_path for one in answer.mounts if "/containers/" in one.host_path}
    return found


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["as-guessed", "otherwise"])
async def test_two_pods_at_once_get_both_shares_in_directories_of_their_own(order):
    async with a_desk(unlocked=UnlockedPods.LEGACY) as desk:
        desk.witness.supported = False
        pods = [init_only(1, FIRST), init_only(2, SECOND)]
        desk.see(*pods)

        answers = [await asks(desk, pods[place], place) for place in order]

        assert [G1, G2] == [visible(one) for one in answers]
        assert 2 == len({directory(one) for one in answers})
        assert {pod.uid for pod in pods} == {row.key.pod_uid for row in desk.ledger.rows}
        settled = desk.effects(EffectKind.SETTLE_POD)
        assert {pod.uid for pod in pods} == {effect.pod_uid for effect in settled}


async def test_a_pod_that_waits_is_steered_without_waiting_for_a_lock():
    async with a_desk(unlocked=UnlockedPods.LEGACY) as desk:
        pod = placed(1, f"{G2},NVIDIA,3000,30:;")
        desk.see(pod)
        desk.witness.admit(pod)
        began = asyncio.get_running_loop().time()

        assert ids(0, gpu=1) == await desk.service.prefer((*ids(0, 1), *ids(0, gpu=1)), (), 1)
        assert began == asyncio.get_running_loop().time()


async def test_without_the_setting_two_pods_at_once_are_refused():
    async with a_desk(unlocked=UnlockedPods.UNIQUE) as desk:
        desk.witness.supported = False
        desk.see(init_only(1, FIRST), init_only(2, SECOND))

        with pytest.raises(Refusal) as caught:
            await desk.service.allocate(ids(0))

        assert Gate.WITNESS_SILENT is caught.value.gate

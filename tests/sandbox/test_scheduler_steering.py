"""How a pod's annotations steer the choice of GPUs, in the corners that no vector reaches."""

import pytest

from agent.allocate.room import ContainerRequest
from agent.hami.register import RegisteredGpu
from agent.model import GpuUuid, Share
from agent.sandbox.scheduler.filter import Wishes, fit_pod
from agent.sandbox.scheduler.model import (
    GpuView,
    RegisteredNode,
    SchedulerSettings,
    Weights,
)
from agent.sandbox.scheduler.registry import read_offer
from agent.sandbox.scheduler.requests import BadWeightsError, Steering, read_steering
from tests.fakes.scheduler_cluster import REGISTER, register_of

WEIGHTS = "hami.io/device-scoring-weights"
TOPOLOGY = {"hami.io/gpu-scheduler-policy": "topology-aware"}
UUIDS = tuple(GpuUuid(f"GPU-{name}") for name in "abc")


def steering(**annotations: str) -> Steering:
    return read_steering(annotations, SchedulerSettings())


def gpu(uuid: GpuUuid, numa: int = 0) -> RegisteredGpu:
    return RegisteredGpu(
        uuid=uuid,
        index=UUIDS.index(uuid),
        split_count=10,
        registered_mib=16000,
        core_percent=100,
        type_name="NVIDIA-Tesla T4",
        mode="hami-core",
        numa=numa,
        healthy=True,
    )


def fitted(annotations: dict[str, str], count: int, node: RegisteredNode) -> tuple[list[str], str]:
    """UUIDs that one container of so many GPUs gets, or the reason."""
    wishes = Wishes(
        (ContainerRequest(count, 1000, 101, 0),), 0, read_steering(annotations, SchedulerSettings())
    )
    answer = fit_pod(node, wishes)
    groups: tuple[tuple[Share, ...], ...] = answer.groups or ((),)
    return [share.uuid for share in groups[0]], answer.reason


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("slot=1", "expected slot, core, and memory weights"),
        ("", "expected slot, core, and memory weights"),
        ("slot=1,core=1,memory", "expected key=value entries"),
        ("slot=1,slot=1,memory=1", 'duplicate "slot" weight'),
        ("slot=a,core=1,memory=1", '"slot" weight must be an integer'),
        ("slot=1_0,core=1,memory=1", '"slot" weight must be an integer'),
        (f"slot={2**63},core=1,memory=1", '"slot" weight must be an integer'),
        ("slot=-1,core=1,memory=1", '"slot" weight must not be negative'),
        ("slot=1,core=1,fans=1", 'unknown weight "fans"'),
        ("slot=0,core=0,memory=0", "at least one weight must be positive"),
    ],
)
def test_weights_are_refused_in_the_words_of_hami(text: str, detail: str) -> None:
    with pytest.raises(BadWeightsError) as refusal:
        steering(**{WEIGHTS: text})

    assert f'invalid {WEIGHTS} annotation "{text}": {detail}' == str(refusal.value)


def test_weights_may_have_spaces_and_signs() -> None:
    assert Weights(1, 0, 3) == steering(**{WEIGHTS: " slot = +1, core=0 ,memory= 3"}).weights


def test_an_empty_mode_admits_only_a_gpu_without_one() -> None:
    wish = steering(**{"nvidia.com/vgpu-mode": ""})

    assert not wish.admits_type(gpu(UUIDS[0]))
    assert steering(**{"nvidia.com/vgpu-mode": "mig,hami-core"}).admits_type(gpu(UUIDS[0]))


@pytest.mark.parametrize(
    ("text", "admitted"), [("", True), (" ", True), (" , ", False), ("t4", True), ("a100", False)]
)
def test_a_list_of_commas_alone_admits_no_type(text: str, *, admitted: bool) -> None:
    wish = steering(**{"nvidia.com/use-gputype": text})

    assert admitted == wish.admits_type(gpu(UUIDS[0]))


@pytest.mark.parametrize(("text", "admitted"), [("", True), (",", False), (" GPU-a ,x", True)])
def test_a_list_of_commas_alone_admits_no_uuid(text: str, *, admitted: bool) -> None:
    wish = steering(**{"nvidia.com/use-gpuuuid": text})

    assert admitted == wish.admits_uuid(gpu(UUIDS[0]))


def test_an_empty_policy_is_spread_and_binpack() -> None:
    empty = {"hami.io/gpu-scheduler-policy": "", "hami.io/node-scheduler-policy": ""}
    wish = read_steering(empty, SchedulerSettings(gpu_policy="binpack", node_policy="spread"))

    assert ("", "") == (wish.gpu_policy, wish.node_policy)


LINKED = RegisteredNode(
    "n",
    tuple(GpuView(gpu(uuid)) for uuid in UUIDS),
    links={
        UUIDS[0]: {UUIDS[1]: 100, UUIDS[2]: 10},
        UUIDS[1]: {UUIDS[0]: 100, UUIDS[2]: 20},
        UUIDS[2]: {UUIDS[0]: 10, UUIDS[1]: 20},
    },
)


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, ["GPU-c"]), (2, ["GPU-b", "GPU-a"]), (3, ["GPU-c", "GPU-b", "GPU-a"])],
)
def test_one_gpu_is_the_worst_connected_and_several_are_the_best(
    count: int, expected: list[str]
) -> None:
    assert (expected, "") == fitted(TOPOLOGY, count, LINKED)


def test_topology_goes_with_another_policy() -> None:
    policy = {"hami.io/gpu-scheduler-policy": "binpack, topology-aware"}

    assert (["GPU-b", "GPU-a"], "") == fitted(policy, 2, LINKED)


def test_without_links_all_pairs_are_equal_and_the_first_is_taken() -> None:
    bare = RegisteredNode("n", LINKED.gpus)

    assert (["GPU-c", "GPU-b"], "") == fitted(TOPOLOGY, 2, bare)
    assert (["GPU-c"], "") == fitted(TOPOLOGY, 1, bare)


def test_with_numa_binding_the_last_numa_node_alone_is_chosen_from() -> None:
    gpus = tuple(GpuView(gpu(uuid, numa)) for uuid, numa in zip(UUIDS, (0, 0, 1), strict=True))
    bound = TOPOLOGY | {"nvidia.com/numa-bind": "true"}

    assert (["GPU-b", "GPU-a"], "") == fitted(bound, 2, RegisteredNode("n", gpus))
    assert "2/3 AllocatedCardsInsufficientRequest" == fitted(bound, 3, RegisteredNode("n", gpus))[1]


@pytest.mark.parametrize("text", ["x", "{}", '[{"uuid": 1}]', '[{"uuid":"a","score":{"b":"c"}}]'])
def test_a_score_that_cannot_be_decoded_takes_the_whole_node_away(text: str) -> None:
    noted = {REGISTER: register_of("GPU-a"), "hami.io/node-nvidia-score": text}

    assert read_offer(noted) is None
    assert read_offer(noted | {"hami.io/node-nvidia-score": "[]"}) is not None

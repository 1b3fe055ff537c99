"""Plain mode's answers: the ids decide; what cannot be given is refused with its reason."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.allocate.edits import cache_file
from agent.allocate.plain import MOST_IDS, PlainSettings, asked_again, edits_of, grant, slice_mib
from agent.cluster import PodUid
from agent.errors import Refusal, RefusalReason, SettingsError
from agent.ledger import PLAIN, EditSettings, Holder, HookFacts
from agent.model import Condition, SliceId, slice_id
from tests.builders import a_gpu, a_health, a_shared_gpu, an_inventory
from tests.unit.core.allocation.plain_scene import EPOCH, NEXT, UID, a_plain_row, ids

FACTS = HookFacts(library="/usr/local/vgpu/libvgpu.so", device_nodes=("/dev/nvidiactl",))
LIMITED, UNLIMITED = PlainSettings(memory_limits=True), PlainSettings()
G0, G1 = a_gpu(index=0), a_gpu(index=1)


def refused(wanted, inventory=None, held=()):
    with pytest.raises(Refusal) as caught:
        grant(wanted, inventory or an_inventory(), held)
    return caught.value


def test_each_slice_is_an_equal_part_of_its_gpus_memory():
    (granted,) = grant(ids(3), an_inventory(), ())

    assert (G0.uuid, 8155, 0) == (
        granted.share.uuid,
        granted.share.memory_mib,
        granted.share.core_percent,
    )


def test_slices_of_one_gpu_add_up_to_one_share():
    (granted,) = grant(ids(3, 7, 0), an_inventory(), ())

    assert 3 * 8155 == granted.share.memory_mib


def test_the_gpus_are_in_the_order_of_their_pci_bus_ids_whatever_the_kubelets_order():
    first = a_shared_gpu(gpu=a_gpu(index=0, pci="0000:90:00.0"))
    second = a_shared_gpu(gpu=a_gpu(index=1, pci="0000:10:00.0"))
    inventory = an_inventory(gpus=(first, second))

    for wanted in ((*ids(1), *ids(2, gpu=1)), (*ids(2, gpu=1), *ids(1))):
        assert [second.uuid, first.uuid] == [one.share.uuid for one in grant(wanted, inventory, ())]


def test_a_slice_is_never_of_0_mib_which_would_mean_all():
    assert 1 == slice_mib(a_shared_gpu(registered_mib=9, split_count=10))


def test_more_than_10000_ids_are_refused_whatever_they_are():
    assert RefusalReason.TOO_MANY_SLICES is refused((SliceId("x"),) * (MOST_IDS + 1)).gate


def test_10000_ids_are_looked_at():
    inventory = an_inventory(gpus=[a_shared_gpu(gpu=G0, split_count=MOST_IDS)])

    (granted,) = grant([slice_id(G0.uuid, n) for n in range(MOST_IDS)], inventory, ())

    assert MOST_IDS * 8 == granted.share.memory_mib


def test_an_id_that_comes_twice_is_refused():
    refusal = refused((*ids(1), *ids(1)))

    assert RefusalReason.REPEATED_SLICE is refusal.gate
    assert f"{G0.uuid}-1 2 times" in refusal.sentence


@pytest.mark.parametrize("text", ["", "GPU", "-", "x-01", "x--", "\n", "é", "x" * 5000])
def test_what_is_no_slice_id_is_refused_in_one_short_line(text: str):
    refusal = refused((SliceId(text),))

    assert RefusalReason.UNKNOWN_SLICE is refusal.gate
    assert len(refusal.sentence) < 300
    assert "\n" not in refusal.sentence


def test_a_gpu_that_is_not_shared_here_is_refused():
    assert RefusalReason.UNKNOWN_GPU is refused(ids(0, gpu=7)).gate


def test_a_number_beyond_the_split_count_is_refused():
    assert RefusalReason.UNKNOWN_SLICE is refused(ids(10)).gate


def test_a_number_beyond_a_lowered_split_count_is_given_while_it_is_held():
    assert 1 == len(grant(ids(10), an_inventory(), ids(10)))


@pytest.mark.parametrize(
    ("condition", "present", "gate"),
    [
        (Condition.BAD, True, RefusalReason.BAD_GPU),
        (Condition.LOST, True, RefusalReason.BAD_GPU),
        (Condition.OK, False, RefusalReason.BAD_GPU),
        (Condition.UNMONITORED, True, RefusalReason.DRIVER_UNRESPONSIVE),
    ],
)
def test_a_gpu_that_does_not_serve_is_refused(condition, present, gate):
    health = a_health(condition=condition, serving=not present)
    gpu = a_shared_gpu(gpu=G0, health=health, present=present)

    refusal = refused(ids(0), an_inventory(gpus=(gpu,)))

    assert gate is refusal.gate
    told = f"is {condition.value}: " if condition in {Condition.BAD, Condition.LOST} else ""
    assert (
        told if present else "is filtered out by the settings; create the pod"
    ) in refusal.sentence


@pytest.mark.parametrize("condition", [Condition.WATCH, Condition.UNMONITORED])
def test_a_gpu_that_is_only_watched_serves(condition):
    gpu = a_shared_gpu(gpu=G0, health=a_health(condition=condition, serving=True))

    assert 1 == len(grant(ids(0), an_inventory(gpus=(gpu,)), ()))


@given(
    registered=st.integers(1000, 200_000),
    split=st.integers(1, 1000),
    data=st.data(),
)
def test_limits_of_distinct_ids_never_sum_to_more_than_is_registered(registered, split, data):
    gpu = a_shared_gpu(gpu=G0, registered_mib=registered, split_count=split)
    numbers = data.draw(st.lists(st.integers(0, split - 1), min_size=1, unique=True))
    cuts = data.draw(st.lists(st.integers(0, len(numbers)), max_size=5))
    bounds = [0, *sorted(cuts), len(numbers)]
    requests = [numbers[a:b] for a, b in itertools.pairwise(bounds) if a < b]

    total = sum(
        granted.share.memory_mib
        for request in requests
        for granted in grant(ids(*request), an_inventory(gpus=(gpu,)), ())
    )

    assert total <= registered


def test_with_limits_the_answer_is_hami_cores():
    granted = grant((*ids(0, 1), *ids(5, gpu=1)), an_inventory(), ())

    edits = edits_of(UID, granted, LIMITED, EditSettings(), FACTS)
    envs = dict(edits.envs)
    mounts = {one.container_path: one.host_path for one in edits.mounts}

    assert f"{G0.uuid},{G1.uuid}" == envs["NVIDIA_VISIBLE_DEVICES"]
    assert ("16310m", "8155m") == (
        envs["CUDA_DEVICE_MEMORY_LIMIT_0"],
        envs["CUDA_DEVICE_MEMORY_LIMIT_1"],
    )
    assert "0" == envs["CUDA_DEVICE_SM_LIMIT"]
    cache = cache_file(UID, PLAIN)
    assert f"/usr/local/vgpu/{cache}" == envs["CUDA_DEVICE_MEMORY_SHARED_CACHE"]
    assert f"/usr/local/vgpu/containers/{UID}_plain" == mounts["/usr/local/vgpu"]
    assert {"/tmp/vgpulock", "/etc/ld.so.preload", "/usr/local/vgpu/libvgpu.so"} < set(mounts)  # noqa: S108 -- in the container


def test_without_limits_the_answer_is_the_gpus_alone():
    granted = grant(ids(0, 1), an_inventory(), ())

    edits = edits_of(UID, granted, UNLIMITED, EditSettings(), FACTS)

    assert (("NVIDIA_VISIBLE_DEVICES", G0.uuid),) == edits.envs
    assert ((), (), ()) == (edits.mounts, edits.nodes, edits.annotations)


def test_without_limits_the_gpus_are_told_by_every_strategy_that_is_set():
    settings = EditSettings(
        device_list_strategies=("volume-mounts", "cdi-annotations", "cdi-cri"),
        pass_device_specs=True,
        gds=True,
    )
    granted = grant(ids(0), an_inventory(), ())

    edits = edits_of(UID, granted, UNLIMITED, settings, FACTS)

    assert {"NVIDIA_VISIBLE_DEVICES", "NVIDIA_GDS"} == dict(edits.envs).keys()
    assert [f"/var/run/nvidia-container-devices/{G0.uuid}"] == [
        one.container_path for one in edits.mounts
    ]
    assert ["/dev/nvidiactl", "/dev/nvidia0"] == [one.container_path for one in edits.nodes]
    assert (f"nvidia.com/gpu={G0.uuid}", "nvidia.com/gds=all") == edits.cdi_names
    assert 1 == len(edits.annotations)


def test_settings_that_no_answer_can_be_made_with_are_said_so():
    granted = grant(ids(0), an_inventory(), ())

    for plain in (LIMITED, UNLIMITED):
        with pytest.raises(SettingsError):
            edits_of(UID, granted, plain, EditSettings(device_list_strategies=("smoke",)), FACTS)


def test_an_unbooked_answer_to_an_earlier_kubelet_is_given_again():
    row = a_plain_row(slice_ids=ids(1, 2))

    assert row == asked_again(reversed(ids(1, 2)), (row,), NEXT)


@pytest.mark.parametrize(
    "row",
    [
        a_plain_row(slice_ids=ids(1), epoch=NEXT),
        a_plain_row(slice_ids=ids(1), holder=Holder("a", "p", "c")),
        a_plain_row(slice_ids=ids(1), confirmed=True),
        a_plain_row(slice_ids=ids(1), adopted=True),
        a_plain_row(slice_ids=ids(1, 2)),
        a_plain_row(slice_ids=ids(2)),
    ],
    ids=["same kubelet", "held", "recorded", "adopted", "more ids", "other ids"],
)
def test_any_other_answer_is_given_to_nobody_again(row):
    assert None is asked_again(ids(1), (row,), NEXT)


def test_of_several_unbooked_answers_the_newest_is_given_again():
    old = a_plain_row(slice_ids=ids(1), minute=1)
    new = a_plain_row(slice_ids=ids(1), minute=2, uid=PodUid("b" * 32))

    assert new == asked_again(ids(1), (new, old), NEXT)
    assert EPOCH == new.epoch

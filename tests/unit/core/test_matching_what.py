"""What the container gets: nothing in an annotation is taken on trust."""

from agent.core.allocation.evidence import AskKubelet, Evidence, ListPods
from agent.core.allocation.room import GpuUse
from agent.core.cluster.pods import Phase, PodView, Role
from agent.core.errors import RefusalReason
from agent.core.inventory.condition import Condition
from tests.builders import (
    a_container,
    a_gpu,
    a_health,
    a_pod,
    a_row,
    a_share,
    a_shared_gpu,
    an_inventory,
)
from tests.unit.core.matching_scene import (
    G1,
    G2,
    NOW_KUBELET,
    OLD_KUBELET,
    a_scene,
    annotated,
    ask,
    changed,
    granted,
    holding,
    knowing,
    named_pod,
    refused_by,
    with_bad_gpu,
)


def scene_of(pod: PodView, **options: object) -> Evidence:
    """The pod is being admitted and holds the lock."""
    return knowing(a_scene(pod, lock=pod, **options), holding(pod))  # type: ignore[arg-type]


def pod_with(text: str, **changes: object) -> PodView:
    """A pod annotated with that devices text."""
    return a_pod(name="train-1", annotations=annotated(text), **changes)  # type: ignore[arg-type]


def refused(scene: Evidence, gate: RefusalReason, count: int = 1) -> str:
    refusal = refused_by(scene, gate, count)
    assert str(refusal).endswith(f"[{gate.value}]")
    return refusal.sentence


def test_the_shares_are_those_of_the_annotation() -> None:
    grant = granted(scene_of(pod_with(f"{G2},NVIDIA,4000,40:;")))

    assert grant.shares == (a_share(uuid=G2, memory_mib=4000, core_percent=40),)


def test_the_group_of_the_second_container_is_not_the_first_ones() -> None:
    pod = pod_with(
        f"{G1},NVIDIA,1000,10:;;{G2},NVIDIA,2000,20:;",
        containers=(
            a_container(name="c0"),
            a_container(name="none", count=0),
            a_container(name="c2"),
        ),
    )
    row = a_row(pod_uid=pod.uid, pod=pod.name, container="c0", epoch=NOW_KUBELET)
    scene = knowing(a_scene(pod, rows=(row,), lock=pod), holding(pod, c0=f"{G1}-1"))

    grant = granted(scene)

    assert (grant.candidate.container.name, grant.group) == ("c2", 2)
    assert grant.shares == (a_share(uuid=G2, memory_mib=2000, core_percent=20),)


def test_a_pod_that_hami_never_placed_is_told_how_to_be_placed() -> None:
    pod = a_pod(name="train-1", annotations={"hami.io/vgpu-node": "node-1"})

    assert "schedulerName" in refused(scene_of(pod), RefusalReason.NO_ANNOTATION)


def test_a_gpumem_value_that_hami_drops_is_named() -> None:
    pod = a_pod(name="train-1", containers=(a_container(dropped_memory="3Gi"),))

    assert "3Gi" in refused(scene_of(pod), RefusalReason.DROPPED_REQUEST)
    # HAMi's scheduler takes no lock for a pod of which it keeps nothing.
    unlocked = knowing(a_scene(pod), holding(pod))
    assert "3Gi" in refused(unlocked, RefusalReason.DROPPED_REQUEST)


def test_a_malformed_annotation_is_refused_with_its_place() -> None:
    pod = pod_with(f"{G1},NVIDIA,x,1:;", groups_error="group 0: memory is not a number")

    assert "memory is not a number" in refused(scene_of(pod), RefusalReason.MALFORMED_ANNOTATION)


def test_an_annotation_for_another_node_is_refused() -> None:
    pod = a_pod(name="train-1", annotations=annotated(node="node-9"))

    assert "node-9" in refused(scene_of(pod), RefusalReason.WRONG_NODE)


def test_another_number_of_groups_than_containers_is_refused() -> None:
    pod = pod_with(f"{G1},NVIDIA,1,1:;{G1},NVIDIA,1,1:;")

    refused(scene_of(pod), RefusalReason.COUNT_MISMATCH)


def test_a_gpu_that_is_not_here_is_refused() -> None:
    assert "GPU-elsewhere" in refused(
        scene_of(pod_with("GPU-elsewhere,NVIDIA,1,1:;")), RefusalReason.UNKNOWN_GPU
    )


def test_a_bad_gpu_is_refused_with_its_reason() -> None:
    assert "XID 79" in refused(
        with_bad_gpu(scene_of(pod_with(f"{G1},NVIDIA,1,1:;"))), RefusalReason.BAD_GPU
    )


def test_memory_beyond_what_is_registered_is_refused_with_both_numbers() -> None:
    sentence = refused(scene_of(pod_with(f"{G1},NVIDIA,90000,1:;")), RefusalReason.MEMORY_EXCEEDED)

    assert "90000 MiB" in sentence
    assert "81559 MiB" in sentence


def test_compute_beyond_what_is_registered_is_refused() -> None:
    refused(scene_of(pod_with(f"{G1},NVIDIA,1,101:;")), RefusalReason.CORES_EXCEEDED)


def test_before_a_refusal_for_room_the_kubelet_is_asked_for_the_pod_in_the_way() -> None:
    holder = named_pod(2, phase=Phase.RUNNING)
    row = a_row(
        pod_uid=holder.uid,
        pod=holder.name,
        shares=(a_share(uuid=G1, memory_mib=80000),),
        epoch=NOW_KUBELET,
        confirmed=True,
    )
    pod = pod_with(f"{G1},NVIDIA,3000,30:;")
    scene = knowing(a_scene(pod, holder, rows=(row,), lock=pod), holding(pod))
    assert ask(scene) == AskKubelet(*holder.key)

    granted(knowing(scene, absent=(holder,)))
    held = knowing(scene, holding(holder, main=f"{G1}-0"))
    assert ask(held) == ListPods()
    refused(changed(held, listed=True), RefusalReason.MEMORY_EXCEEDED)


def test_what_one_pod_alone_has_too_much_of_is_refused_without_a_list() -> None:
    holder = named_pod(2, phase=Phase.RUNNING)
    row = a_row(
        pod_uid=holder.uid,
        pod=holder.name,
        shares=(a_share(uuid=G2),),
        epoch=NOW_KUBELET,
        confirmed=True,
    )
    pod = pod_with(f"{G1},NVIDIA,90000,30:;")

    refused(
        knowing(a_scene(pod, holder, rows=(row,), lock=pod), holding(pod)),
        RefusalReason.MEMORY_EXCEEDED,
    )


def test_a_new_kubelet_that_does_not_know_a_pod_yet_frees_nothing() -> None:
    holder = named_pod(2, phase=Phase.RUNNING)
    row = a_row(
        pod_uid=holder.uid,
        pod=holder.name,
        shares=(a_share(uuid=G1, memory_mib=80000),),
        epoch=OLD_KUBELET,
        confirmed=True,
    )
    pod = pod_with(f"{G1},NVIDIA,3000,30:;")
    scene = knowing(a_scene(pod, holder, rows=(row,), lock=pod), holding(pod), absent=(holder,))

    assert ask(scene) == ListPods()
    refused(changed(scene, listed=True), RefusalReason.MEMORY_EXCEEDED)


def test_the_peak_of_init_containers_counts_and_not_their_sum_with_the_apps() -> None:
    pod = pod_with(
        f"{G1},NVIDIA,80000,10:;{G1},NVIDIA,70000,10:;",
        containers=(a_container(name="init", role=Role.INIT), a_container()),
    )
    row = a_row(
        pod_uid=pod.uid,
        pod=pod.name,
        container="init",
        role=Role.INIT,
        epoch=NOW_KUBELET,
        shares=(a_share(uuid=G1, memory_mib=80000),),
    )
    scene = knowing(a_scene(pod, rows=(row,), lock=pod), holding(pod))
    recorded = type(scene.books)(NOW_KUBELET, frozenset({row.key}))
    scene = type(scene)(
        **{
            field: getattr(scene, field)
            for field in scene.__dataclass_fields__
            if field not in {"books", "records_read"}
        },
        books=recorded,
        records_read=True,
    )

    assert granted(scene).candidate.container.name == "main"


def test_a_replay_passes_every_gate_but_a_gpu_that_is_gone() -> None:
    pod = a_pod(name="train-1", annotations={}, phase=Phase.RUNNING)
    row = a_row(pod_uid=pod.uid, pod=pod.name, epoch=OLD_KUBELET, shares=(a_share(uuid=G1),))
    scene = knowing(a_scene(pod, rows=(row,)), holding(pod))

    assert granted(with_bad_gpu(scene)).replay == row
    refused(with_bad_gpu(scene, Condition.LOST), RefusalReason.BAD_GPU)


def test_a_container_starts_again_on_a_gpu_that_is_filtered_out_since_but_not_on_a_vanished() -> (
    None
):
    pod = a_pod(name="train-1", annotations={}, phase=Phase.RUNNING)
    row = a_row(pod_uid=pod.uid, pod=pod.name, epoch=OLD_KUBELET, shares=(a_share(uuid=G1),))
    scene = knowing(a_scene(pod, rows=(row,)), holding(pod))
    whole, split = a_gpu(index=0), a_gpu(index=0, mig_enabled=True)
    filtered, vanished, in_mig_mode = (
        an_inventory(gpus=(a_shared_gpu(gpu=gpu, present=False, there=there),))
        for gpu, there in ((whole, True), (whole, False), (split, True))
    )

    assert granted(changed(scene, inventory=filtered)).replay == row
    refused(changed(scene, inventory=vanished), RefusalReason.BAD_GPU)
    refused(changed(scene, inventory=in_mig_mode), RefusalReason.BAD_GPU)


def test_what_was_registered_up_to_a_minute_ago_still_counts() -> None:
    scene = scene_of(pod_with(f"{G1},NVIDIA,90000,1:;"))

    grant = granted(changed(scene, registered={G1: GpuUse(memory_mib=100000, core_percent=100)}))

    assert grant.shares[0].memory_mib == 90000


def test_a_driver_that_is_silent_for_too_long_is_named_as_the_reason() -> None:
    silent = a_shared_gpu(
        gpu=a_gpu(index=0), health=a_health(condition=Condition.UNMONITORED, serving=False)
    )
    scene = changed(
        scene_of(pod_with(f"{G1},NVIDIA,1,1:;")), inventory=an_inventory(gpus=(silent,))
    )

    assert "driver" in refused(scene, RefusalReason.DRIVER_UNRESPONSIVE)

"""What the container gets: nothing in an annotation is taken on trust."""

from agent.core.allocation.evidence import AskKubelet, Evidence, ListPods
from agent.core.allocation.room import GpuUse
from agent.core.cluster.pods import Phase, PodView
from agent.core.errors import RefusalReason
from agent.core.inventory.condition import Condition
from tests.builders import (
    a_container,
    a_gpu,
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
    refused_by(changed(held, listed=True), RefusalReason.MEMORY_EXCEEDED)


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

    refused_by(
        knowing(a_scene(pod, holder, rows=(row,), lock=pod), holding(pod)),
        RefusalReason.MEMORY_EXCEEDED,
    )


def test_a_replay_passes_every_gate_but_a_gpu_that_is_gone() -> None:
    pod = a_pod(name="train-1", annotations={}, phase=Phase.RUNNING)
    row = a_row(pod_uid=pod.uid, pod=pod.name, epoch=OLD_KUBELET, shares=(a_share(uuid=G1),))
    scene = knowing(a_scene(pod, rows=(row,)), holding(pod))

    assert granted(with_bad_gpu(scene)).replay == row
    refused_by(with_bad_gpu(scene, Condition.LOST), RefusalReason.BAD_GPU)


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
    refused_by(changed(scene, inventory=vanished), RefusalReason.BAD_GPU)
    refused_by(changed(scene, inventory=in_mig_mode), RefusalReason.BAD_GPU)


def test_what_was_registered_up_to_a_minute_ago_still_counts() -> None:
    scene = scene_of(pod_with(f"{G1},NVIDIA,90000,1:;"))

    grant = granted(changed(scene, registered={G1: GpuUse(memory_mib=100000, core_percent=100)}))

    assert grant.shares[0].memory_mib == 90000

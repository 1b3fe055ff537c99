"""A node whose pods hold slices already."""

import msgspec

from agent.cluster import PodView
from agent.ledger import ContainerKey, Holder, Ledger
from agent.model import Share
from tests.builders import a_container, a_gpu, a_row, a_shared_gpu, an_inventory
from tests.services.allocation.allocating import EPOCH, Desk, ids, placed


def running(number: int, containers: int) -> PodView:
    """A pod whose containers all run on GPUs."""
    asking = tuple(
        a_container(name=f"c{each}", running_id=f"cri-{number}-{each}")
        for each in range(containers)
    )
    return placed(number, containers=asking, reusable_name=False)


async def fill(desk: Desk, pods: int, containers: int, gpus: int, slices: int) -> None:
    """Pods that run, each container with a slice; the first GPU has its even part of them."""
    desk.inventory.set(
        an_inventory(
            gpus=[a_shared_gpu(gpu=a_gpu(index=n), split_count=slices) for n in range(gpus)]
        )
    )
    there = [running(number, containers) for number in range(1, pods + 1)]
    desk.see(*there)
    alive = {one.running_id or "" for pod in there for one in pod.containers}
    desk.containers.alive = alive | (desk.containers.alive or set())
    rows = tuple(
        msgspec.structs.replace(
            a_row(),
            key=ContainerKey(pod.uid, container.name),
            holder=Holder(pod.namespace, pod.name, container.name),
            shares=(Share(a_gpu(index=number % gpus).uuid, 1, 0),),
            slice_ids=ids(number // gpus, gpu=number % gpus),
            epoch=EPOCH,
            confirmed=True,
            lock=f"2026-09-01T11:00:00Z,{pod.namespace},{pod.name}",
        )
        for number, (pod, container) in enumerate(
            (pod, container) for pod in there for container in pod.containers
        )
    )
    await desk.state.commit(lambda _: Ledger(rows))

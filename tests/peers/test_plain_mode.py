"""Plain mode for pods that HAMi never sees: the kubelet's ids decide, no API server is asked."""

import contextlib

from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.api import notes_of
from tests.peers.lab.control import NODE_USER
from tests.peers.lab.part import until_answer
from tests.peers.lab.pods import a_container, a_pod, gpu_of, stray
from tests.peers.lab.running import ACCOUNT


def a_plain_pod(cluster, name, *counts, inits=()):
    """A telling pod that HAMi never sees, whose containers ask for so many slices."""

    def asking(kind, number, count, **more):
        return a_container(f"{kind}{number}", gpus=count, memory=None, cores=None, **more)

    containers = [asking("c", number, count) for number, count in enumerate(counts)]
    first = [asking("i", number, count, script="true") for number, count in enumerate(inits)]
    return cluster.telling(stray(a_pod(name, *containers, inits=tuple(first))))


def rows_by_holder(cluster):
    """The ids that the rows give each container that is known to hold some."""
    with contextlib.suppress(FileNotFoundError):
        return {
            (f"{one.holder.namespace}/{one.holder.pod}", one.holder.container): {*one.slice_ids}
            for one in cluster.all_rows()
            if one.holder
        }
    return {}


def visible(cluster, pod, container):
    told = cluster.told_environment(pod, container).get("NVIDIA_VISIBLE_DEVICES", "")
    return set(told.split(",")) - {""}


async def test_pods_of_every_shape_get_the_gpus_of_the_ids_that_the_kubelet_gave(cluster):
    mark = cluster.plane.audit.mark()
    path = cluster.root / "plain.yaml"
    path.write_text("scheduler: none\n")
    agent = await cluster.start_agent("--config", str(path))
    await cluster.until_allocatable()
    names = await cluster.run(
        a_plain_pod(cluster, "one", 1),
        a_plain_pod(cluster, "wide", 12),
        a_plain_pod(cluster, "parts", 2, 0, 1),
        a_plain_pod(cluster, "prepared", 1, inits=(3,)),
    )
    await cluster.until_told(*names)

    async def agrees():
        return rows_by_holder(cluster) == await cluster.kubelet.held(RESOURCE)

    await until_answer(agrees, 30.0, lambda: f"the rows differ: {rows_by_holder(cluster)}")
    held = await cluster.kubelet.held(RESOURCE)
    assert {("one", 1), ("wide", 12), ("parts", 2), ("parts", 1), ("prepared", 1)} == {
        (pod.rpartition("/")[2], len(ids)) for (pod, _), ids in held.items()
    }
    for (pod, container), ids in held.items():
        name = pod.rpartition("/")[2]
        assert {gpu_of(one) for one in ids} == visible(cluster, name, container)
        assert "CUDA_DEVICE_MEMORY_LIMIT_0" not in cluster.told_environment(name, container)
        assert {} == cluster.seen_mounts(name, container)
    assert set() == visible(cluster, "parts", "c1")
    assert 1 <= len(visible(cluster, "prepared", "i0")) <= 3
    assert [] == [note for name in names for note in notes_of(cluster.as_seen(name))]
    await agent.part.stop()
    asked = [cluster.plane.audit.since(mark, user) for user in (NODE_USER, ACCOUNT)]
    assert [[], []] == asked

"""GPU pods at once, and pairs of them back to back: the right shares for each, by few requests."""

import asyncio
from itertools import cycle, islice

import pytest

from tests.peers.lab.api import Object
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.grants import grants
from tests.peers.lab.pods import PODS, a_container, a_pod, key, name_of, phase_of
from tests.peers.lab.running import ACCOUNT, refused

COUNT = 20
CORES = 30
"""Three pods fill a GPU, and 20 nearly the node: a share given twice shows in the sums."""


def sized(cluster: Cluster, name: str, mib: int, percent: int = CORES) -> Object:
    """A telling pod of that size."""
    return cluster.telling(a_pod(name, a_container(memory=mib, cores=percent)))


async def wrongs(cluster: Cluster, asked: dict[str, tuple[int, int]]) -> list[str]:
    """What pods have, by their annotation or their inside, that is not what they asked for."""
    found = []
    for name, amounts in asked.items():
        wanted, told = cluster.expected_inside(name), await cluster.seen_inside(name)
        written = [
            (one.memory_mib, one.core_percent) for one in grants(cluster.as_seen(name))["main"]
        ]
        if wanted != told or [amounts] != written:
            found.append(f"{name}: asked for {amounts}, was promised {wanted}, was told {told}")
    return found


@pytest.mark.timeout(300)
async def test_20_pods_at_once_all_run_with_their_own_shares(cluster, table):
    agent = await cluster.start_registered_agent(user=ACCOUNT)
    mark = cluster.plane.audit.mark()
    asked = {f"burst-{number}": (20000 + 37 * number, CORES) for number in range(COUNT)}
    begun = await cluster.create(*(sized(cluster, name, mib) for name, (mib, _) in asked.items()))
    await cluster.until_running(*asked, within=240.0)
    seconds = asyncio.get_running_loop().time() - begun
    await cluster.until_settled(*asked)

    print(f"20 pods at once were Ready after {seconds:.1f} s")  # noqa: T201 -- for whoever looks
    table.hold("20 pods at once: all Ready (HAMi's plugin: 81 s)", seconds, 40.0)
    assert ([], {}) == (await wrongs(cluster, asked), cluster.oversold())
    assert [] == agent.events("alloc.refused")
    assert [] == refused(cluster.plane.audit.since(mark, ACCOUNT))


# Two pods of the same count back to back: each finds inside what was written for it alone.

NAMES = ("blue-{0}", "red-{0}"), ("web-{0}", "web-{0}1"), ("set-0", "beside-{0}")
"""Strangers; a name that begins with the other; that of a pod that ran until now."""


async def end(cluster, *names):
    """Have pods deleted at once, if they are there."""
    present = [name for name in names if key(name) in cluster.pods.objects]
    for name in present:
        await cluster.delete(name, grace=0)
    for name in present:
        await cluster.until_deleted(name)


@pytest.mark.parametrize(
    "tries",
    [
        pytest.param(12, marks=pytest.mark.timeout(300)),
        pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
    ],
)
async def test_two_pods_bound_back_to_back_never_swap_their_limits(cluster, agent, table, tries):
    before, denied = [], {}
    for number, shape in enumerate(islice(cycle(NAMES), tries)):
        names = [name.format(number) for name in shape]
        asked = dict(zip(names, ((1000 + number, 7), (20000 + number, 30)), strict=True))
        await end(cluster, *before, *names)
        await cluster.nodes.until_current()
        async with asyncio.TaskGroup() as group:
            pods = [sized(cluster, name, *amounts) for name, amounts in asked.items()]
            tasks = [group.create_task(cluster.api.create(PODS, pod)) for pod in pods]
        seen = [await cluster.decided(task.result()) for task in tasks]
        rejected = {name_of(pod): pod["status"] for pod in seen if phase_of(pod) == "Failed"}
        denied |= rejected
        served = {name: asked[name] for name in names if name not in rejected}
        assert ([], {}) == (await wrongs(cluster, served), cluster.oversold())
        before = [name for name in names if name != "set-0"]

    what = f"{tries} pairs placed by the scheduler, back to back"
    print(denied)  # noqa: T201 -- shown with a failure
    table.hold(f"{what}: refused", len(denied), 0, unit="")
    assert [] == cluster.lost()

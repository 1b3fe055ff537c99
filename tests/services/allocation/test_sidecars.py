"""Sidecars run beside the app containers: what is true lets a pod in, and what is oversold is told.

HAMi 2.10 counts a sidecar as an init container, so it places more than fits, and at times keeps
what is free.
"""

import msgspec
import pytest

from agent.cluster import Phase, Role
from agent.errors import Refusal, RefusalReason
from tests.builders import a_container
from tests.services.allocation.allocating import G1, a_desk, ids, placed

ROLES = {"s": Role.SIDECAR, "i": Role.INIT, "a": Role.APP}


def a_pod_of(number, text):
    """A pod such as `s30000 a30000`: sidecars, init containers and apps, each with its MiB."""
    words = text.split()
    containers = tuple(
        a_container(name=f"{word[0]}{place}", role=ROLES[word[0]])
        for place, word in enumerate(words)
    )
    groups = "".join(f"{G1},NVIDIA,{word[1:]},1:;" for word in words)
    return placed(number, groups, containers=containers)


async def run(desk, pod):
    """The kubelet admits the whole pod. Raises Refusal."""
    desk.bind(pod)
    held = {}
    for one in pod.containers:
        await desk.service.allocate(ids(len(desk.ledger.rows)))
        desk.records.keys |= {row.key for row in desk.ledger.rows_of(pod.uid)}
        if one.role is not Role.INIT:
            held[one.name] = ids(len(desk.ledger.rows) - 1)[0]
            desk.witness.admit(pod, **held)


OVERSOLD = {
    "a sidecar and an app each": ("s30000 a30000", "s30000 a30000", 120000),
    "init after a sidecar": ("s30000 i40000 a1000", "s5000 a20000", 95000),
}


@pytest.mark.parametrize(("first", "second", "total"), OVERSOLD.values(), ids=OVERSOLD)
async def test_what_hami_places_beyond_the_gpu_is_served_and_told(first, second, total):
    async with a_desk() as desk:
        await run(desk, a_pod_of(1, first))
        assert [] == desk.said
        await run(desk, a_pod_of(2, second))

        event = desk.said[-1]
        assert ("GpuOversold", True) == (event.reason, event.warning)
        assert f"has given out {total} MiB of memory of GPU 0" in event.text
        assert "which has 81559 MiB" in event.text
        assert "sidecars" in event.text


async def test_a_pod_that_truly_fits_is_served_although_hami_counts_a_peak_that_is_over():
    """For HAMi 2.10 the init phase never ends with a sidecar."""
    async with a_desk() as desk:
        pod = a_pod_of(1, "i60000 s1000 a10000")
        await run(desk, pod)
        containers = tuple(
            msgspec.structs.replace(one, has_run=True, succeeded=one.role is Role.INIT)
            for one in pod.containers
        )
        desk.see(msgspec.structs.replace(pod, phase=Phase.RUNNING, containers=containers))
        await run(desk, a_pod_of(2, "a70000"))

        assert [] == desk.said
        assert 4 == len(desk.ledger.rows)


@pytest.mark.parametrize(
    ("pods", "text", "refreshes"),
    [
        (["s50000 a50000"], "let its containers ask for less", 0),
        (["i1 s50000 a50000"], "let its containers ask for less", 0),
        (["s40000 a40000", "a50000"], "130000 MiB of memory promised, and it has 81559", 1),
    ],
    ids=["alone", "alone, behind an init container", "with another one, and no pod has ended"],
)
async def test_what_is_too_much_by_both_sums_is_refused(pods, text, refreshes):
    async with a_desk() as desk:
        *before, last = [a_pod_of(number, words) for number, words in enumerate(pods, 1)]
        for pod in before:
            await run(desk, pod)
        with pytest.raises(Refusal, match=text) as caught:
            await run(desk, last)

        assert RefusalReason.MEMORY_EXCEEDED is caught.value.gate
        assert refreshes == desk.refreshes

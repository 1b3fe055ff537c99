"""ResourceQuotas as HAMi counts them: what pods of a namespace hold, against two limits."""

import asyncio

import pytest

from agent.model import GpuUuid, Share
from agent.sandbox.api_errors import Json
from agent.sandbox.scheduler.filter import filter_pod
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.registry import read_offer
from agent.sandbox.scheduler.usage import Quotas, Reservation, Usage
from agent.sandbox.scheduler.webhook import review_pod
from tests.fakes.chance import Seeded
from tests.fakes.scheduler_cluster import REGISTER, FakeCluster, register_of, scheduling
from tests.fakes.scheduler_vectors import build_pod

A, B = GpuUuid("GPU-a"), GpuUuid("GPU-b")
MEMORY, CORES = "limits.nvidia.com/gpumem", "limits.nvidia.com/gpucores"


def quota(name: str, namespace: str = "default", **hard: object) -> Json:
    keys = {"memory": MEMORY, "cores": CORES}
    limits = {keys.get(key, key): value for key, value in hard.items()}
    return {"metadata": {"name": name, "namespace": namespace}, "spec": {"hard": limits}}


def holding(memory_mib: int, cores: int, namespace: str = "default") -> Usage:
    usage = Usage()
    groups = [[Share(A, memory_mib, cores)]]
    usage.reserve("u", Reservation("n1", groups, 0, namespace=namespace))
    return usage


def asked(count: int, memory_mib: int, cores: int = 0) -> Json:
    limits = {"nvidia.com/gpu": count, "nvidia.com/gpumem": memory_mib}
    limits["nvidia.com/gpucores"] = cores
    return {"name": f"c{memory_mib}", "limits": limits}


def test_what_a_namespace_holds_and_what_is_asked_may_reach_the_limit() -> None:
    quotas = Quotas(holding(1000, 20), 1)
    quotas.see("ADDED", quota("q", memory=1500, cores=50))

    assert quotas.fits("default", 500, 30)
    assert not quotas.fits("default", 501, 0)
    assert not quotas.fits("default", 0, 31)
    assert quotas.fits("other", 10**6, 10**6)


def test_what_other_namespaces_hold_does_not_count() -> None:
    quotas = Quotas(holding(1000, 20, "other"), 1)
    quotas.see("ADDED", quota("q", memory=1000))

    assert quotas.fits("default", 1000, 0)


def test_the_memory_factor_multiplies_the_limit() -> None:
    quotas = Quotas(holding(0, 0), 4)
    quotas.see("ADDED", quota("q", memory=100, cores=100))

    assert quotas.fits("default", 400, 100)
    assert not quotas.fits("default", 401, 0)
    assert not quotas.fits("default", 0, 101)


@pytest.mark.parametrize("hard", [{"pods": "1"}, {"memory": "1500m"}, {"requests.cpu": "1"}])
def test_other_limits_and_fractions_are_none(hard: dict[str, str]) -> None:
    quotas = Quotas(Usage(), 1)
    quotas.see("ADDED", quota("q", **hard))

    assert quotas.fits("default", 10**6, 10**6)


def test_the_last_quota_seen_counts_and_one_that_goes_clears_the_limit() -> None:
    quotas = Quotas(Usage(), 1)
    quotas.see("ADDED", quota("first", memory=100))
    quotas.see("ADDED", quota("second", memory=200))
    assert quotas.fits("default", 200, 0)

    quotas.see("MODIFIED", quota("first", memory=50))
    assert not quotas.fits("default", 51, 0)

    quotas.see("DELETED", quota("second", memory=200))
    assert quotas.fits("default", 10**6, 0)


def test_what_went_while_nobody_looked_is_forgotten() -> None:
    quotas = Quotas(Usage(), 1)
    quotas.see("ADDED", quota("q", memory=0))
    assert not quotas.fits("default", 1, 0)

    quotas.retain(frozenset({"default/other"}))

    assert quotas.fits("default", 1, 0)


@pytest.mark.parametrize(
    ("spec", "fits"),
    [
        ({"containers": [asked(1, 600)]}, True),
        ({"containers": [asked(1, 600), asked(1, 401)]}, False),
        ({"containers": [asked(2, 501)]}, False),
        ({"initContainers": [asked(1, 1000), asked(1, 900)], "containers": [asked(1, 600)]}, True),
        ({"initContainers": [asked(1, 1001)], "containers": [asked(1, 1)]}, False),
    ],
)
def test_a_pod_counts_by_its_greatest_moment(spec: Json, *, fits: bool) -> None:
    quotas = Quotas(Usage(), 1)
    quotas.see("ADDED", quota("q", memory=1000))
    offer = read_offer({REGISTER: register_of("GPU-a", "GPU-b")})
    assert offer is not None
    nodes = {"n1": offer.state("n1", {})}
    pod = build_pod(spec)

    filtered = filter_pod(pod, ["n1"], nodes, SchedulerSettings(), Seeded(), quotas)

    assert fits == bool(filtered.nodes)
    assert fits == review_pod(pod, SchedulerSettings(), quotas).is_allowed
    if not fits:
        assert "ResourceQuotaNotFit" in filtered.failed["n1"]


async def test_a_pod_over_the_quota_waits_until_the_quota_grows() -> None:
    async with scheduling(FakeCluster("GPU-a")) as cluster:
        cluster.store.create("resourcequotas", quota("q", memory=500))
        await asyncio.sleep(0.1)
        cluster.submit("p")
        await cluster.until(lambda: cluster.condition("p") != "")
        expected = "0/1 nodes are available: 1 1/1 ResourceQuotaNotFit."
        assert expected == cluster.condition("p")

        grown = quota("q", memory=1000)["spec"]
        cluster.store.update("resourcequotas", "default", "q", lambda held: held | {"spec": grown})
        await cluster.until(lambda: cluster.is_bound("p"))

        assert cluster.is_bound("p")

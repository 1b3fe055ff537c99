"""Rules of the scheduler model that no vector reaches."""

import datetime as dt

import pytest

from agent.core.gpu import GpuUuid
from agent.core.share import Share
from agent.sandbox.scheduler.lock import Claim, ContentionError, LockError, claim_lock
from agent.sandbox.scheduler.model import Load, NodeState, SchedulerSettings
from agent.sandbox.scheduler.pending import Backoff
from agent.sandbox.scheduler.requests import parse_quantity
from agent.sandbox.scheduler.steering import BadWeightsError, read_steering
from agent.sandbox.scheduler.usage import Reservation, Usage
from tests.fakes.clock import START
from tests.fakes.scheduler_vectors import build_pod

A, B = GpuUuid("GPU-a"), GpuUuid("GPU-b")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", 5),
        (7, 7),
        ("1k", 1000),
        ("2Ki", 2048),
        ("1e3", 1000),
        ("1.5k", 1500),
        ("500m", None),
        ("2000m", 2),
        ("1.5", None),
        ("-3", -3),
        ("", None),
        (None, None),
        ("much", None),
        ("1 Gi", None),
    ],
)
def test_a_quantity_is_a_whole_number_or_nothing(text: object, expected: int | None) -> None:
    assert expected == parse_quantity(text)


@pytest.mark.parametrize(
    "text", ["slot=-1,core=1,memory=1", "slot=a,core=1,memory=1", "slot=0,core=0,memory=0", ""]
)
def test_unreadable_weights_are_refused(text: str) -> None:
    with pytest.raises(BadWeightsError, match=r"invalid hami\.io/device-scoring-weights"):
        read_steering({"hami.io/device-scoring-weights": text}, SchedulerSettings())


def test_a_pod_counts_by_the_greater_of_its_init_peak_and_its_sum() -> None:
    groups = [
        [Share(A, 8000, 50)],
        [Share(A, 3000, 60), Share(B, 100, 1)],
        [Share(A, 1000, 10)],
        [Share(A, 2000, 20)],
    ]

    during, after = Reservation("n", groups, 2), Reservation("n", groups, 2, is_past_init=True)

    assert {A: Load(2, 8000, 60), B: Load(1, 100, 1)} == during.loads()
    assert {A: Load(2, 3000, 30)} == after.loads()


def test_only_pods_that_are_still_there_are_counted_after_a_gap() -> None:
    usage = Usage()
    usage.reserve("one", Reservation("n", [[Share(A, 1, 1)]], 0))
    usage.reserve("two", Reservation("n", [[Share(A, 2, 2)]], 0))

    usage.retain({"two"})

    assert {A: Load(1, 2, 2)} == usage.loads("n")
    assert {} == usage.loads("n", without="two")


def test_a_pod_with_unreadable_groups_is_not_counted() -> None:
    pod = build_pod({"containers": []})
    pod["metadata"]["annotations"] = {
        "hami.io/vgpu-node": "n",
        "hami.io/vgpu-devices-allocated": "GPU-a,NVIDIA,x,1:;",
    }
    usage = Usage()

    usage.observe(pod)

    assert {} == usage.loads("n")


async def claim(text: str) -> Claim:
    async def is_alive(_: str, name: str) -> bool:
        return name == "alive"

    return await claim_lock(text, ("default", "p"), START, 300.0, is_alive)


async def test_a_lock_is_taken_over_from_the_dead_and_the_late_only() -> None:
    young = (START - dt.timedelta(seconds=299)).strftime("%Y-%m-%dT%H:%M:%SZ")
    old = (START - dt.timedelta(seconds=301)).strftime("%Y-%m-%dT%H:%M:%SZ")

    assert Claim.HOLD is await claim(f"{young},default,p")
    assert Claim.TAKE is await claim(f"{young},default,dead")
    assert Claim.TAKE is await claim(f"{old},default,alive")
    assert Claim.TAKE is await claim(old)
    for held in (f"{young},default,alive", young):
        with pytest.raises(ContentionError):
            await claim(held)


async def test_a_lock_of_two_parts_is_an_error() -> None:
    with pytest.raises(LockError, match="has 2 parts"):
        await claim("2026-08-21T06:20:39Z,default")


def test_an_empty_node_has_no_score() -> None:
    assert 0.0 == NodeState("n", ()).score()


def test_backoff_doubles_up_to_its_most() -> None:
    backoff = Backoff(first=1.0, most=10.0)

    assert [1.0, 2.0, 4.0, 8.0, 10.0, 10.0] == [backoff.delay(count) for count in range(1, 7)]

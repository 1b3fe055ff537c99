"""Rules of the scheduler model that no vector reaches."""

import pytest

from agent.model import GpuUuid, Share
from agent.sandbox.scheduler.loop import PlacingBackoff
from agent.sandbox.scheduler.model import Load, RegisteredNode
from agent.sandbox.scheduler.requests import parse_quantity
from agent.sandbox.scheduler.usage import Reservation, Usage
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


def placed(*ends: int | None, **metadata: str) -> dict[str, object]:
    """A placed pod with an init container of 8000 MiB and another of 1000; how the first ended."""
    spec = {"initContainers": [{"name": "i"}], "containers": [{"name": "c"}]}
    pod = build_pod(spec)
    pod["metadata"] |= metadata
    pod["metadata"]["annotations"] = {
        "hami.io/vgpu-node": "n",
        "hami.io/vgpu-devices-allocated": "GPU-a,NVIDIA,8000,0:;GPU-a,NVIDIA,1000,0:;",
    }
    states = [{"running": {}} if end is None else {"terminated": {"exitCode": end}} for end in ends]
    pod["status"]["initContainerStatuses"] = [{"state": state} for state in states]
    return pod


def memory_after(*pods: dict[str, object]) -> int:
    usage = Usage()
    for pod in pods:
        usage.observe(pod)
    return usage.loads("n")[A].memory_mib


def test_the_peak_goes_with_the_news_that_the_init_containers_succeeded() -> None:
    assert 8000 == memory_after(placed())
    assert 8000 == memory_after(placed(), placed(None))
    assert 8000 == memory_after(placed(), placed(1))
    assert 1000 == memory_after(placed(), placed(None), placed(0))


def test_the_peak_that_went_does_not_come_back() -> None:
    assert 1000 == memory_after(placed(), placed(0), placed(None))


def test_a_new_scheduler_counts_the_peak_until_it_hears_of_the_pod_again() -> None:
    assert 8000 == memory_after(placed(0))
    assert 1000 == memory_after(placed(0), placed(0))


def test_a_pod_that_is_being_deleted_keeps_its_peak() -> None:
    leaving = placed(0, deletionTimestamp="2026-08-21T06:20:39Z")

    assert 8000 == memory_after(placed(), leaving)


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


def test_an_empty_node_has_no_score() -> None:
    assert 0.0 == RegisteredNode("n", ()).score()


def test_backoff_doubles_up_to_its_most() -> None:
    backoff = PlacingBackoff(first=1.0, most=10.0)

    assert [1.0, 2.0, 4.0, 8.0, 10.0, 10.0] == [backoff.delay(count) for count in range(1, 7)]

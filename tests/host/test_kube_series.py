"""Which Events are sent: one object for each series, and few of them."""

from agent.cluster import NodeEvent, PodUid
from agent.kube.events import (
    BURST,
    PODS_BURST,
    PODS_REFILL,
    REMEMBERED,
    EventBook,
    SeriesStep,
    event_name,
)

ILL = NodeEvent("GpuUnhealthy", "XID 79 on GPU 1", warning=True)


def about(number: int, pod: str = "one") -> NodeEvent:
    return NodeEvent("AllocationRefused", f"why {number}", True, "team-a", pod, PodUid("u"))


def send(book: EventBook, event: NodeEvent, now: float) -> SeriesStep:
    """Plan, and write where the plan says so."""
    step, series = book.plan(event, event.pod or "node-1", now)
    if step in {SeriesStep.CREATE, SeriesStep.UPDATE}:
        book.sent(event, series, now)
    return step


def test_a_series_is_created_then_counted_then_updated_once_a_minute():
    book = EventBook()

    steps = [send(book, ILL, now) for now in (0, 1, 59, 60, 61, 121)]

    assert ["create", "count", "count", "update", "count", "update"] == steps
    assert 7 == book.plan(ILL, "node-1", 122)[1].count


def test_another_text_is_another_series():
    book = EventBook()
    other = NodeEvent("GpuUnhealthy", "XID 79 on GPU 2", warning=True)

    assert [SeriesStep.CREATE, SeriesStep.CREATE] == [send(book, ILL, 0), send(book, other, 0)]


def test_an_object_has_a_burst_and_then_one_every_five_minutes():
    book = EventBook()
    burst = [send(book, about(n), 0) for n in range(BURST + 10)]
    later = [send(book, about(100 + n), 300 + n) for n in range(10)]

    assert [SeriesStep.CREATE] * BURST + [SeriesStep.DROP] * 10 == burst
    assert [SeriesStep.CREATE] + [SeriesStep.DROP] * 9 == later


def test_one_object_does_not_use_up_the_allowance_of_another():
    book = EventBook()
    for n in range(BURST + 1):
        send(book, about(n), 0)

    assert SeriesStep.CREATE == send(book, about(1, pod="two"), 0)
    assert SeriesStep.CREATE == send(book, ILL, 0)


def test_pods_under_ever_new_names_share_an_allowance_and_take_nothing_of_the_nodes():
    book = EventBook()
    storm = [send(book, about(1, pod=f"pod-{n}"), 0) for n in range(PODS_BURST + 50)]
    later = [send(book, about(1, pod=f"late-{n}"), 2 * PODS_REFILL) for n in range(10)]

    assert [SeriesStep.CREATE] * PODS_BURST + [SeriesStep.DROP] * 50 == storm
    assert [SeriesStep.CREATE] * 2 + [SeriesStep.DROP] * 8 == later
    assert SeriesStep.CREATE == send(book, ILL, 0)


def test_what_pods_make_us_say_of_the_node_hides_none_of_its_other_events():
    book = EventBook()
    refused = [NodeEvent("AllocationRefused", f"asks for {n} slice(s)", True) for n in range(99)]

    steps = [send(book, event, 0) for event in refused]

    assert [SeriesStep.CREATE] * BURST + [SeriesStep.DROP] * (99 - BURST) == steps
    assert SeriesStep.CREATE == send(book, ILL, 0)


def test_a_failed_write_costs_nothing_and_is_no_occurrence():
    book = EventBook()
    for _ in range(BURST + 5):
        step, series = book.plan(ILL, "node-1", 0)
        book.failed(series)
    step, series = book.plan(ILL, "node-1", 0)

    assert (SeriesStep.CREATE, 1) == (step, series.count)


def test_memory_is_bounded():
    book = EventBook()
    for n in range(REMEMBERED + 10):
        send(book, about(n, pod=f"pod-{n}"), n * PODS_REFILL)
    now = REMEMBERED * PODS_REFILL + 20

    assert SeriesStep.CREATE == send(book, about(0, pod="pod-0"), now)
    assert SeriesStep.COUNT == send(book, about(REMEMBERED + 9, pod=f"pod-{REMEMBERED + 9}"), now)


def test_a_name_is_the_object_and_a_hash_and_the_same_after_a_restart():
    name = event_name(ILL, "node-1")

    assert name == event_name(NodeEvent("GpuUnhealthy", "XID 79 on GPU 1", warning=True), "node-1")
    assert name.startswith("node-1.")
    assert 16 == len(name.rpartition(".")[2])


def test_a_long_name_stays_a_name():
    assert 253 > len(event_name(ILL, "a" * 253))
    assert ".-" not in event_name(ILL, "a" * 199 + ".-" + "b" * 50)

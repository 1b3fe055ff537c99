"""The journal keeps what happened in 24 hours, the newest first, and no more than it may."""

from agent.core.cluster.changes import NodeEvent
from agent.core.errors import Refusal, RefusalReason
from agent.services import journal as module
from agent.services.journal import NodeJournal
from agent.services.report.announce import NodeEventQueue
from tests.builders import NOON, a_row
from tests.fakes.clock import ManualClock

REFUSAL = Refusal(RefusalReason.NO_LOCK, "no lock")


def test_the_newest_comes_first_and_yesterday_is_gone():
    clock = ManualClock(NOON)
    journal = NodeJournal(clock)
    journal.changed(NodeEvent("GpuUnhealthy", "GPU 1", warning=True))
    clock.advance(3600)
    journal.changed(NodeEvent("GpuRecovered", "GPU 1", warning=False))

    assert ["GpuRecovered", "GpuUnhealthy"] == [entry.reason for entry in journal.changes]

    clock.advance(23 * 3600)
    assert ["GpuRecovered"] == [entry.reason for entry in journal.changes]


def test_a_refusal_names_the_container_if_it_is_known():
    journal = NodeJournal(ManualClock(NOON))
    row = a_row()
    journal.refused(REFUSAL, None)
    journal.refused(REFUSAL, row)

    known, unknown = journal.refusals
    assert ("HA-2005", "no lock", NOON) == (known.reason, known.text, known.at)
    assert (row.namespace, row.pod, row.key.container) == (
        known.namespace,
        known.pod,
        known.container,
    )
    assert ("", "", "") == (unknown.namespace, unknown.pod, unknown.container)


def test_a_pod_that_is_refused_for_ever_takes_no_more_room_than_the_limit():
    journal = NodeJournal(ManualClock(NOON))
    for _ in range(module.LIMIT + 7):
        journal.refused(REFUSAL, None)

    assert module.LIMIT == len(journal.refusals)


def test_every_event_that_is_queued_is_a_change_and_one_that_is_repeated_is_not():
    journal = NodeJournal(ManualClock(NOON))
    queue = NodeEventQueue(journal.changed)
    event = NodeEvent("ConfigApplied", "applied", warning=False)
    queue.say(event)
    queue.say(event)

    assert ["ConfigApplied"] == [entry.reason for entry in journal.changes]

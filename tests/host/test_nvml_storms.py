"""More events than a reader takes: none that matters is lost."""

import pytest

from agent.gpu import events as nvml_events
from agent.gpu.handles import Handles
from agent.model import DriverEvent, EventKind, GpuUuid

pytestmark = pytest.mark.looptime(False)

G0, G1 = GpuUuid("GPU-0"), GpuUuid("GPU-1")


async def test_a_reader_that_fell_behind_hears_of_each_different_report_all_the_same(
    library, monkeypatch
):
    monkeypatch.setattr(nvml_events, "EVENT_LIMIT", 3)
    stream = nvml_events.EventStream(library, Handles(library))
    for number in (13, 13, 13, 13, 13, 48, 13):
        stream.put(DriverEvent(EventKind.XID, G0, number))

    assert [13, 13, 13, 13, 13, 13, 48] == [(await stream.next()).xid for _ in range(7)]
    stream.put(DriverEvent(EventKind.XID, G0, 79))
    assert 79 == (await stream.next()).xid


async def test_a_reader_that_fell_too_far_behind_is_told_to_look_at_everything(
    library, monkeypatch
):
    monkeypatch.setattr(nvml_events, "EVENT_LIMIT", 2)
    stream = nvml_events.EventStream(library, Handles(library))
    for _ in range(2):
        for number in range(1000, 1007):
            stream.put(DriverEvent(EventKind.XID, G0, number))
        events = [await stream.next() for _ in range(6)]

        assert [1000, 1001, 1002, 1003, 1004, None] == [event.xid for event in events]
        assert EventKind.CHANGED is events[-1].kind


async def test_no_number_of_different_reports_buries_one_that_has_a_name_or_is_of_another_gpu(
    library, monkeypatch
):
    monkeypatch.setattr(nvml_events, "EVENT_LIMIT", 2)
    stream = nvml_events.EventStream(library, Handles(library))
    last = [
        DriverEvent(EventKind.XID, G0, 48),
        DriverEvent(EventKind.ECC_DOUBLE, G0),
        DriverEvent(EventKind.XID, G1, 1234),
    ]
    for event in (*(DriverEvent(EventKind.XID, G0, number) for number in range(1000, 1009)), *last):
        stream.put(event)
    events = [await stream.next() for _ in range(9)]

    assert last == events[5:8]
    assert DriverEvent(EventKind.CHANGED) == events[8]

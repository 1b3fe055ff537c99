"""The metrics page shows the cells as they are now, in both forms, and nothing twice."""

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.registry import Collector

from agent.core.cluster.pods import PodUid, Role
from agent.core.inventory.condition import Condition
from agent.core.inventory.gpu import NO_INDEX, GpuSample, Sampled
from agent.core.inventory.share import Share
from agent.core.inventory.slices import SliceGroup, SliceList, slice_id
from agent.core.node.readiness import Check
from agent.core.state.ledger import Ledger
from agent.kit.cell import Cell
from agent.kit.tally import Durations, Tally
from agent.web import metrics
from agent.web.metrics import OPENMETRICS, Gauge, MetricCells, MetricSources, MetricsPage
from agent.web.status import labelled
from tests.builders import NOON, a_gpu, a_health, a_row, a_shared_gpu, a_uuid, an_inventory
from tests.doors.metrics_page import facts, scrape
from tests.doors.web_client import serving
from tests.unit.core.allocation.plain_scene import a_plain_row, ids

pytestmark = pytest.mark.looptime(False)

GIB = 2**30


async def samples(name, **parts):
    """Label values (sorted by label) and value of every series of that name."""
    text, _ = await scrape(**parts)
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for family in parse_text(text)
        for sample in family.samples
        if sample.name == f"hami_agent_{name}"
    }


class CountingSource(Collector):
    """A collector that is asked for its series."""

    def __init__(self):
        self.asked = 0

    def collect(self):
        self.asked += 1
        return iter(())


async def test_a_page_that_many_ask_for_is_rendered_once_in_a_while(monkeypatch):
    series = CountingSource()
    page = MetricsPage(series).page
    of_the_page = series.asked  # the registry asks for the names

    async def asked(times, accept="*/*"):
        async with serving({"/metrics": page}) as (_, client):
            for _ in range(times):
                async with client.get("/metrics", headers={"Accept": accept}) as answer:
                    assert 200 == answer.status
        return series.asked - of_the_page

    monkeypatch.setattr(metrics, "KEPT", 1000.0)
    assert 1 == await asked(20)
    assert 2 == await asked(20, OPENMETRICS)

    monkeypatch.setattr(metrics, "KEPT", 0.0)
    page = MetricsPage(series).page
    of_the_page = series.asked
    assert 20 == await asked(20)


async def test_the_build_names_itself():
    assert {("json", "3.11.7", "abc", "0.1.0"): 1} == await samples("build_info")


async def test_the_driver_names_its_version():
    inventory = msgspec.structs.replace(an_inventory(), driver_version="570.148.08")

    assert {("570.148.08",): 1} == await samples("driver_info", cells=facts(inventory))
    unknown = msgspec.structs.replace(inventory, driver_version="")
    assert {} == await samples("driver_info", cells=facts(unknown))


async def test_readiness_and_degradation_are_apart():
    checks = (
        Check("state", ok=True),
        Check("stream", ok=False),
        Check("api", ok=False, required=False),
        Check("hook", ok=True, required=False),
    )

    assert {("state",): 1, ("stream",): 0} == await samples("ready", checks=checks)
    assert {("api",): 1, ("hook",): 0} == await samples("degraded", checks=checks)


async def test_gpus_are_named_in_their_order_also_those_that_are_gone():
    inventory = an_inventory(count=3)
    gone = msgspec.structs.replace(inventory.gpus[0], present=False)

    named = labelled(msgspec.structs.replace(inventory, gpus=(gone, *inventory.gpus[1:])))

    assert ["0", "1", "2"] == [label for label, _ in named]


async def test_a_gpu_is_described_once():
    cells = facts(an_inventory(gpus=[a_shared_gpu(gpu=a_gpu(index=3, name="T4", numa=None))]))

    assert {("3", "hami-core", "T4", "", "0000:13:00.0", a_uuid(3)): 1} == await samples(
        "gpu_info", cells=cells
    )


async def test_a_gpu_says_how_much_it_is_used_and_nothing_when_it_does_not_tell():
    told = {
        a_uuid(0): GpuSample(a_uuid(0), gpu_percent=93, memory_percent=41, used_mib=7168),
        a_uuid(1): GpuSample(a_uuid(1), gpu_percent=None, memory_percent=None, used_mib=1),
    }
    cells = msgspec.structs.replace(
        facts(an_inventory(count=3)),
        newest=lambda uuid: Sampled(NOON, told[uuid]) if uuid in told else None,
    )

    assert {("0",): 0.93} == await samples("gpu_utilization_ratio", cells=cells)
    assert {("0",): 0.41} == await samples("gpu_memory_utilization_ratio", cells=cells)
    assert {("0",): 7 * GIB, ("1",): 2**20} == await samples("gpu_memory_used_bytes", cells=cells)


async def test_one_condition_of_a_gpu_holds():
    bad = a_shared_gpu(health=a_health(condition=Condition.BAD))
    cells = facts(an_inventory(gpus=[bad]))

    found = await samples("gpu_health", cells=cells)
    assert {("0", "bad")} == {labels for labels, value in found.items() if value == 1}
    assert {("0", c.value) for c in Condition} == set(found)
    assert {("0",): NOON.timestamp()} == await samples(
        "gpu_health_since_timestamp_seconds", cells=cells
    )


async def test_slices_are_counted_by_state_and_by_gpu():
    ids = [tuple(slice_id(a_uuid(gpu), n) for n in range(3 + gpu)) for gpu in range(2)]
    row = a_row(shares=(Share(a_uuid(1), 1024, 10),), slice_ids=ids[1][:2])
    cells = facts(
        an_inventory(count=2),
        (
            SliceGroup(a_uuid(0), ids[0], healthy=False, numa=0),
            SliceGroup(a_uuid(1), ids[1], healthy=True, numa=0),
        ),
        (row,),
    )

    assert {
        ("0", "healthy"): 0,
        ("0", "unhealthy"): 3,
        ("1", "healthy"): 4,
        ("1", "unhealthy"): 0,
    } == await samples("slices", cells=cells)
    assert {("0",): 0, ("1",): 2} == await samples("slices_allocated", cells=cells)


async def test_memory_is_promised_by_kubernetes_arithmetic_in_bytes():
    gpu = a_shared_gpu(gpu=a_gpu(memory_mib=16384), registered_mib=32768)
    rows = tuple(
        a_row(container=name, role=role, group=place, shares=(Share(a_uuid(0), mib, 0),))
        for place, (name, role, mib) in enumerate(
            (
                ("log", Role.SIDECAR, 1024),
                ("setup", Role.INIT, 1024 * 3),
                ("one", Role.APP, 1024),
                ("two", Role.APP, 1024),
            )
        )
    )
    cells = facts(an_inventory(gpus=[gpu]), rows=rows)

    assert {("0",): 4 * GIB} == await samples("memory_promised_bytes", cells=cells)
    assert {("0",): 32 * GIB} == await samples("memory_sellable_bytes", cells=cells)


async def test_limits_of_plain_mode_are_promised_and_its_slices_are_held():
    gpu = a_shared_gpu(gpu=a_gpu(memory_mib=16384))
    limited = a_plain_row(slice_ids=ids(0))
    free = a_plain_row(uid=PodUid("b" * 32), slice_ids=ids(1, 2), limited=False)
    cells = MetricCells(
        Cell(an_inventory(gpus=[gpu])), Cell(SliceList(1)), Cell(Ledger((limited, free)))
    )

    assert {("0",): 8155 * 2**20} == await samples("memory_promised_bytes", cells=cells)
    assert {("0",): 3} == await samples("slices_allocated", cells=cells)


async def test_a_gone_gpu_whose_index_is_taken_goes_by_its_uuid():
    gone = a_shared_gpu(gpu=a_gpu(uuid="GPU-old", index=0), present=False)
    cells = facts(an_inventory(gpus=[gone, a_shared_gpu()]))

    assert {("GPU-old",), ("0",)} == set(await samples("memory_sellable_bytes", cells=cells))


async def test_a_gpu_that_left_keeps_its_label_and_is_described_while_something_is_counted_of_it():
    counted = Tally("xid_events_total", "XIDs.", ("gpu", "xid"))
    for uuid in (a_uuid(0), a_uuid(1), a_uuid(9), "unknown"):
        counted.add(uuid, "31")
    left = [a_shared_gpu(gpu=a_gpu(index=n)) for n in (0, 1, 2)]
    taken = a_shared_gpu(gpu=a_gpu(uuid="GPU-new", index=1))
    cells = msgspec.structs.replace(facts(an_inventory(gpus=[taken])), gone=lambda: left)
    parts = {"cells": cells, "series": MetricSources((counted,))}

    events = await samples("xid_events_total", **parts)
    assert {"0", a_uuid(1), a_uuid(9), "unknown"} == {gpu for gpu, _ in events}
    described = await samples("gpu_info", **parts)
    assert {("0", a_uuid(0)), ("1", "GPU-new"), (a_uuid(1),) * 2, (a_uuid(9),) * 2} == {
        (labels[0], labels[-1]) for labels in described
    }
    assert {("1",)} == set(await samples("slices_allocated", **parts))


async def test_gpus_of_unknown_index_go_by_their_uuids():
    gone = [a_shared_gpu(gpu=a_gpu(uuid=f"GPU-{n}", index=NO_INDEX), present=False) for n in "ab"]
    cells = facts(an_inventory(gpus=[a_shared_gpu(), *gone]))
    names = set(await samples("memory_sellable_bytes", cells=cells))

    assert {("0",), ("GPU-a",), ("GPU-b",)} == names


async def test_tallies_of_one_name_are_added_up():
    one, two = (Tally("registrations_total", "Register calls.", ("trigger",)) for _ in range(2))
    one.add("start")
    two.add("start")
    two.add("stream_lost")
    series = MetricSources(tallies=(one, two, Tally("checkpoint_errors", "Failed writes.")))

    assert {("start",): 2, ("stream_lost",): 1} == await samples(
        "registrations_total", series=series
    )
    assert {(): 0} == await samples("checkpoint_errors_total", series=series)


async def test_a_gpu_goes_by_the_same_label_in_what_is_counted_of_it():
    xids = Tally("xid_events_total", "XIDs reported", ("gpu", "xid"))
    for gpu in (a_uuid(1), a_uuid(1), "GPU-gone", "unknown"):
        xids.add(gpu, "79")
    told = {"cells": facts(an_inventory(count=2)), "series": MetricSources(tallies=(xids,))}

    assert {("1", "79"): 2, ("GPU-gone", "79"): 1, ("unknown", "79"): 1} == await samples(
        "xid_events_total", **told
    )
    assert {("0",), ("1",)} == set(await samples("slices_allocated", **told))


async def test_what_is_expected_is_shown_before_it_is_counted():
    refused = Tally("allocations_total", "Answers.", ("result",), expected=[("refused",)])
    series = MetricSources(tallies=(refused,))

    assert {("refused",): 0} == await samples("allocations_total", series=series)
    refused.add("refused")
    assert {("refused",): 1} == await samples("allocations_total", series=series)


async def test_what_the_health_of_a_gpu_means_is_told_with_the_id_to_look_up():
    text = a_health(condition=Condition.BAD, cause="xid", text="from the driver")
    bad = msgspec.structs.replace(text, action="reset", runbook="H-079")
    gpus = [a_shared_gpu(health=bad), a_shared_gpu(gpu=a_gpu(index=1))]

    assert {
        ("reset", "xid", "bad", "0", "H-079"): 0,
        ("none", "none", "ok", "1", ""): 1,
    } == await samples("gpu_served", cells=facts(an_inventory(gpus=gpus)))


async def test_durations_of_one_name_are_added_up():
    one, two = (Durations("rpc_duration_seconds", "Calls.", ("code",), (0.5,)) for _ in range(2))
    one.observe(0.25, "OK")
    two.observe(4.0, "OK")
    two.observe(1.0, "UNKNOWN")
    series = MetricSources(durations=(one, two))

    assert {
        ("OK", "0.5"): 1,
        ("OK", "+Inf"): 2,
        ("UNKNOWN", "0.5"): 0,
        ("UNKNOWN", "+Inf"): 1,
    } == await samples("rpc_duration_seconds_bucket", series=series)
    assert {("OK",): 4.25, ("UNKNOWN",): 1.0} == await samples(
        "rpc_duration_seconds_sum", series=series
    )


async def test_readings_are_asked_at_every_scrape():
    series = MetricSources(readings=(Gauge("checkpoint_generation", "Generation.", lambda: 7),))

    assert {(): 7} == await samples("checkpoint_generation", series=series)


async def test_a_changed_cell_shows_in_the_next_scrape():
    cells = facts()
    assert {} == await samples("slices", cells=cells)
    cells.inventory.set(msgspec.structs.replace(an_inventory(count=1), generation=2))

    assert {("0", "healthy"): 0, ("0", "unhealthy"): 0} == await samples("slices", cells=cells)


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8"),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8"),
        ("text/plain;version=1.0.0", "text/plain; version=0.0.4; charset=utf-8"),
        ("application/openmetrics-text; q=0", "text/plain; version=0.0.4; charset=utf-8"),
        (
            "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2",
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
        ),
    ],
)
async def test_the_form_follows_what_is_accepted(accept, expected):
    text, form = await scrape(accept=accept)

    assert expected == form
    assert text.endswith("# EOF\n") == form.startswith("application/openmetrics-text")


async def test_both_forms_parse_and_no_series_comes_twice():
    tally = Tally("allocations_total", "Answers.", ("result", "reason"))
    tally.add("refused", 'quote " and\nline')
    durations = Durations("rpc_duration_seconds", "Calls.", ("method",), (0.5, 1.0))
    durations.observe(0.7, "Allocate")
    parts = {
        "cells": facts(an_inventory(count=2)),
        "checks": (Check("state", ok=True),),
        "series": MetricSources((tally,), (durations,)),
    }
    for accept, parse in (("", parse_text), ("application/openmetrics-text", parse_open)):
        text, _ = await scrape(accept=accept, **parts)
        series = [
            (sample.name, tuple(sorted(sample.labels.items())))
            for family in parse(text)
            for sample in family.samples
        ]

        assert len(series) == len(set(series))
        names = {name for name, _ in series}
        assert {"process_resident_memory_bytes", "hami_agent_allocations_total"} <= names

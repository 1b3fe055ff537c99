"""What containers were promised, HAMi's series about the host, and OpenMetrics of everything."""

import dataclasses

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text

from agent.core.cluster.pods import PodUid
from agent.core.inventory.condition import Condition
from agent.core.inventory.gpu import NO_INDEX, GpuSample, Sampled
from agent.core.inventory.share import Share
from agent.core.node.readiness import Check
from agent.kit.tally import Durations, Tally
from agent.web.metrics import Gauge, MetricSources
from tests.builders import (
    NODE,
    NOON,
    a_gpu,
    a_pod_uid,
    a_row,
    a_shared_gpu,
    a_uuid,
    an_inventory,
)
from tests.doors.metrics_page import OPEN, facts, scrape
from tests.unit.core.allocation.plain_scene import HOLDER, a_plain_row, ids

pytestmark = pytest.mark.looptime(False)

GIB = 2**30
MAIN = ("main", "0", "team-a", "train-0")
PROMISED = ("memory_promised_bytes", "cores_promised_ratio", "slices_promised")


async def series(cells, beginning):
    """Name, label values (sorted by label) and value of all series that begin so."""
    text, _ = await scrape(cells)
    return {
        (sample.name.removeprefix(beginning), *(v for _, v in sorted(sample.labels.items()))): (
            sample.value
        )
        for family in parse_text(text)
        for sample in family.samples
        if sample.name.startswith(beginning)
    }


async def promised(cells):
    return await series(cells, "hami_agent_container_")


async def test_a_container_has_what_it_was_promised_of_each_gpu():
    shares = (Share(a_uuid(0), 3072, 30), Share(a_uuid(1), 1024, 25))
    cells = facts(an_inventory(count=2), rows=(a_row(shares=shares, slice_ids=ids(0, 1)),))
    second = ("main", "1", "team-a", "train-0")

    assert {
        ("memory_promised_bytes", *MAIN): 3 * GIB,
        ("memory_promised_bytes", *second): GIB,
        ("cores_promised_ratio", *MAIN): 0.3,
        ("cores_promised_ratio", *second): 0.25,
        ("slices_promised", *MAIN): 1,
        ("slices_promised", *second): 1,
    } == await promised(cells)


async def test_a_share_of_zero_is_all_registered_memory():
    gpu = a_shared_gpu(registered_mib=32768)
    cells = facts(an_inventory(gpus=[gpu]), rows=(a_row(shares=(Share(a_uuid(0), 0, 0),)),))

    assert 32 * GIB == (await promised(cells))["memory_promised_bytes", *MAIN]


async def test_in_plain_mode_holders_have_slices_and_only_limits_have_memory():
    free = dataclasses.replace(HOLDER, pod="free")
    rows = (
        a_plain_row(slice_ids=ids(0), holder=HOLDER),
        a_plain_row(uid=PodUid("b" * 32), slice_ids=ids(1, 2), limited=False, holder=free),
        a_plain_row(uid=PodUid("c" * 32), slice_ids=ids(3)),
        a_plain_row(uid=PodUid("d" * 32), slice_ids=ids(4), holder=HOLDER, adopted=True),
    )

    assert {
        ("memory_promised_bytes", *MAIN): 8155 * 2**20,
        ("cores_promised_ratio", *MAIN): 0,
        ("slices_promised", *MAIN): 1,
        ("slices_promised", "main", "0", "team-a", "free"): 2,
    } == await promised(facts(an_inventory(count=1), rows=rows))


async def test_two_pods_of_one_name_are_one_series():
    share = (Share(a_uuid(0), 1024, 10),)
    rows = tuple(a_row(pod_uid=a_pod_uid(n), shares=share) for n in (1, 2))

    assert {
        ("memory_promised_bytes", *MAIN): 2 * GIB,
        ("cores_promised_ratio", *MAIN): 0.2,
        ("slices_promised", *MAIN): 2,
    } == await promised(facts(an_inventory(count=1), rows=rows))


async def test_a_gpu_that_is_not_in_the_inventory_goes_by_its_uuid_and_is_described():
    cells = facts(rows=(a_row(shares=(Share(a_uuid(7), 1024, 10),)),))

    assert {a_uuid(7)} == {key[2] for key in await promised(cells)}
    assert [("info", a_uuid(7))] == [key[:2] for key in await series(cells, "hami_agent_gpu_")]


async def test_pods_are_named_only_where_that_is_wanted():
    row = a_row(shares=(Share(a_uuid(0), 1024, 10),))
    cells = facts(an_inventory(count=1), rows=(row,), names_pods=False)
    text, _ = await scrape(cells)

    assert {} == await promised(cells)
    assert "train-0" not in text
    assert "hami_agent_memory_promised_bytes" in text


def used(**values):
    sampled = Sampled(NOON, GpuSample(a_uuid(0), **values))
    return lambda uuid: sampled if uuid == a_uuid(0) else None


async def test_hamis_series_have_hamis_names_labels_and_scales():
    gpus = [
        a_shared_gpu(gpu=a_gpu(name="NVIDIA A10")),
        a_shared_gpu(gpu=a_gpu(index=1)),
        a_shared_gpu(gpu=a_gpu(uuid="GPU-x", index=NO_INDEX)),
    ]
    newest = used(gpu_percent=93, memory_percent=41, used_mib=7168)
    text, _ = await scrape(facts(an_inventory(gpus=gpus), newest=newest, hami_node=NODE))

    labels = f'device_index="0",device_type="NVIDIA-NVIDIA A10",device_uuid="{a_uuid(0)}"'
    assert [
        f'hami_host_gpu_memory_used_bytes{{{labels},node="node-1",zone="vGPU"}} 7.516192768e+09',
        f'hami_host_gpu_utilization_ratio{{{labels},node="node-1",zone="vGPU"}} 93.0',
        f'hami_host_gpu_memory_controller_utilization_ratio{{{labels},zone="vGPU"}} 41.0',
    ] == [line for line in text.splitlines() if line.startswith("hami_host_")]


async def test_a_uuid_is_cut_as_hami_cuts_it_and_what_is_not_reported_has_no_series():
    long = a_gpu(uuid="GPU-" + "a" * 60)
    newest = Sampled(NOON, GpuSample(long.uuid, used_mib=1))
    inventory = an_inventory(gpus=[a_shared_gpu(gpu=long)])
    cells = facts(inventory, newest=lambda _: newest, hami_node=NODE)

    ((name, *labels),) = await series(cells, "hami_host_gpu_")
    assert ("memory_used_bytes", "GPU-" + "a" * 36) == (name, labels[2])


async def test_hamis_series_are_not_served_unless_asked_for():
    newest = used(gpu_percent=93, memory_percent=41, used_mib=7168)
    text, _ = await scrape(facts(an_inventory(count=1), newest=newest))

    assert "hami_host_gpu" not in text


async def test_all_types_pass_the_parser_of_openmetrics():
    refused = Tally("allocations_total", "Answers.", ("result",), expected=[("refused",)])
    odd = Tally("allocation_mismatches", "Without the ending of counters.")
    durations = Durations("rpc_duration_seconds", "Calls.", ("method",), (0.5, 1.0))
    durations.observe(0.7, "Allocate")
    cells = facts(
        an_inventory(count=2),
        rows=(a_row(shares=(Share(a_uuid(0), 1024, 10),)),),
        newest=used(gpu_percent=93, memory_percent=41, used_mib=7168),
        hami_node=NODE,
    )
    gauge = Gauge("hook_available_inodes", "Free inodes.", lambda: float("inf"))
    text, _ = await scrape(
        cells,
        (Check("state", ok=True), Check("api", ok=False, required=False)),
        MetricSources((refused, odd), (durations,), (gauge,)),
        OPEN,
    )
    families = {family.name: family for family in parse_open(text)}

    assert {"gauge", "counter", "histogram", "info"} >= {one.type for one in families.values()}
    declared = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    assert len(declared) == len(set(declared)) == len(families)
    for family in families.values():
        assert family.documentation
        assert family.type != "counter" or {f"{family.name}_total"} >= {
            sample.name for sample in family.samples if not sample.name.endswith("_created")
        }
    states = families["hami_agent_gpu_health"].samples
    for gpu in ("0", "1"):
        held = {one.labels["state"]: one.value for one in states if one.labels["gpu"] == gpu}
        assert {state.value: float(state is Condition.OK) for state in Condition} == held
    assert {"hami_agent_container_memory_promised_bytes", "hami_host_gpu_utilization_ratio"} <= set(
        families
    )

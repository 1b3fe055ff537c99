"""What containers were promised and what they use, and OpenMetrics of everything."""

import datetime as dt

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open

from agent.core.cluster.pods import PodTable, PodUid
from agent.core.containers.edits import ContainerEdits
from agent.core.inventory.condition import Condition
from agent.core.inventory.share import Share
from agent.core.node.readiness import Check
from agent.core.usage.region import RegionState
from agent.core.usage.use import ContainerUse
from agent.kit.cell import Cell
from agent.kit.tally import Durations, Tally
from agent.web.hami import HamiSettings
from agent.web.metrics import Gauge, MetricSources
from agent.web.policy import HamiNames
from tests.builders import (
    NODE,
    NOON,
    a_container,
    a_pod,
    a_pod_uid,
    a_row,
    a_shared_gpu,
    a_uuid,
    an_inventory,
)
from tests.doors.metrics_page import (
    OPEN,
    a_gpu_use,
    a_use,
    facts,
    sampled,
    scrape,
    series,
    uses,
)
from tests.unit.core.allocation.plain_scene import HOLDER, a_plain_row, ids

pytestmark = pytest.mark.looptime(False)

ONE = (Share(a_uuid(0), 1024, 10),)
GIB = 2**30
MAIN = ("main", "0", "team-a", "train-0")
PROMISED = ("memory_promised_bytes", "cores_promised_ratio", "slices_promised")


async def promised(cells):
    found = await series(cells, "hami_agent_container_")
    return {key: value for key, value in found.items() if key[0] in PROMISED}


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
    free = msgspec.structs.replace(HOLDER, pod="free")
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
    row = a_row(shares=ONE)
    cells = facts(an_inventory(count=1), rows=(row,), names_pods=False)
    text, _ = await scrape(cells)

    assert {} == await promised(cells)
    assert "train-0" not in text
    assert "hami_agent_memory_promised_bytes" in text


async def used(cells):
    found = await series(cells, "hami_agent_container_")
    return {
        key: value
        for key, value in found.items()
        if key[0] not in {*PROMISED, "regions", "limits_info"}
    }


async def test_a_container_has_what_it_uses_of_each_of_its_gpus():
    shares = (Share(a_uuid(0), 3072, 30), Share(a_uuid(1), 1024, 0))
    two = a_use(
        a_gpu_use(total=2 * GIB, memory_limit=3 * GIB, sm_percent=25, core_limit=30),
        a_gpu_use(1, total=GIB, memory_limit=0, sm_percent=130, core_limit=100),
        processes=3,
        last_kernel=NOON - dt.timedelta(seconds=90),
    )
    cells = facts(an_inventory(count=2), rows=(a_row(shares=shares),), use=uses(two))
    second, whole = ("main", "1", "team-a", "train-0"), ("main", "team-a", "train-0")

    assert {
        ("memory_used_bytes", *MAIN): 2 * GIB,
        ("memory_used_bytes", *second): GIB,
        ("memory_limit_bytes", *MAIN): 3 * GIB,
        ("utilization_ratio", *MAIN): 0.25,
        ("utilization_ratio", *second): 1,
        ("cores_limit_ratio", *MAIN): 0.3,
        ("idle_seconds", *whole): 90,
        ("processes", *whole): 3,
    } == await used(cells)


async def test_of_two_pods_of_one_name_the_later_has_the_series():
    first, second = (
        a_row(pod_uid=a_pod_uid(n), shares=ONE, answered_at=NOON + dt.timedelta(minutes=n))
        for n in (1, 2)
    )
    found = {first.key: a_use(a_gpu_use(total=1)), second.key: a_use(a_gpu_use(total=2))}
    cells = facts(an_inventory(count=1), rows=(second, first), use=found.get)

    assert 2 == (await used(cells))["memory_used_bytes", *MAIN]


POLICY = "GPU_CORE_UTILIZATION_POLICY"
OFF = a_pod(containers=(a_container(control_disabled=True),))


def forced_by(policy):
    return a_pod(containers=(msgspec.structs.replace(a_container(), core_policy=policy),))


@pytest.mark.parametrize(
    ("answered", "pod", "told"),
    [
        ((), a_pod(), ("hami-core", "default")),
        ((), None, ("unknown", "default")),
        (((POLICY, "force"),), None, ("unknown", "force")),
        (((POLICY, "disable"),), a_pod(), ("hami-core", "disable")),
        (((POLICY, "disable"),), forced_by("FORCE"), ("hami-core", "force")),
        ((), forced_by("force"), ("hami-core", "force")),
        ((), forced_by("Force"), ("hami-core", "default")),
        ((), OFF, ("none", "default")),
        ((), msgspec.structs.replace(a_pod(), runtime_class="gvisor"), ("none", "default")),
        ((), msgspec.structs.replace(a_pod(), runtime_class="nvidia"), ("hami-core", "default")),
    ],
)
async def test_each_container_tells_who_keeps_its_limits_and_when(answered, pod, told):
    row = a_row(shares=ONE, edits=ContainerEdits(envs=answered))
    there = PodTable({pod.uid: pod} if pod else {})
    found = await series(facts(rows=(row,), pods=Cell(there)), "hami_agent_container_limits_info")

    assert {("", "main", told[0], "team-a", "train-0", told[1]): 1} == found


async def test_what_has_no_limits_tells_of_nobody_that_keeps_them():
    rows = (
        a_plain_row(slice_ids=ids(0), holder=HOLDER),
        a_plain_row(
            uid=PodUid("b" * 32),
            slice_ids=ids(1),
            limited=False,
            holder=msgspec.structs.replace(HOLDER, pod="free"),
        ),
    )
    found = await series(facts(rows=rows), "hami_agent_container_limits_info")

    assert {("", "main", "unknown", "team-a", "train-0", "default"): 1} == found


async def test_a_region_without_numbers_is_counted_by_its_state_also_where_no_pod_is_named():
    rows = [a_row(pod_uid=a_pod_uid(n), pod=f"pod-{n}") for n in range(5)]
    states = (*RegionState, RegionState.UNREADABLE)
    found = {row.key: ContainerUse(NOON, state) for row, state in zip(rows, states, strict=True)}
    cells = facts(rows=(*rows, a_row()), use=found.get, names_pods=False)

    expected = {("", state.value): 1 for state in RegionState} | {("", "unreadable"): 2}
    assert expected == await series(cells, "hami_agent_container_regions")
    assert {} == await used(cells)
    named = await used(facts(rows=rows, use=found.get))
    assert {("processes", "main", "team-a", "pod-2"): 0} == named


async def test_all_types_pass_the_parser_of_openmetrics():
    refused = Tally("allocations_total", "Answers.", ("result",), expected=[("refused",)])
    odd = Tally("allocation_mismatches", "Without the ending of counters.")
    durations = Durations("rpc_duration_seconds", "Calls.", ("method",), (0.5, 1.0))
    durations.observe(0.7, "Allocate")
    cells = facts(
        an_inventory(count=2),
        rows=(a_row(shares=ONE),),
        newest=sampled(gpu_percent=93, memory_percent=41, used_mib=7168),
        use=uses(a_use(a_gpu_use())),
        hami=HamiSettings(HamiNames.BOTH, NODE),
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
    assert {
        "hami_agent_container_memory_promised_bytes",
        "hami_agent_container_memory_used_bytes",
        "hami_host_gpu_utilization_ratio",
        "hami_vgpu_memory_used_bytes",
        "Device_memory_desc_of_container",
    } <= set(families)

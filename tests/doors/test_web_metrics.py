"""The metrics page: the agent's own series of a node as it is now, in both forms, none twice."""

import datetime as dt

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.registry import Collector

from agent.cluster import PodTable, PodUid, Role
from agent.hami.region import RegionState
from agent.kit.timing import Durations, Tally
from agent.ledger import ContainerEdits
from agent.model import NO_INDEX, Condition, GpuSample, Sampled, Share, SliceGroup, slice_id
from agent.node.findings import Check
from agent.usage import ContainerUse
from agent.web import metrics
from agent.web.metrics import OPENMETRICS, AgentCollector, Gauge, MetricSources, MetricsPage
from agent.web.policy import HamiNames
from tests.builders import (
    NOON,
    a_container,
    a_gpu,
    a_health,
    a_pod,
    a_pod_uid,
    a_row,
    a_shared_gpu,
    a_uuid,
    an_inventory,
)
from tests.doors.metrics_page import (
    BUILD,
    OPEN,
    a_gpu_use,
    a_use,
    facts,
    sampled,
    samples,
    scrape,
    series,
    uses,
)
from tests.doors.web_client import serving
from tests.unit.core.allocation.plain_scene import HOLDER, a_plain_row, ids

pytestmark = pytest.mark.looptime(False)

GIB = 2**30
ONE = (Share(a_uuid(0), 1024, 10),)
MAIN = ("main", "0", "team-a", "train-0")
SECOND = ("main", "1", "team-a", "train-0")
PROMISED = ("memory_promised_bytes", "cores_promised_ratio", "slices_promised")


class CountingSource(Collector):
    """A collector that is asked for its series."""

    def __init__(self):
        self.asked = 0

    def collect(self):
        self.asked += 1
        return iter(())


async def test_a_page_that_many_ask_for_is_rendered_once_in_a_while(monkeypatch):
    async def asked(kept, *accepts):
        monkeypatch.setattr(metrics, "KEPT", kept)
        source = CountingSource()
        page = MetricsPage(source).page
        of_the_page = source.asked  # the registry asks for the names
        async with serving({"/metrics": page}) as (_, client):
            for accept in accepts * 20:
                async with client.get("/metrics", headers={"Accept": accept}) as answer:
                    assert 200 == answer.status
        return source.asked - of_the_page

    assert 1 == await asked(1000.0, "*/*")
    assert 2 == await asked(1000.0, "*/*", OPENMETRICS)
    assert 20 == await asked(0.0, "*/*")


async def test_the_agent_names_its_build_the_driver_and_its_readiness():
    versions = {
        said: msgspec.structs.replace(an_inventory(), driver_version=said)
        for said in ("570.148.08", "")
    }
    checks = (
        Check("state", ok=True),
        Check("stream", ok=False),
        Check("api", ok=False, required=False),
        Check("hook", ok=True, required=False),
    )
    node = facts(versions["570.148.08"], checks=checks)

    assert {("json", "3.11.7", "abc", "0.1.0"): 1} == await samples("build_info", node)
    assert {("570.148.08",): 1} == await samples("driver_info", node)
    assert {} == await samples("driver_info", facts(versions[""]))
    assert {("state",): 1, ("stream",): 0} == await samples("ready", node)
    assert {("api",): 1, ("hook",): 0} == await samples("degraded", node)


async def test_a_gpu_is_described_once_with_its_health_and_the_id_to_look_up():
    health = msgspec.structs.replace(
        a_health(condition=Condition.BAD, cause="xid", text="from the driver"),
        action="reset",
        runbook="H-079",
    )
    gpus = [
        a_shared_gpu(gpu=a_gpu(index=3, name="T4", numa=None), health=health),
        a_shared_gpu(gpu=a_gpu(index=1)),
    ]
    node = facts(an_inventory(gpus=gpus))

    described = await samples("gpu_info", node)
    assert 1 == described["3", "hami-core", "T4", "", "0000:13:00.0", a_uuid(3)]
    assert 2 == len(described)
    states = await samples("gpu_health", node)
    assert {(gpu, state.value) for gpu in "13" for state in Condition} == set(states)
    assert {("3", "bad"), ("1", "ok")} == {labels for labels, value in states.items() if value}
    since = await samples("gpu_health_since_timestamp_seconds", node)
    assert {("3",): NOON.timestamp(), ("1",): NOON.timestamp()} == since
    assert {
        ("reset", "xid", "bad", "3", "H-079"): 0,
        ("none", "none", "ok", "1", ""): 1,
    } == await samples("gpu_served", node)


async def test_a_gpu_says_how_much_it_is_used_and_nothing_when_it_does_not_tell():
    told = {
        a_uuid(0): GpuSample(a_uuid(0), gpu_percent=93, memory_percent=41, used_mib=7168),
        a_uuid(1): GpuSample(a_uuid(1), gpu_percent=None, memory_percent=None, used_mib=1),
    }
    newest = lambda uuid: Sampled(NOON, told[uuid]) if uuid in told else None  # noqa: E731
    node = facts(an_inventory(count=3), newest=newest)

    assert {("0",): 0.93} == await samples("gpu_utilization_ratio", node)
    assert {("0",): 0.41} == await samples("gpu_memory_utilization_ratio", node)
    assert {("0",): 7 * GIB, ("1",): 2**20} == await samples("gpu_memory_used_bytes", node)


async def test_slices_are_counted_by_state_and_by_gpu():
    listed = [tuple(slice_id(a_uuid(gpu), n) for n in range(3 + gpu)) for gpu in range(2)]
    groups = tuple(
        SliceGroup(a_uuid(gpu), listed[gpu], healthy=gpu == 1, numa=0) for gpu in range(2)
    )
    row = a_row(shares=(Share(a_uuid(1), 1024, 10),), slice_ids=listed[1][:2])
    node = facts(an_inventory(count=2), groups, (row,))

    assert {
        ("0", "healthy"): 0,
        ("0", "unhealthy"): 3,
        ("1", "healthy"): 4,
        ("1", "unhealthy"): 0,
    } == await samples("slices", node)
    assert {("0",): 0, ("1",): 2} == await samples("slices_allocated", node)


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
    node = facts(an_inventory(gpus=[gpu]), rows=rows)

    assert {("0",): 4 * GIB} == await samples("memory_promised_bytes", node)
    assert {("0",): 32 * GIB} == await samples("memory_sellable_bytes", node)


@pytest.mark.parametrize(
    ("uuids", "indexes", "present", "names"),
    [
        (("GPU-a", "GPU-b"), (0, 1), (False, True), ["0", "1"]),
        (("GPU-a", "GPU-b"), (0, 0), (False, True), ["GPU-a", "0"]),
        (("GPU-a", "GPU-b"), (NO_INDEX, NO_INDEX), (False, False), ["GPU-a", "GPU-b"]),
    ],
    ids=["a lost one keeps its index", "its index is taken", "no index is known"],
)
async def test_no_two_gpus_have_one_label(uuids, indexes, present, names):
    gpus = [
        a_shared_gpu(gpu=a_gpu(uuid=uuid, index=index), present=there)
        for uuid, index, there in zip(uuids, indexes, present, strict=True)
    ]
    found = await samples("memory_sellable_bytes", facts(an_inventory(gpus=gpus)))

    assert [(name,) for name in names] == list(found)


async def test_a_gpu_that_left_keeps_its_label_and_is_described_while_something_is_counted_of_it():
    counted = Tally("xid_events_total", "XIDs.", ("gpu", "xid"))
    for uuid in (a_uuid(0), a_uuid(1), a_uuid(1), a_uuid(9), "unknown"):
        counted.add(uuid, "31")
    left = [a_shared_gpu(gpu=a_gpu(index=n)) for n in (0, 1, 2)]
    taken = a_shared_gpu(gpu=a_gpu(uuid="GPU-new", index=1))
    node, sources = facts(an_inventory(gpus=[taken]), gone=left), MetricSources((counted,))

    events = await samples("xid_events_total", node, sources)
    assert {"0": 1, a_uuid(1): 2, a_uuid(9): 1, "unknown": 1} == {
        gpu: count for (gpu, _), count in events.items()
    }
    described = await samples("gpu_info", node, sources)
    assert {("0", a_uuid(0)), ("1", "GPU-new"), (a_uuid(1),) * 2, (a_uuid(9),) * 2} == {
        (labels[0], labels[-1]) for labels in described
    }
    assert {("1",)} == set(await samples("slices_allocated", node, sources))


async def test_counts_and_durations_of_one_name_are_added_up():
    one, two = (
        Tally("registrations_total", "Register calls.", ("trigger",), expected=[("new",)])
        for _ in range(2)
    )
    one.add("start")
    two.add("start")
    two.add("stream_lost")
    waits = [Durations("rpc_duration_seconds", "Calls.", ("code",), (0.5,)) for _ in range(2)]
    waits[0].observe(0.25, "OK")
    waits[1].observe(4.0, "OK")
    waits[1].observe(1.0, "UNKNOWN")
    gauge = Gauge("checkpoint_generation", "Generation.", lambda: 7)
    errors = Tally("checkpoint_errors", "Failed writes.")
    sources = MetricSources((one, two, errors), tuple(waits), (gauge,))

    assert {
        ("registrations_total", "start"): 2,
        ("registrations_total", "stream_lost"): 1,
        ("registrations_total", "new"): 0,  # expected, and shown before it is counted
        ("checkpoint_errors_total",): 0,
        ("checkpoint_generation",): 7,
        ("rpc_duration_seconds_bucket", "OK", "0.5"): 1,
        ("rpc_duration_seconds_bucket", "OK", "+Inf"): 2,
        ("rpc_duration_seconds_count", "OK"): 2,
        ("rpc_duration_seconds_sum", "OK"): 4.25,
        ("rpc_duration_seconds_bucket", "UNKNOWN", "0.5"): 0,
        ("rpc_duration_seconds_bucket", "UNKNOWN", "+Inf"): 1,
        ("rpc_duration_seconds_count", "UNKNOWN"): 1,
        ("rpc_duration_seconds_sum", "UNKNOWN"): 1.0,
    } == {
        key: value
        for key, value in (await series(facts(), "hami_agent_", sources)).items()
        if key[0].startswith(("registrations", "checkpoint", "rpc"))
    }


async def promised(node, **options):
    found = await series(node, "hami_agent_container_", **options)
    return {key: value for key, value in found.items() if key[0] in PROMISED}


async def test_a_container_has_what_it_was_promised_of_each_gpu():
    shares = (Share(a_uuid(0), 3072, 30), Share(a_uuid(1), 0, 25))
    gpus = [a_shared_gpu(), a_shared_gpu(gpu=a_gpu(index=1), registered_mib=32768)]
    node = facts(an_inventory(gpus=gpus), rows=(a_row(shares=shares, slice_ids=ids(0, 1)),))

    assert {
        ("memory_promised_bytes", *MAIN): 3 * GIB,
        ("memory_promised_bytes", *SECOND): 32 * GIB,  # a share of 0 is all registered memory
        ("cores_promised_ratio", *MAIN): 0.3,
        ("cores_promised_ratio", *SECOND): 0.25,
        ("slices_promised", *MAIN): 1,
        ("slices_promised", *SECOND): 1,
    } == await promised(node)


async def test_in_plain_mode_holders_have_slices_and_only_limits_have_memory():
    free = msgspec.structs.replace(HOLDER, pod="free")
    rows = (
        a_plain_row(slice_ids=ids(0), holder=HOLDER),
        a_plain_row(uid=PodUid("b" * 32), slice_ids=ids(1, 2), limited=False, holder=free),
        a_plain_row(uid=PodUid("c" * 32), slice_ids=ids(3)),
        a_plain_row(uid=PodUid("d" * 32), slice_ids=ids(4), holder=HOLDER, adopted=True),
    )
    node = facts(an_inventory(gpus=[a_shared_gpu(gpu=a_gpu(memory_mib=16384))]), rows=rows)

    assert {
        ("memory_promised_bytes", *MAIN): 8155 * 2**20,
        ("cores_promised_ratio", *MAIN): 0,
        ("slices_promised", *MAIN): 1,
        ("slices_promised", "main", "0", "team-a", "free"): 2,
    } == await promised(node)
    assert {("0",): 5} == await samples("slices_allocated", node)
    keepers = await samples("container_limits_info", node)
    assert {("main", "unknown", "team-a", "train-0", "default"): 1} == {
        (container, *rest): value for (container, *rest), value in keepers.items()
    }


async def test_two_pods_of_one_name_are_one_series_and_the_later_has_the_use():
    share = (Share(a_uuid(0), 1024, 10),)
    first, second = (
        a_row(pod_uid=a_pod_uid(n), shares=share, answered_at=NOON + dt.timedelta(minutes=n))
        for n in (1, 2)
    )
    used = {first.key: a_use(a_gpu_use(total=1)), second.key: a_use(a_gpu_use(total=2))}
    node = facts(an_inventory(count=1), rows=(second, first), used=used.get)

    assert {
        ("memory_promised_bytes", *MAIN): 2 * GIB,
        ("cores_promised_ratio", *MAIN): 0.2,
        ("slices_promised", *MAIN): 2,
    } == await promised(node)
    assert {MAIN: 2} == await samples("container_memory_used_bytes", node)


async def test_a_gpu_that_is_not_in_the_inventory_goes_by_its_uuid_and_is_described():
    node = facts(rows=(a_row(shares=(Share(a_uuid(7), 1024, 10),)),))

    assert {a_uuid(7)} == {key[2] for key in await promised(node)}
    assert [a_uuid(7)] == [labels[0] for labels in await samples("gpu_info", node)]


async def test_pods_are_named_only_where_that_is_wanted():
    node = facts(an_inventory(count=1), rows=(a_row(shares=ONE),), used=uses(a_use(a_gpu_use())))
    text, _ = await scrape(node, names_pods=False, hami=HamiNames.BOTH)

    assert {} == await promised(node, names_pods=False)
    assert "train-0" not in text
    assert "hami_agent_memory_promised_bytes" in text


async def test_a_container_has_what_it_uses_of_each_of_its_gpus():
    shares = (Share(a_uuid(0), 3072, 30), Share(a_uuid(1), 1024, 0))
    both = a_use(
        a_gpu_use(total=2 * GIB, memory_limit=3 * GIB, sm_percent=25, core_limit=30),
        a_gpu_use(1, total=GIB, memory_limit=0, sm_percent=130, core_limit=100),
        processes=3,
        last_kernel=NOON - dt.timedelta(seconds=90),
    )
    node = facts(an_inventory(count=2), rows=(a_row(shares=shares),), used=uses(both))
    found = await series(node, "hami_agent_container_")
    whole = ("main", "team-a", "train-0")

    assert {
        ("memory_used_bytes", *MAIN): 2 * GIB,
        ("memory_used_bytes", *SECOND): GIB,
        ("memory_limit_bytes", *MAIN): 3 * GIB,
        ("utilization_ratio", *MAIN): 0.25,
        ("utilization_ratio", *SECOND): 1,
        ("cores_limit_ratio", *MAIN): 0.3,
        ("idle_seconds", *whole): 90,
        ("processes", *whole): 3,
    } == {
        key: value
        for key, value in found.items()
        if key[0] not in {*PROMISED, "regions", "limits_info"}
    }


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
    found = await samples("container_limits_info", facts(rows=(row,), pods=there))

    assert {("main", told[0], "team-a", "train-0", told[1]): 1} == found


async def test_a_region_without_numbers_is_counted_by_its_state_also_where_no_pod_is_named():
    rows = [a_row(pod_uid=a_pod_uid(n), pod=f"pod-{n}") for n in range(5)]
    states = (*RegionState, RegionState.UNREADABLE)
    found = {row.key: ContainerUse(NOON, state) for row, state in zip(rows, states, strict=True)}
    node = facts(rows=(*rows, a_row()), used=found.get)

    assert {(state.value,): 1 for state in RegionState} | {("unreadable",): 2} == await samples(
        "container_regions", node, names_pods=False
    )
    assert {("main", "team-a", "pod-2"): 0} == await samples("container_processes", node)


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


async def test_all_types_pass_the_parser_of_openmetrics_and_no_series_comes_twice():
    refused = Tally("allocations_total", "Answers.", ("result",), expected=[("refused",)])
    refused.add('quote " and\nline')
    odd = Tally("allocation_mismatches", "Without the ending of counters.")
    durations = Durations("rpc_duration_seconds", "Calls.", ("method",), (0.5, 1.0))
    durations.observe(0.7, "Allocate")
    gauge = Gauge("hook_available_inodes", "Free inodes.", lambda: float("inf"))
    node = facts(
        an_inventory(count=2),
        rows=(a_row(shares=ONE),),
        newest=sampled(gpu_percent=93, memory_percent=41, used_mib=7168),
        used=uses(a_use(a_gpu_use())),
        checks=(Check("state", ok=True), Check("api", ok=False, required=False)),
    )
    sources = MetricSources((refused, odd), (durations,), (gauge,))
    text, _ = await scrape(node, sources, OPEN, hami=HamiNames.BOTH)
    families = {family.name: family for family in parse_open(text)}

    assert {"gauge", "counter", "histogram", "info"} >= {one.type for one in families.values()}
    declared = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    assert len(declared) == len(set(declared)) == len(families)
    for family in families.values():
        assert family.documentation
        assert family.type != "counter" or {f"{family.name}_total"} >= {
            sample.name for sample in family.samples if not sample.name.endswith("_created")
        }
    named = [
        (sample.name, *sorted(sample.labels.items()))
        for family in families.values()
        for sample in family.samples
    ]
    assert len(named) == len(set(named))
    assert {
        "process_resident_memory_bytes",
        "hami_agent_container_memory_used_bytes",
        "hami_host_gpu_utilization_ratio",
        "hami_vgpu_memory_used_bytes",
        "Device_memory_desc_of_container",
    } <= set(families)


async def test_what_changed_shows_in_the_next_scrape():
    known = [facts()]
    collector = AgentCollector(BUILD, lambda: known[-1])
    before = {one.name: len(one.samples) for one in collector.collect()}
    known.append(facts(an_inventory(count=1)))
    after = {one.name: len(one.samples) for one in collector.collect()}

    assert (0, 2) == (before["hami_agent_slices"], after["hami_agent_slices"])

"""The metrics page: the agent's own series of a node as it is now, none twice."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.registry import Collector, CollectorRegistry

from agent.cluster import PodTable
from agent.hami.region import MemoryUse, Region, RegionGpu, RegionProcess, RegionState
from agent.ledger import ContainerEdits
from agent.model import NO_INDEX, Share
from agent.usage import ContainerUse, use_of
from agent.web import metrics
from agent.web.metrics import AgentCollector, metrics_page
from tests.builders import (
    NOON,
    a_container,
    a_gpu,
    a_pod,
    a_pod_uid,
    a_row,
    a_shared_gpu,
    a_uuid,
    an_inventory,
)
from tests.doors.metrics_page import a_node, counts, facts, lines_of_a_node, samples, scrape
from tests.doors.web_client import serving
from tests.fakes.regions import RegionReading
from tests.recorded import golden

pytestmark = pytest.mark.looptime(False)

ONE = (Share(a_uuid(0), 1024, 10),)


class CountingSource(Collector):
    """A collector that is asked for its series."""

    def __init__(self):
        self.asked = 0

    def collect(self):
        self.asked += 1
        return iter(())


async def test_the_page_of_a_node_with_one_of_each_thing():
    """Labels, scales and sums."""
    found = "".join(f"{line}\n" for line in await lines_of_a_node())

    assert golden("metrics.txt", found) == found


async def test_hamis_series_are_served_by_the_names_that_are_wanted():
    lines = await lines_of_a_node()
    own = [line for line in lines if line.startswith("hami_agent_")]
    current = [line for line in lines if line.startswith("hami_")]
    build = [line for line in lines if line.startswith("hami_build_info")]
    legacy = [line for line in lines if not line.startswith("hami_")]

    assert own == await lines_of_a_node("none")
    assert current == await lines_of_a_node("current")
    assert sorted(own + legacy + build) == sorted(await lines_of_a_node("legacy"))


async def test_a_page_that_many_ask_for_is_rendered_once_in_a_while(monkeypatch):
    async def asked(kept):
        monkeypatch.setattr(metrics, "KEPT", kept)
        source = CountingSource()
        page = metrics_page(source)
        of_the_page = source.asked  # the registry asks for the names
        async with serving({"/metrics": page}) as (_, client):
            for _ in range(20):
                async with client.get("/metrics") as answer:
                    assert 200 == answer.status
        return source.asked - of_the_page

    assert 1 == await asked(1000.0)
    assert 20 == await asked(0.0)


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
    found = await samples("memory_allocatable_bytes", facts(an_inventory(gpus=gpus)))

    assert [(name,) for name in names] == list(found)


async def test_pods_are_named_only_where_that_is_wanted():
    wanted = "application/openmetrics-text;version=1.0.0,text/plain;q=0.2"
    text, form = await scrape(a_node(), accept=wanted, names_pods=False, hami="both")

    assert "text/plain; version=0.0.4; charset=utf-8" == form
    assert "process_resident_memory_bytes " in text
    assert [False] * 3 == [name in text for name in ("train-0", "twin", "container_memory")]
    assert "hami_agent_memory_allocated_bytes" in text


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


async def test_all_types_pass_the_parser_of_openmetrics_and_no_series_comes_twice():
    registry = CollectorRegistry()
    registry.register(AgentCollector(a_node, counts(), hami="both"))
    text = generate_latest(registry).decode()
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
        "hami_agent_container_memory_used_bytes",
        "hami_host_gpu_utilization_ratio",
        "hami_vgpu_memory_used_bytes",
        "Device_memory_desc_of_container",
    } <= set(families)


BOTH = (Share(a_uuid(0), 1, 0), Share(a_uuid(1), 1, 0))


texts = st.sampled_from(("", a_uuid(0), a_uuid(1), "GPU-of-somebody-else"))
numbers = st.integers(0, 2**64 - 1)
region_gpus = st.lists(st.tuples(texts, numbers, numbers, numbers, numbers), max_size=4)
regions = st.lists(region_gpus, min_size=1, max_size=3)


@given(regions=regions, same=st.booleans())
def test_whatever_regions_say_no_series_is_there_twice_and_none_is_of_another_gpu(regions, same):
    rows = tuple(
        a_row(pod_uid=a_pod_uid(n), pod="train-0" if same else f"train-{n}", shares=BOTH)
        for n in range(len(regions))
    )
    found = {
        row.key: use_of(a_reading(gpus), NOON, row.gpus)
        for row, gpus in zip(rows, regions, strict=True)
    }
    cells = facts(an_inventory(count=2), rows=rows, used=found.get)
    page = AgentCollector(lambda: cells, hami="both").collect()
    named = [
        (sample.name, *sorted(sample.labels.items()))
        for family in page
        for sample in family.samples
    ]

    assert len(named) == len(set(named))
    uuids = {value for _, *labels in named for label, value in labels if label.endswith("uuid")}
    assert uuids <= {a_uuid(0), a_uuid(1)}


def a_reading(gpus):
    """A region with one process, whose container wrote what it liked."""
    process = RegionProcess(
        pid=1,
        memory=tuple(MemoryUse(part, part, part, total) for _, _, _, part, total in gpus),
        sm_percent=tuple(total for *_, total in gpus),
    )
    named = tuple(RegionGpu(uuid, memory) for uuid, memory, *_ in gpus)
    region = Region(
        "v1.2", named, (process,), is_limiting=False, recent_kernel=0, priority=0, last_kernel=NOON
    )
    return RegionReading(RegionState.READABLE, region).sums()

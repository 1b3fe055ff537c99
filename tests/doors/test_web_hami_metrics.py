"""HAMi's series have HAMi's names, labels, texts and scales."""

import datetime as dt

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.hami.region import (
    MemoryUse,
    Region,
    RegionGpu,
    RegionLayout,
    RegionProcess,
    RegionReading,
    RegionState,
)
from agent.model import NO_INDEX, GpuSample, HamiNames, Sampled, Share
from agent.usage import use_of
from agent.web.metrics import AgentCollector
from tests.builders import NOON, a_gpu, a_pod_uid, a_row, a_shared_gpu, a_uuid, an_inventory
from tests.doors.metrics_page import BUILD, a_gpu_use, a_use, facts, sampled, scrape, series, uses

pytestmark = pytest.mark.looptime(False)

CURRENT = HamiNames.CURRENT
ONE = (Share(a_uuid(0), 1, 0),)
OURS = ("hami_agent_", "process_", "python_")


async def test_hamis_series_have_hamis_names_labels_and_scales():
    gpus = [
        a_shared_gpu(gpu=a_gpu(name="NVIDIA A10")),
        a_shared_gpu(gpu=a_gpu(index=1)),
        a_shared_gpu(gpu=a_gpu(uuid="GPU-x", index=NO_INDEX)),
    ]
    newest = sampled(
        gpu_percent=93,
        memory_percent=41,
        used_mib=7168,
        celsius=0,
        milliwatts=70_150,
        ecc_corrected=9,
        ecc_uncorrected=0,
    )
    text, _ = await scrape(facts(an_inventory(gpus=gpus), newest=newest), hami=CURRENT)

    gpu = f'device_index="0",device_type="NVIDIA-NVIDIA A10",device_uuid="{a_uuid(0)}"'
    labels, rest = f'{{{gpu},node="node-1",zone="vGPU"}}', 'node="node-1",zone="vGPU"'
    assert [
        f"hami_host_gpu_memory_used_bytes{labels} 7.516192768e+09",
        f"hami_host_gpu_utilization_ratio{labels} 93.0",
        f"hami_host_gpu_memory_controller_utilization_ratio{labels} 41.0",
        f"hami_host_gpu_temperature_celsius{labels} 0.0",
        f"hami_host_gpu_power_usage_watts{labels} 70.15",
        f'hami_host_gpu_ecc_errors_total{{{gpu},error_type="corrected",{rest}}} 9.0',
        f'hami_host_gpu_ecc_errors_total{{{gpu},error_type="uncorrected",{rest}}} 0.0',
    ] == [line for line in text.splitlines() if line.startswith("hami_host_")]
    assert "# TYPE hami_host_gpu_ecc_errors_total counter" in text


async def test_a_uuid_is_cut_as_hami_cuts_it_and_what_is_not_reported_has_no_series():
    long = a_gpu(uuid="GPU-" + "a" * 60)
    newest = Sampled(NOON, GpuSample(long.uuid, used_mib=1))
    inventory = an_inventory(gpus=[a_shared_gpu(gpu=long)])
    cells = facts(inventory, newest=lambda _: newest)

    ((name, *labels),) = await series(cells, "hami_host_gpu_", hami=CURRENT)
    assert ("memory_used_bytes", "GPU-" + "a" * 36) == (name, labels[2])


async def test_hamis_series_of_used_memory_counts_what_the_driver_reserves():
    newest = sampled(used_mib=10, reserved_mib=616)
    cells = facts(an_inventory(count=1), newest=newest)

    assert [626 << 20] == list((await series(cells, "hami_host_gpu_memory", hami=CURRENT)).values())


async def test_hamis_series_are_not_served_unless_asked_for():
    newest = sampled(gpu_percent=93, memory_percent=41, used_mib=7168)
    cells = facts(
        an_inventory(count=1),
        rows=(a_row(shares=ONE),),
        newest=newest,
        used=uses(a_use(a_gpu_use())),
    )
    text, _ = await scrape(cells)

    assert "hami_agent_" in text
    assert [] == [
        line
        for line in text.splitlines()
        if not line.startswith(("#", "hami_agent_", "process_", "python_"))
    ]


def served(text):
    """The lines that are not the agent's own."""
    return [line for line in text.splitlines() if not line.startswith(("#", *OURS))]


def used_by():
    """A container that uses two GPUs."""
    memory = MemoryUse(context=100, module=20, buffer=3, total=200)
    both = a_use(
        msgspec.structs.replace(a_gpu_use(), memory=memory, memory_limit=1000, sm_percent=250),
        a_gpu_use(1),
        last_kernel=NOON - dt.timedelta(seconds=90, milliseconds=700),
    )
    shares = (Share(a_uuid(0), 1, 0), Share(a_uuid(1), 1, 0))
    return facts(rows=(a_row(shares=shares),), used=uses(both))


async def test_what_a_container_uses_has_hamis_names_labels_and_scales():
    text, _ = await scrape(used_by(), hami=CURRENT)

    labels = (
        f'{{container="main",device_uuid="{a_uuid(0)}",namespace="team-a",pod="train-0",'
        'vdevice_index="0",zone="vGPU"}'
    )
    assert [
        f"hami_vgpu_memory_used_bytes{labels} 200.0",
        f"hami_vgpu_memory_limit_bytes{labels} 1000.0",
        f"hami_container_device_memory_bytes{labels} 200.0",
        f"hami_container_device_utilization_ratio{labels} 250.0",
        f"hami_container_last_kernel_elapsed_seconds{labels} 90.0",
        f"hami_vgpu_memory_context_bytes{labels} 100.0",
        f"hami_vgpu_memory_module_bytes{labels} 20.0",
        f"hami_vgpu_memory_buffer_bytes{labels} 3.0",
    ] == [line for line in served(text) if 'vdevice_index="0"' in line]
    assert 8 == len([line for line in served(text) if 'vdevice_index="1"' in line])


async def test_the_legacy_names_have_their_own_labels_and_the_parts_as_label_values():
    text, _ = await scrape(used_by(), hami=HamiNames.LEGACY)

    uuid, rest = f'deviceuuid="{a_uuid(0)}"', 'podname="train-0",podnamespace="team-a"'
    labels = f'{{ctrname="main",{uuid},{rest},vdeviceid="0",zone="vGPU"}}'
    parts = (
        f'{{context="100",ctrname="main",data="3",{uuid},module="20",offset="77",{rest},'
        'vdeviceid="0",zone="vGPU"}'
    )
    assert [
        f"vGPU_device_memory_usage_in_bytes{labels} 200.0",
        f"vGPU_device_memory_limit_in_bytes{labels} 1000.0",
        f"Device_memory_desc_of_container{parts} 200.0",
        f"Device_utilization_desc_of_container{labels} 250.0",
        f"Device_last_kernel_of_container{labels} 90.0",
    ] == [line for line in served(text) if 'vdeviceid="0"' in line]


async def test_parts_that_exceed_the_total_wrap_as_in_hami():
    forged = a_use(msgspec.structs.replace(a_gpu_use(), memory=MemoryUse(context=5, total=4)))
    cells = facts(rows=(a_row(shares=ONE),), used=uses(forged))

    assert f'offset="{2**64 - 1}"' in (await scrape(cells, hami=HamiNames.LEGACY))[0]


async def test_both_names_are_served_together_and_the_build_once():
    both, current, legacy = [
        {line.split("{")[0] for line in served((await scrape(used_by(), hami=names))[0])}
        for names in (HamiNames.BOTH, HamiNames.CURRENT, HamiNames.LEGACY)
    ]

    assert current | legacy == both
    assert current & legacy == {"hami_build_info"}
    build = await series(used_by(), "hami_build_info", hami=HamiNames.BOTH)
    assert [("", "", "", "", "abc", "0.1.0")] == [key[1:] for key in build]


texts = st.sampled_from(("", a_uuid(0), a_uuid(1), "GPU-of-somebody-else"))
numbers = st.integers(0, 2**64 - 1)
region_gpus = st.lists(st.tuples(texts, numbers, numbers, numbers, numbers), max_size=4)
regions = st.lists(region_gpus, min_size=1, max_size=3)


@given(regions=regions, same=st.booleans())
def test_whatever_regions_say_no_series_is_there_twice_and_none_is_of_another_gpu(regions, same):
    shares = (Share(a_uuid(0), 1, 0), Share(a_uuid(1), 1, 0))
    rows = tuple(
        a_row(pod_uid=a_pod_uid(n), pod="train-0" if same else f"train-{n}", shares=shares)
        for n in range(len(regions))
    )
    found = {
        row.key: use_of(a_reading(gpus), NOON, row.gpus)
        for row, gpus in zip(rows, regions, strict=True)
    }
    cells = facts(an_inventory(count=2), rows=rows, used=found.get)
    page = AgentCollector(BUILD, lambda: cells, hami=HamiNames.BOTH).collect()
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
        slot=0,
        pid=1,
        host_pid=0,
        memory=tuple(MemoryUse(part, part, part, total) for _, _, _, part, total in gpus),
        sm_percent=tuple(total for *_, total in gpus),
    )
    named = tuple(
        RegionGpu(index, uuid, memory, cores)
        for index, (uuid, memory, cores, *_) in enumerate(gpus)
    )
    region = Region(
        RegionLayout.V1_2,
        named,
        (process,),
        is_limiting=False,
        recent_kernel=0,
        priority=0,
        last_kernel=NOON,
    )
    return RegionReading(RegionState.READABLE, region).sums()

"""A metrics page over given facts, for tests."""

import asyncio
import datetime as dt
from pathlib import Path

import msgspec
from prometheus_client import Histogram
from prometheus_client.parser import text_string_to_metric_families

from agent.cluster import PodUid, Role
from agent.hami.region import MemoryUse, RegionGpu, RegionState
from agent.kit.timing import Tally
from agent.ledger import Holder, Ledger
from agent.model import NO_INDEX, Condition, GpuSample, Share, SliceGroup, SliceList, slice_id
from agent.node import Check
from agent.status import NodeStatus, StatusFacts
from agent.usage import ContainerUse
from agent.web.metrics import AgentCollector, metrics_page
from tests.builders import (
    NODE,
    NOON,
    a_gpu,
    a_health,
    a_pod_uid,
    a_row,
    a_shared_gpu,
    a_uuid,
    an_inventory,
)
from tests.doors.web_client import ask
from tests.unit.core.allocation.plain_scene import a_plain_row, ids

GOLDEN = Path("tests/golden/metrics.txt")
LEFT_OUT = ("#", "process_", "python_")


def facts(inventory=None, slices=(), rows=(), **more):
    return StatusFacts(
        NOON,
        NodeStatus(name=NODE, version="0.2.0"),
        inventory=inventory or an_inventory(count=0),
        slices=SliceList(1, slices),
        ledger=Ledger(rows),
        **more,
    )


async def scrape(found=None, series=None, accept="*/*", **options):
    """The page of these facts and its content type; the options are the collector's."""
    collector = AgentCollector(lambda: found or facts(), series or ((), (), ()), **options)
    page = metrics_page(collector)
    _, text, headers = await ask({"/metrics": page}, "/metrics", headers={"Accept": accept})
    return text, headers["Content-Type"]


async def series(found, beginning, sources=None, **options):
    """Name, label values (sorted by label) and value of all series that begin so."""
    text, _ = await scrape(found, sources, **options)
    return {
        (sample.name.removeprefix(beginning), *(v for _, v in sorted(sample.labels.items()))): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(beginning)
    }


async def samples(name, found=None, sources=None, **options):
    """Label values and value of the agent's series of that name."""
    beginning = await series(found, f"hami_agent_{name}", sources, **options)
    return {key[1:]: value for key, value in beginning.items() if not key[0]}


def a_node() -> StatusFacts:
    """A node on which there is one of each thing that a series can say. Its page is golden."""
    gpus = [
        a_shared_gpu(gpu=a_gpu(name="NVIDIA A10", memory_mib=16384), registered_mib=32768),
        a_shared_gpu(
            gpu=a_gpu(index=3, name="T4", numa=None),
            health=msgspec.structs.replace(
                a_health(condition=Condition.BAD, serving=False, cause="xid", text="of the driver"),
                action="reset",
                runbook="H-079",
            ),
        ),
        # HAMi cuts a UUID at 40 characters, and names no GPU without an index.
        a_shared_gpu(gpu=a_gpu(uuid="GPU-" + "a" * 60, index=5)),
        a_shared_gpu(gpu=a_gpu(uuid="GPU-x", index=NO_INDEX)),
    ]
    newest = {
        a_uuid(0): GpuSample(
            a_uuid(0),
            gpu_percent=93,
            memory_percent=41,
            used_mib=6552,
            reserved_mib=616,  # by the driver: HAMi counts it as used
            celsius=0,
            milliwatts=70_150,
            ecc_corrected=9,
            ecc_uncorrected=0,
        ),
        a_uuid(3): GpuSample(a_uuid(3), gpu_percent=None, memory_percent=None, used_mib=1),
        gpus[2].uuid: GpuSample(gpus[2].uuid, used_mib=1),
    }
    listed = [tuple(slice_id(a_uuid(gpu), n) for n in range(3 + gpu)) for gpu in (0, 3)]
    # By the arithmetic of Kubernetes this pod takes 4 GiB: the sidecar's, and the init container's.
    parts = (("log", Role.SIDECAR, 1), ("setup", Role.INIT, 3), ("one", Role.APP, 1))
    pods = [
        a_row(
            pod_uid=a_pod_uid(2),
            pod="parts",
            container=name,
            role=role,
            group=place,
            shares=(Share(a_uuid(0), gib * 1024, 0),),
        )
        for place, (name, role, gib) in enumerate((*parts, ("two", Role.APP, 1)))
    ]
    both = a_row(shares=(Share(a_uuid(0), 3072, 30), Share(a_uuid(3), 0, 25)), slice_ids=SLICES)
    absent = a_row(pod_uid=a_pod_uid(3), pod="absent", shares=(Share(a_uuid(7), 1024, 10),))
    twins = [  # their promises are added up, and the later one has the use
        a_row(
            pod_uid=a_pod_uid(n),
            pod="twin",
            shares=(Share(a_uuid(0), 1024, 10),),
            answered_at=NOON + dt.timedelta(minutes=n),
        )
        for n in (5, 4)
    ]
    limited, free, adopted = (
        Holder("plain", pod, "main") for pod in ("limited", "free", "adopted")
    )
    plain = [
        a_plain_row(uid=PodUid("a" * 32), slice_ids=ids(4), holder=limited),
        a_plain_row(uid=PodUid("b" * 32), slice_ids=ids(5), holder=free, limited=False),
        a_plain_row(uid=PodUid("c" * 32), slice_ids=ids(6)),
        a_plain_row(uid=PodUid("d" * 32), slice_ids=ids(7), holder=adopted, adopted=True),
    ]
    memory = MemoryUse(context=100, module=20, buffer=3, total=200)
    forged = MemoryUse(context=5, total=4)  # what is left of the total wraps, as in HAMi
    first = a_gpu_use(memory_limit=3 << 30, sm_percent=25)
    used = {
        both.key: a_use(
            msgspec.structs.replace(first, memory=memory),
            a_gpu_use(3, total=1 << 30, memory_limit=0, sm_percent=250),
            processes=3,
            last_kernel=NOON - dt.timedelta(seconds=90, milliseconds=700),
        ),
        absent.key: a_use(msgspec.structs.replace(a_gpu_use(7), memory=forged)),
        twins[0].key: a_use(a_gpu_use(total=2)),
        twins[1].key: a_use(a_gpu_use(total=1)),
        pods[0].key: ContainerUse(NOON, RegionState.UNREADABLE),
    }
    return facts(
        msgspec.structs.replace(an_inventory(gpus=gpus), driver_version="570.148.08"),
        tuple(
            SliceGroup(a_uuid(gpu), named, healthy=gpu == 0, numa=0)
            for gpu, named in zip((0, 3), listed, strict=True)
        ),
        (both, *pods, absent, *twins, *plain),
        newest=newest.get,
        used=used.get,
        checks=(
            Check("state", ok=True),
            Check("stream", ok=False),
            Check("api", ok=False, required=False),
            Check("hook", ok=True, required=False),
        ),
    )


SLICES = (slice_id(a_uuid(0), 0), slice_id(a_uuid(3), 0))


def counts():
    """What the services of that node have counted."""
    xids = Tally("xid_events_total", "XIDs.", ("gpu", "xid"))
    for uuid in (a_uuid(0), a_uuid(9), a_uuid(9), a_uuid(11), "unknown"):
        xids.add(uuid, "31")
    started = Tally("registrations_total", "Register calls.", ("trigger",), expected=[("new",)])
    for trigger in ("start", "start", 'quote " and\nline'):
        started.add(trigger)
    named: dict = {"namespace": "hami_agent", "buckets": (0.5,), "registry": None}
    waits = Histogram("rpc_duration_seconds", "Calls.", ("code",), **named)
    for seconds, code in ((0.25, "OK"), (4.0, "OK"), (1.0, "UNKNOWN")):
        waits.labels(code).observe(seconds)
    gauge = ("directories_kept", "Kept.", lambda: float("inf"))
    errors = Tally("checkpoint_errors", "Failed writes.")
    return (xids, started, errors), (waits,), (gauge,)


def a_gpu_use(index=0, *, uuid=None, total=0, memory_limit=0, sm_percent=0):
    """What a container uses of one GPU."""
    name = a_uuid(index) if uuid is None else uuid
    return RegionGpu(name, memory_limit, MemoryUse(total=total), sm_percent)


def a_use(*gpus, **more):
    """A container's region at noon."""
    return ContainerUse(NOON, RegionState.READABLE, gpus, **more)


async def golden_lines(hami="both"):
    """What a_node() shows, without the series about the process."""
    text, _ = await scrape(a_node(), counts(), hami=hami)
    return [line for line in text.splitlines() if not line.startswith(LEFT_OUT)]


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(asyncio.run(golden_lines())) + "\n")

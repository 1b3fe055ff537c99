"""The metrics page, rendered from values in memory: the agent's own series and HAMi's."""

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, TypeAlias

from aiohttp import web
from msgspec.structs import astuple
from prometheus_client import (
    CollectorRegistry,
    Histogram,
    Metric,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from typing_extensions import override

from agent.allocate.room import promised
from agent.cluster import CORE_POLICY_ENV
from agent.hami.region import RegionState
from agent.kit.timing import Tally
from agent.ledger import Holder, Row, gaps
from agent.model import MIB, NO_INDEX, Condition, GpuSample, GpuUuid, HamiNames
from agent.status import StatusFacts, gpu_labels
from agent.web.server import Page, Reused

PREFIX: Final = "hami_agent_"
"""Before the agent's own names."""
TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus' text format, whatever the client accepts."""
KEPT: Final = 0.25
"""Seconds for which a rendered page is reused. Rendering takes the loop 14 ms with 8 GPUs and
80 containers, so many requests at once would delay the kubelet."""

CONTAINER: Final = ("namespace", "pod", "container")
SHARE: Final = ("gpu", *CONTAINER)
"""Labels of a container, and of one of its GPUs."""
APPLIED: Final = frozenset({"force", "FORCE", "disable", "DISABLE"})
"""The policies that HAMi-core knows; any other text is its default."""
Gauge: TypeAlias = tuple[str, str, Callable[[], float]]
"""The name of a number without the agent's prefix, its text, and what returns it."""
Services: TypeAlias = tuple[Sequence[Tally], Sequence[Histogram], Sequence[Gauge]]
"""The counts, durations and numbers of the services, each name once."""
_Labels: TypeAlias = tuple[str, ...]
_Named: TypeAlias = Mapping[GpuUuid, str]
"""The label of each GPU."""
_Measured: TypeAlias = Iterator[tuple[_Labels, Mapping[str, float | None]]]
"""The values of the labels, and each number that is measured there; None: it is not known."""
_Sums: TypeAlias = Mapping[str, Mapping[_Labels, float]]


def _summed(measured: _Measured) -> _Sums:
    """The numbers of each thing that is measured, by the values of the labels."""
    sums: dict[str, dict[_Labels, float]] = defaultdict(dict)
    for values, numbers in measured:
        for what, number in numbers.items():
            # Two rows may have one name: the agent has not seen yet that the other pod is gone.
            if number is not None:
                sums[what][values] = sums[what].get(values, 0) + number

    return sums


def _family(name: str, text: str, labels: _Labels, sums: Mapping[_Labels, float]) -> Metric:
    """A family. A name that ends with _total is a counter's, and each other one a gauge's."""
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(name, text, labels=labels)
    for values, number in sums.items():
        family.add_metric(values, number)
    return family


def _divided(number: int | None, by: float) -> float | None:
    """A number in another unit; None: it is not known."""
    return None if number is None else number / by


_OWN: Final[dict[_Labels, Mapping[str, str]]] = {
    (): {
        "allocation_unconfirmed": "Answers that the kubelet has not confirmed after 60 s.",
        "allocation_drifted": "Containers with slices of another GPU that nobody could prevent.",
    },
    ("version",): {
        "build_info": "Version of this agent; the value is 1.",
        "driver_info": "Version of the NVIDIA driver; the value is 1.",
    },
    ("condition",): {"ready": "1 for each condition of readiness that holds."},
    ("reason",): {"degraded": "1 for each failing check that pods do not notice."},
    ("gpu", "uuid", "model", "pci", "numa", "mode"): {
        "gpu_info": "One series per GPU; the label gpu is its index in all series."
    },
    ("gpu", "state"): {
        "gpu_health": "1 for the present condition of each GPU, else 0.",
        "slices": "Slices of each GPU in the kubelet's list by reported health.",
    },
    ("gpu", "condition", "cause", "action", "runbook"): {
        "gpu_served": "1 while the GPU's health lets new containers have it, else 0."
    },
    ("gpu",): {
        "gpu_health_since_timestamp_seconds": "Unix time at which the present condition began.",
        "slices_allocated": "Slices of each GPU that containers hold.",
        "memory_allocated_bytes": "Bytes of each GPU allocated to pods that have not ended.",
        "memory_allocatable_bytes": "Bytes of each GPU that are registered, after scaling.",
        "gpu_utilization_ratio": "Share of the time in which a kernel ran, 0 to 1.",
        "gpu_memory_utilization_ratio": "Share of the time in which memory was accessed, 0 to 1.",
        "gpu_memory_used_bytes": "Bytes of each GPU's memory in use by any process.",
    },
    ("state",): {"container_regions": "Containers by the state of HAMi-core's shared region."},
}
"""The text of each family by its name without prefix, for each set of labels."""

_OF_CONTAINERS: Final[dict[_Labels, Mapping[str, str]]] = {
    SHARE: {
        "container_memory_allocated_bytes": "Bytes of a GPU allocated; none: no limit.",
        "container_cores_allocated_ratio": "Share of a GPU's compute allocated; 0: no limit.",
        "container_slices_allocated": "Slices of each GPU allocated to a container.",
        "container_memory_used_bytes": "Bytes of a GPU that a container uses, by HAMi-core.",
        "container_utilization_ratio": "Share of a GPU's compute that a container uses, 0 to 1.",
    },
    CONTAINER: {
        "container_idle_seconds": "Seconds since a process of a container last started a kernel."
    },
    (*CONTAINER, "keeper", "policy"): {
        "container_limits_info": (
            "Who keeps a container's limits (unknown: its pod is not known), and when its compute "
            "limit applies (default: beside other busy containers); the value is 1."
        )
    },
}
"""The same of containers; left out if `metrics.containers` is false."""

_FORMER: Final = {
    "memory_allocated_bytes": "memory_promised_bytes",
    "memory_allocatable_bytes": "memory_sellable_bytes",
    "container_memory_allocated_bytes": "container_memory_promised_bytes",
    "container_cores_allocated_ratio": "container_cores_promised_ratio",
    "container_slices_allocated": "container_slices_promised",
}
"""The name that a family had in 0.1; 0.2 serves both."""


def _of_node(facts: StatusFacts, labels: _Named) -> _Measured:
    """The agent, its checks, and which GPU each label means."""
    yield (facts.about.version,), {"build_info": 1}
    if version := facts.inventory.driver_version:
        yield (version,), {"driver_info": 1}

    drifted, late = gaps(facts.ledger, facts.now)
    yield (), {"allocation_unconfirmed": late}
    if facts.about.scheduler == "hami":  # plain mode has nothing to compare with
        yield (), {"allocation_drifted": drifted}

    for check in facts.checks:
        yield (check.name,), {"ready": check.ok} if check.required else {"degraded": not check.ok}

    for shared in facts.inventory.gpus:
        gpu, numa = shared.gpu, "" if shared.gpu.numa is None else str(shared.gpu.numa)
        yield (labels[gpu.uuid], gpu.uuid, gpu.name, gpu.pci, numa, shared.mode), {"gpu_info": 1}


def _of_gpus(facts: StatusFacts, labels: _Named) -> _Measured:
    """Health, slices and memory of each GPU of the inventory, and its newest sample."""
    listed = {(group.uuid, group.healthy): len(group.ids) for group in facts.slices.groups}
    held = facts.ledger.living(facts.pods).held_ids

    for gpu in facts.inventory.gpus:
        name, now, newest = labels[gpu.uuid], gpu.health, facts.newest(gpu.uuid)
        for condition in Condition:
            yield (name, condition.value), {"gpu_health": now.condition is condition}

        verdict = (now.condition.value, now.cause, now.action, now.runbook)
        yield (name, *verdict), {"gpu_served": now.serving}
        for word, healthy in (("healthy", True), ("unhealthy", False)):
            yield (name, word), {"slices": listed.get((gpu.uuid, healthy), 0)}

        # Of a GPU without a sample, nothing is known.
        sample = newest or GpuSample(gpu.uuid)
        numbers = {
            "gpu_health_since_timestamp_seconds": now.since.timestamp(),
            "slices_allocated": len(held.get(gpu.uuid, ())),
            "memory_allocated_bytes": promised(facts.ledger, facts.pods, gpu).memory_mib * MIB,
            "memory_allocatable_bytes": gpu.registered_mib * MIB,
            "gpu_utilization_ratio": _divided(sample.gpu_percent, 100),
            "gpu_memory_utilization_ratio": _divided(sample.memory_percent, 100),
            "gpu_memory_used_bytes": _divided(sample.used_mib, 1 / MIB),
        }
        yield (name,), numbers
        if gpu.gpu.index == NO_INDEX:
            continue

        index, model = str(gpu.gpu.index), TYPE_PREFIX + gpu.gpu.name
        of = (facts.about.name, index, gpu.uuid[:UUID_LENGTH], model)
        # As HAMi's monitor counts: with what the driver reserves.
        used = None if sample.used_mib is None else sample.used_mib + sample.reserved_mib
        of_hami = {
            "gpu_used": _divided(used, 1 / MIB),
            "gpu_busy": sample.gpu_percent,
            "gpu_memory_busy": sample.memory_percent,
            "gpu_celsius": sample.celsius,
            "gpu_watts": _divided(sample.milliwatts, 1000),
        }
        yield (*of, ZONE), of_hami
        yield (*of, "corrected", ZONE), {"gpu_ecc": sample.ecc_corrected}
        yield (*of, "uncorrected", ZONE), {"gpu_ecc": sample.ecc_uncorrected}


def _of_rows(facts: StatusFacts, labels: _Named, rows: Iterable[tuple[Holder, Row]]) -> _Measured:
    """What containers were given."""
    whole = {gpu.uuid: gpu.registered_mib for gpu in facts.inventory.gpus}
    for holder, row in rows:
        for share in row.limits:
            mib = share.memory_mib or whole.get(share.uuid, 0)
            numbers = {
                "container_memory_allocated_bytes": mib * MIB,
                "container_cores_allocated_ratio": share.core_percent / 100,
            }
            yield (labels.get(share.uuid, share.uuid), *astuple(holder)), numbers

        for uuid in row.gpus:
            yield (labels.get(uuid, uuid), *astuple(holder)), {"container_slices_allocated": 1}


def _of_containers(facts: StatusFacts, labels: _Named, newest: Mapping[Holder, Row]) -> _Measured:
    """What keeps the limits of each container and by which policy, and what it uses."""
    for holder, row in newest.items():
        name, use = astuple(holder), facts.used(row.key)
        if row.limits:
            pod = facts.pods.pods.get(row.key.pod_uid)
            own = {one.name: one.core_policy for one in pod.containers} if pod else {}
            given = own.get(holder.container) or dict(row.edits.envs).get(CORE_POLICY_ENV, "")
            keeper = "none" if pod and pod.unkept(holder.container) else "hami-core"
            policy = given.lower() if given in APPLIED else "default"
            yield (*name, keeper if pod else "unknown", policy), {"container_limits_info": 1}

        if use is None:
            continue

        # HAMi has the time since the last kernel for each GPU, and the agent for the container.
        idle = None if use.idle is None else use.idle.total_seconds()
        yield name, {"container_idle_seconds": idle}

        for index, gpu in enumerate(use.gpus):
            memory, label = gpu.memory, labels.get(GpuUuid(gpu.uuid), gpu.uuid)
            yield (label, *name), {"container_memory_used_bytes": memory.total}
            busy = min(gpu.sm_percent, 100) / 100
            yield (label, *name), {"container_utilization_ratio": busy}

            of = (*name, str(index), gpu.uuid[:UUID_LENGTH])
            of_hami = {
                "used": memory.total,
                "limit": gpu.memory_limit,
                "busy": gpu.sm_percent,
                "idle": None if idle is None else int(idle),
                "context": memory.context,
                "module": memory.module,
                "buffer": memory.buffer,
            }
            yield (*of, ZONE), of_hami

            # Sizes that HAMi has as label values; the last is what the others leave of the total.
            sizes = memory.context, memory.module, memory.buffer
            parts = map(str, (*sizes, (memory.total - sum(sizes)) % WHOLE))
            yield (*of, *parts, ZONE), {"parts": memory.total}


# The series of HAMi's vGPUmonitor, by HAMi's names, labels and scales.
#
# Source: HAMi v2.10 cmd/vGPUmonitor/metrics.go, pkg/metrics/metrics.go; HAMi #2732 (temperature,
# power, ECC) and #2808.

ZONE: Final = "vGPU"
"""The value of HAMi's label `zone`."""
UUID_LENGTH: Final = 40
"""Characters of a UUID, as HAMi cuts it."""
TYPE_PREFIX: Final = "NVIDIA-"
"""Before every name, also before one that begins with it. The register annotation differs."""
WHOLE: Final = 2**64
"""HAMi's sums are of 64 bits without a sign."""
_FURTHER: Final = {"gpu_ecc": ("error_type",), "parts": ("context", "module", "data", "offset")}
"""The labels of a measure beside those of its GPU or container."""

_HAMI: Final[Mapping[HamiNames, Mapping[_Labels, Mapping[str, tuple[str, str]]]]] = {
    "current": {
        ("node", "device_index", "device_uuid", "device_type"): {
            "hami_host_gpu_memory_used_bytes": ("gpu_used", "GPU memory in use, in bytes"),
            "hami_host_gpu_utilization_ratio": ("gpu_busy", "GPU utilization (0-100)"),
            "hami_host_gpu_memory_controller_utilization_ratio": (
                "gpu_memory_busy",
                "GPU memory controller utilization (0-100)",
            ),
            "hami_host_gpu_temperature_celsius": ("gpu_celsius", "GPU temperature"),
            "hami_host_gpu_power_usage_watts": ("gpu_watts", "GPU power draw in watts"),
            "hami_host_gpu_ecc_errors_total": ("gpu_ecc", "GPU ECC errors in its lifetime"),
        },
        ("namespace", "pod", "container", "vdevice_index", "device_uuid"): {
            "hami_vgpu_memory_used_bytes": ("used", "vGPU memory in use, in bytes"),
            "hami_vgpu_memory_limit_bytes": ("limit", "vGPU memory limit in bytes"),
            "hami_container_device_memory_bytes": ("used", "vGPU memory in use, in bytes"),
            "hami_container_device_utilization_ratio": ("busy", "vGPU utilization (0-100)"),
            "hami_container_last_kernel_elapsed_seconds": ("idle", "Seconds since last kernel"),
            "hami_vgpu_memory_context_bytes": ("context", "vGPU memory of contexts in bytes"),
            "hami_vgpu_memory_module_bytes": ("module", "vGPU memory of modules in bytes"),
            "hami_vgpu_memory_buffer_bytes": ("buffer", "vGPU memory of buffers in bytes"),
        },
    },
    "legacy": {
        ("nodeid", "deviceidx", "deviceuuid", "devicetype"): {
            "HostGPUMemoryUsage": ("gpu_used", "GPU memory in use, in bytes"),
            "HostCoreUtilization": ("gpu_busy", "GPU utilization (0-100)"),
        },
        ("podnamespace", "podname", "ctrname", "vdeviceid", "deviceuuid"): {
            "vGPU_device_memory_usage_in_bytes": ("used", "vGPU memory in use, in bytes"),
            "vGPU_device_memory_limit_in_bytes": ("limit", "vGPU memory limit in bytes"),
            "Device_memory_desc_of_container": ("parts", "vGPU memory, its parts as labels"),
            "Device_utilization_desc_of_container": ("busy", "vGPU utilization (0-100)"),
            "Device_last_kernel_of_container": ("idle", "Seconds since last kernel"),
        },
    },
}
"""The names by the labels of a GPU, or of a container on one, each with its measure and text."""


def _of_hami(names: HamiNames, version: str, sums: _Sums) -> Iterator[Metric]:
    if names == "none":
        return

    for form, tables in _HAMI.items():
        for labels, families in tables.items() if names in {form, "both"} else ():
            for name, (measure, text) in families.items():
                further = _FURTHER.get(measure, ())
                yield _family(name, text, (*labels, *further, "zone"), sums[measure])

    text = "hami build metadata exposed as labels with a constant value of 1."
    labels = ("build_date", "compiler", "go_version", "platform", "revision", "version")
    yield _family("hami_build_info", text, labels, {("",) * 5 + (version,): 1})


@dataclasses.dataclass(eq=False)
class AgentCollector(Collector):
    """The agent's own series, made for every scrape of what `facts` returns then.

    `names_pods`: containers have series. `hami`: by which names HAMi's series are served, too.
    """

    facts: Callable[[], StatusFacts]
    services: Services = ((), (), ())
    names_pods: bool = True
    hami: HamiNames = "none"

    @override
    def collect(self) -> Iterator[Metric]:
        """Yield all families, each once."""
        facts, (tallies, durations, readings) = self.facts(), self.services
        labels = gpu_labels(facts.inventory)
        running = [row for row in facts.ledger.rows if row.takes_room(facts.pods)]
        rows = running if self.names_pods else ()
        given = [(row.holder, row) for row in rows if row.holder is not None and not row.adopted]

        # The newest row of each holder: the agent has not seen yet that the other pod is gone.
        newest = dict(sorted(given, key=lambda one: one[1].answered_at))
        uses = filter(None, (facts.used(row.key) for row in running))
        states = Counter(use.state for use in uses)
        sums = _summed(
            itertools.chain(
                _of_node(facts, labels),
                _of_gpus(facts, labels),
                (((one.value,), {"container_regions": states[one]}) for one in RegionState),
                _of_rows(facts, labels, given),
                _of_containers(facts, labels, newest),
            )
        )
        for names, texts in (_OWN | (_OF_CONTAINERS if self.names_pods else {})).items():
            for name, text in texts.items():
                yield _family(PREFIX + name, text, names, sums[name])
                if former := _FORMER.get(name):
                    said = f"The former name of {PREFIX}{name}, in this release for the last time."
                    yield _family(PREFIX + former, said, names, sums[name])

        yield from _of_hami(self.hami, facts.about.version, sums)

        for name, text, read in readings:
            yield GaugeMetricFamily(PREFIX + name, text, value=read())

        # Tallies name a GPU by its UUID.
        named = {str(uuid): label for uuid, label in labels.items()}
        for tally in tallies:
            counter = CounterMetricFamily(PREFIX + tally.name, tally.help, labels=tally.labels)
            counts = dict.fromkeys(tally.expected, 0) | dict(tally.items())
            for raw, count in sorted(counts.items()):
                pairs = zip(tally.labels, raw, strict=True)
                values = [named.get(one, one) if label == "gpu" else one for label, one in pairs]
                counter.add_metric(values, count)

            yield counter

        for histogram in durations:
            yield from histogram.collect()


def metrics_page(collector: Collector) -> Page:
    """`/metrics`, in Prometheus' text format 0.0.4, rendered at most once in KEPT seconds."""
    registry = CollectorRegistry()
    registry.register(collector)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # no time of creation
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    body = Reused(partial(generate_latest, registry), KEPT)

    def page(_request: web.BaseRequest) -> web.Response:
        return web.Response(body=body.value(), headers={"Content-Type": TEXT})

    return page

"""The metrics page, which renders values in memory on request: the agent's own series.

In the order of the page: the agent itself, GPUs, what containers were promised and use, HAMi's
series (`hami`), and the counts and durations of the services.
"""

import asyncio
import datetime as dt
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec
from aiohttp import web
from msgspec.structs import astuple
from prometheus_client import (
    CollectorRegistry,
    Metric,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector
from typing_extensions import override

from agent.allocate.edits import CORE_POLICY_ENV
from agent.allocate.room import promised, takes_room
from agent.hami.region import RegionState
from agent.kit.timing import Durations, Tally
from agent.ledger import Holder, Row
from agent.model import (
    MIB,
    NO_INDEX,
    Condition,
    GpuSample,
    GpuUuid,
    HamiNames,
    SharedGpu,
)
from agent.status import StatusFacts, gpu_labels, labelled
from agent.usage import ContainerGpuUse, ContainerUse
from agent.web.api import BuildInfo

PREFIX: Final = "hami_agent_"
TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
KEPT: Final = 0.25
"""Seconds for which a rendered page is reused. Rendering takes the loop 14 ms with 8 GPUs and
80 containers, so many requests at once would delay the kubelet."""
GPU: Final = ("gpu",)
CONTAINER: Final = ("namespace", "pod", "container")
SHARE: Final = (*GPU, *CONTAINER)
UNLIMITED: Final = 100
"""Percent of compute from which on a limit is none."""
APPLIED: Final = frozenset({"force", "FORCE", "disable", "DISABLE"})
"""The policies that HAMi-core knows; any other text is its default."""
UNKNOWN: Final = "unknown"
"""The label of a GPU that the driver's event does not name."""

Used = tuple[Holder, ContainerUse]
"""A container, and what it uses."""


class Gauge(msgspec.Struct, frozen=True):
    """A number that `read` returns. `name` is without the agent's prefix."""

    name: str
    help: str
    read: Callable[[], float]


class MetricSources(msgspec.Struct, frozen=True):
    """The counts and numbers of services, each name once."""

    tallies: Sequence[Tally] = ()
    durations: Sequence[Durations] = ()
    readings: Sequence[Gauge] = ()


_Labels: TypeAlias = tuple[str, ...]
_Values: TypeAlias = Iterable[tuple[_Labels, float]]
"""The values of the labels, and the number, of each series of a family."""


class _Scrape(msgspec.Struct, frozen=True):
    """What one rendering of the page shows.

    - `labels`: the value of the label `gpu`. `gpus`: the GPUs of the inventory, each with it.
    - `counted`: GPUs of which something is counted or held. Each has its series in gpu_info.
    - `running`: the rows that take room. `given`: those with a holder, each with it. `newest`: the
      newest of each holder: the agent has not seen yet that the other pod is gone.
    - `used`: what the containers of `newest` use.
    """

    build: BuildInfo
    facts: StatusFacts
    labels: Mapping[GpuUuid, str]
    gpus: Sequence[tuple[str, SharedGpu]]
    counted: Collection[str]
    running: Sequence[Row]
    given: Sequence[tuple[Holder, Row]]
    newest: Mapping[Holder, Row]
    used: Sequence[Used]

    @property
    def samples(self) -> list[tuple[str, GpuSample]]:
        """The newest sample of each GPU that has one, with the GPU's label."""
        found = ((name, self.facts.newest(gpu.uuid)) for name, gpu in self.gpus)
        return [(name, one.sample) for name, one in found if one is not None]

    @property
    def gpus_used(self) -> list[tuple[_Labels, ContainerGpuUse]]:
        """What each container uses of each of its GPUs, with the labels of SHARE."""
        return [(self.part(gpu.uuid, holder), gpu) for holder, use in self.used for gpu in use.gpus]

    def part(self, uuid: str, holder: Holder) -> _Labels:
        """The labels of SHARE."""
        return (self.labels.get(GpuUuid(uuid), uuid), *astuple(holder))


_Family: TypeAlias = tuple[str, str, _Labels, Callable[[_Scrape], _Values]]
"""Name, help, labels and values. What is not known has no series.

A name that ends with _total is a counter's, and each other one a gauge's.
"""


def _gpu_info(at: _Scrape) -> _Values:
    """Which GPU each label means: the GPUs of the inventory, and others that are `counted`."""
    facts = at.facts
    for shared in (*facts.inventory.gpus, *(one for one in facts.gone if one.uuid in at.counted)):
        gpu, name = shared.gpu, at.labels[shared.uuid]
        numa = "" if gpu.numa is None else str(gpu.numa)
        yield (name, gpu.uuid, gpu.name, gpu.pci, numa, shared.mode), 1
    # A row or a count may name a GPU that left before this process began: it has no other label.
    for uuid in sorted(uuid for uuid in at.counted if uuid not in at.labels and uuid != UNKNOWN):
        yield (uuid, uuid, "", "", "", ""), 1


def _slices(at: _Scrape) -> _Values:
    listed = {(group.uuid, group.healthy): len(group.ids) for group in at.facts.slices.groups}
    for name, gpu in at.gpus:
        yield (name, "healthy"), listed.get((gpu.uuid, True), 0)
        yield (name, "unhealthy"), listed.get((gpu.uuid, False), 0)


def _slices_allocated(at: _Scrape) -> _Values:
    held = at.facts.ledger.living(at.facts.pods).held_ids()
    return [((name,), len(held.get(gpu.uuid, ()))) for name, gpu in at.gpus]


def _regions(at: _Scrape) -> _Values:
    uses = (at.facts.used(row.key) for row in at.running)
    count = Counter(use.state for use in uses if use is not None)
    return [((state.value,), count[state]) for state in RegionState]


def _memory_promised(at: _Scrape) -> _Values:
    whole = {gpu.uuid: gpu.registered_mib for gpu in at.facts.inventory.gpus}
    for holder, row in at.given:
        for share in row.limits:
            mib = share.memory_mib or whole.get(share.uuid, 0)
            yield at.part(share.uuid, holder), mib * MIB


def _limits(at: _Scrape) -> _Values:
    """What keeps the limits of each container that has some, and by which policy."""
    for holder, row in at.newest.items():
        if not row.limits:
            continue
        pod = at.facts.pods.pods.get(row.key.pod_uid)
        own = {one.name: one.core_policy for one in pod.containers} if pod else {}
        given = own.get(holder.container) or dict(row.edits.envs).get(CORE_POLICY_ENV, "")
        keeper = "unknown" if pod is None else "hami-core"
        if pod and pod.unkept(holder.container):
            keeper = "none"
        policy = given.lower() if given in APPLIED else "default"
        yield (*astuple(holder), keeper, policy), 1


_OWN: Final[tuple[_Family, ...]] = (
    (
        "hami_agent_build_info",
        "Version and build of this agent; the value is 1.",
        ("version", "revision", "python", "profile"),
        lambda at: [
            ((at.build.version, at.build.revision, at.build.python, at.build.profile), 1),
        ],
    ),
    (
        "hami_agent_driver_info",
        "Version of the NVIDIA driver; the value is 1.",
        ("version",),
        lambda at: [((version,), 1) for version in (at.facts.inventory.driver_version,) if version],
    ),
    (
        "hami_agent_ready",
        "1 for each condition of readiness that holds.",
        ("condition",),
        lambda at: [((one.name,), one.ok) for one in at.facts.checks if one.required],
    ),
    (
        "hami_agent_degraded",
        "1 for each failing check that pods do not notice.",
        ("reason",),
        lambda at: [((one.name,), not one.ok) for one in at.facts.checks if not one.required],
    ),
    (
        "hami_agent_gpu_info",
        "One series per GPU; the label gpu is its index in all series.",
        ("gpu", "uuid", "model", "pci", "numa", "mode"),
        _gpu_info,
    ),
    (
        "hami_agent_gpu_health",
        "1 for the present condition of each GPU, else 0.",
        ("gpu", "state"),
        lambda at: [
            ((name, condition.value), gpu.health.condition is condition)
            for name, gpu in at.gpus
            for condition in Condition
        ],
    ),
    (
        "hami_agent_gpu_health_since_timestamp_seconds",
        "Unix time at which the present condition of each GPU began.",
        GPU,
        lambda at: [((name,), gpu.health.since.timestamp()) for name, gpu in at.gpus],
    ),
    (
        "hami_agent_gpu_served",
        (
            "1 while the health of a GPU lets new containers have it, else 0; runbook is the id to "
            "look up."
        ),
        ("gpu", "condition", "cause", "action", "runbook"),
        lambda at: [
            ((name, one.condition.value, one.cause, one.action, one.runbook), one.serving)
            for name, one in ((name, gpu.health) for name, gpu in at.gpus)
        ],
    ),
    (
        "hami_agent_slices",
        "Slices of each GPU in the kubelet's list by reported health.",
        ("gpu", "state"),
        _slices,
    ),
    (
        "hami_agent_slices_allocated",
        "Slices of each GPU that containers hold.",
        GPU,
        _slices_allocated,
    ),
    (
        "hami_agent_memory_promised_bytes",
        "Bytes of each GPU promised to pods that have not ended: what the next pod finds taken.",
        GPU,
        lambda at: [
            ((name,), promised(at.facts.ledger, at.facts.pods, gpu).memory_mib * MIB)
            for name, gpu in at.gpus
        ],
    ),
    (
        "hami_agent_memory_sellable_bytes",
        "Bytes of each GPU that are registered, after scaling.",
        GPU,
        lambda at: [((name,), gpu.registered_mib * MIB) for name, gpu in at.gpus],
    ),
    (
        "hami_agent_gpu_utilization_ratio",
        "Share of the time in which a kernel ran, 0 to 1.",
        GPU,
        lambda at: [
            ((name,), one.gpu_percent / 100)
            for name, one in at.samples
            if one.gpu_percent is not None
        ],
    ),
    (
        "hami_agent_gpu_memory_utilization_ratio",
        "Share of the time in which memory was read or written, 0 to 1.",
        GPU,
        lambda at: [
            ((name,), one.memory_percent / 100)
            for name, one in at.samples
            if one.memory_percent is not None
        ],
    ),
    (
        "hami_agent_gpu_memory_used_bytes",
        "Bytes of each GPU's memory in use by any process.",
        GPU,
        lambda at: [
            ((name,), one.used_mib * MIB) for name, one in at.samples if one.used_mib is not None
        ],
    ),
    (
        "hami_agent_container_regions",
        "Containers by the state of HAMi-core's shared region, which says what they use.",
        ("state",),
        _regions,
    ),
)
_OF_CONTAINERS: Final[tuple[_Family, ...]] = (
    (
        "hami_agent_container_memory_promised_bytes",
        "Bytes of each GPU's memory promised to a container; none: it has no limit.",
        SHARE,
        _memory_promised,
    ),
    (
        "hami_agent_container_cores_promised_ratio",
        "Share of each GPU's compute promised to a container, 0 to 1; 0: it has no limit.",
        SHARE,
        lambda at: [
            (at.part(share.uuid, holder), share.core_percent / 100)
            for holder, row in at.given
            for share in row.limits
        ],
    ),
    (
        "hami_agent_container_slices_promised",
        "Slices of each GPU promised to a container.",
        SHARE,
        lambda at: [(at.part(uuid, holder), 1) for holder, row in at.given for uuid in row.gpus],
    ),
    (
        "hami_agent_container_limits_info",
        (
            "Who keeps a container's limits (hami-core, none, or unknown: its pod is not known), "
            "and when its compute limit applies (default: beside other busy containers, force, "
            "disable); the value is 1."
        ),
        (*CONTAINER, "keeper", "policy"),
        _limits,
    ),
    (
        "hami_agent_container_memory_used_bytes",
        "Bytes of each GPU's memory that a container uses, as HAMi-core counts them.",
        SHARE,
        lambda at: [(part, gpu.memory.total) for part, gpu in at.gpus_used],
    ),
    (
        "hami_agent_container_memory_limit_bytes",
        "Bytes of each GPU's memory to which HAMi-core limits a container now.",
        SHARE,
        lambda at: [(part, gpu.memory_limit) for part, gpu in at.gpus_used if gpu.memory_limit > 0],
    ),
    (
        "hami_agent_container_utilization_ratio",
        "Share of each GPU's compute that a container uses, 0 to 1.",
        SHARE,
        lambda at: [(part, min(gpu.sm_percent, 100) / 100) for part, gpu in at.gpus_used],
    ),
    (
        "hami_agent_container_cores_limit_ratio",
        "Share of each GPU's compute to which HAMi-core limits a container now, 0 to 1.",
        SHARE,
        lambda at: [
            (part, gpu.core_limit / 100)
            for part, gpu in at.gpus_used
            if 0 < gpu.core_limit < UNLIMITED
        ],
    ),
    (
        "hami_agent_container_idle_seconds",
        "Seconds since a process of a container last started a kernel.",
        CONTAINER,
        lambda at: [
            (astuple(holder), use.idle.total_seconds())
            for holder, use in at.used
            if use.idle is not None
        ],
    ),
    (
        "hami_agent_container_processes",
        "Processes of a container that use its GPUs.",
        CONTAINER,
        lambda at: [
            (astuple(holder), use.processes)
            for holder, use in at.used
            if use.state is RegionState.READABLE
        ],
    ),
)


# The series of HAMi's vGPUmonitor, by HAMi's names, labels and scales.
#
# Source: HAMi v2.10 cmd/vGPUmonitor/metrics.go, pkg/metrics/metrics.go; HAMi #2732 (temperature,
# power, ECC) and #2808.

ZONE: Final = "vGPU"
UUID_LENGTH: Final = 40
TYPE_PREFIX: Final = "NVIDIA-"
"""Before every name, also before one that begins with it. The register annotation differs."""
WHOLE: Final = 2**64
"""HAMi's sums are of 64 bits without a sign."""

_NODE: Final = ("node", "device_index", "device_uuid", "device_type", "zone")
_CONTAINER: Final = ("namespace", "pod", "container", "vdevice_index", "device_uuid", "zone")
_OLD_NODE: Final = ("nodeid", "deviceidx", "deviceuuid", "devicetype", "zone")
_OLD_CONTAINER: Final = ("podnamespace", "podname", "ctrname", "vdeviceid", "deviceuuid")


def _of_gpus(
    read: Callable[[GpuSample], Mapping[_Labels, float | None]],
) -> Callable[[_Scrape], _Values]:
    """What each GPU reports, by the values of further labels; what it does not has no series."""

    def values(at: _Scrape) -> _Values:
        for shared in at.facts.inventory.gpus:
            gpu, sampled = shared.gpu, at.facts.newest(shared.uuid)
            if gpu.index == NO_INDEX or sampled is None:
                continue
            uuid, name = gpu.uuid[:UUID_LENGTH], TYPE_PREFIX + gpu.name
            for more, number in read(sampled.sample).items():
                if number is not None:
                    yield (at.facts.about.name, str(gpu.index), uuid, name, *more, ZONE), number

    return values


def _of_shares(read: Callable[[ContainerGpuUse], float]) -> Callable[[_Scrape], _Values]:
    """What each container uses of each GPU."""
    return lambda at: [((*labels, ZONE), read(gpu)) for labels, gpu, _ in _vgpus(at)]


def _vgpus(at: _Scrape) -> Iterator[tuple[_Labels, ContainerGpuUse, ContainerUse]]:
    for holder, use in at.used:
        for gpu in use.gpus:
            labels = (*astuple(holder), str(gpu.index), gpu.uuid[:UUID_LENGTH])
            yield labels, gpu, use


def _parts(at: _Scrape) -> _Values:
    """Sizes that HAMi has as label values; the last is what the others leave of the total."""
    for labels, gpu, _ in _vgpus(at):
        known = gpu.memory.context, gpu.memory.module, gpu.memory.buffer
        parts = (*known, (gpu.memory.total - sum(known)) % WHOLE)
        yield (*labels, *map(str, parts), ZONE), gpu.memory.total


def _idle(at: _Scrape) -> _Values:
    """The time since the last kernel, which is the same for all GPUs of a container."""
    for labels, _, use in _vgpus(at):
        if use.idle is not None:
            yield (*labels, ZONE), use.idle // dt.timedelta(seconds=1)


# As HAMi's monitor counts: with what the driver reserves.
_HOST_MEMORY: Final = _of_gpus(
    lambda one: {(): None if one.used_mib is None else (one.used_mib + one.reserved_mib) * MIB}
)
_HOST_COMPUTE: Final = _of_gpus(lambda one: {(): one.gpu_percent})
_ECC: Final = _of_gpus(
    lambda one: {("corrected",): one.ecc_corrected, ("uncorrected",): one.ecc_uncorrected}
)
_MEMORY: Final = _of_shares(lambda gpu: gpu.memory.total)
_LIMIT: Final = _of_shares(lambda gpu: gpu.memory_limit)
_COMPUTE: Final = _of_shares(lambda gpu: gpu.sm_percent)
_CURRENT: Final[tuple[_Family, ...]] = (
    ("hami_host_gpu_memory_used_bytes", "GPU device memory usage in bytes", _NODE, _HOST_MEMORY),
    ("hami_host_gpu_utilization_ratio", "GPU core utilization ratio (0-100)", _NODE, _HOST_COMPUTE),
    (
        "hami_host_gpu_memory_controller_utilization_ratio",
        "GPU memory controller utilization ratio (0-100)",
        _NODE,
        _of_gpus(lambda one: {(): one.memory_percent}),
    ),
    (
        "hami_host_gpu_temperature_celsius",
        "GPU temperature in degrees Celsius",
        _NODE,
        _of_gpus(lambda one: {(): one.celsius}),
    ),
    (
        "hami_host_gpu_power_usage_watts",
        "GPU power draw in watts",
        _NODE,
        _of_gpus(lambda one: {(): one.milliwatts and one.milliwatts / 1000}),
    ),
    (
        "hami_host_gpu_ecc_errors_total",
        "GPU ECC errors in its lifetime",
        (*_NODE[:-1], "error_type", "zone"),
        _ECC,
    ),
    ("hami_vgpu_memory_used_bytes", "vGPU device memory usage in bytes", _CONTAINER, _MEMORY),
    ("hami_vgpu_memory_limit_bytes", "vGPU device memory limit in bytes", _CONTAINER, _LIMIT),
    (
        "hami_container_device_memory_bytes",
        "Container device memory usage in bytes",
        _CONTAINER,
        _MEMORY,
    ),
    (
        "hami_container_device_utilization_ratio",
        "Container device SM utilization ratio",
        _CONTAINER,
        _COMPUTE,
    ),
    (
        "hami_container_last_kernel_elapsed_seconds",
        "Seconds since last kernel execution in container",
        _CONTAINER,
        _idle,
    ),
    (
        "hami_vgpu_memory_context_bytes",
        "Container device memory context size in bytes",
        _CONTAINER,
        _of_shares(lambda gpu: gpu.memory.context),
    ),
    (
        "hami_vgpu_memory_module_bytes",
        "Container device memory module size in bytes",
        _CONTAINER,
        _of_shares(lambda gpu: gpu.memory.module),
    ),
    (
        "hami_vgpu_memory_buffer_bytes",
        "Container device memory buffer size in bytes",
        _CONTAINER,
        _of_shares(lambda gpu: gpu.memory.buffer),
    ),
)
_LEGACY: Final[tuple[_Family, ...]] = (
    ("HostGPUMemoryUsage", "GPU device memory usage", _OLD_NODE, _HOST_MEMORY),
    ("HostCoreUtilization", "GPU core utilization", _OLD_NODE, _HOST_COMPUTE),
    ("vGPU_device_memory_usage_in_bytes", "vGPU device usage", (*_OLD_CONTAINER, "zone"), _MEMORY),
    ("vGPU_device_memory_limit_in_bytes", "vGPU device limit", (*_OLD_CONTAINER, "zone"), _LIMIT),
    (
        "Device_memory_desc_of_container",
        "Container device memory description",
        (*_OLD_CONTAINER, "context", "module", "data", "offset", "zone"),
        _parts,
    ),
    (
        "Device_utilization_desc_of_container",
        "Container device utilization description",
        (*_OLD_CONTAINER, "zone"),
        _COMPUTE,
    ),
    (
        "Device_last_kernel_of_container",
        "Container device last kernel description",
        (*_OLD_CONTAINER, "zone"),
        _idle,
    ),
)
_HAMI_BUILD: Final[_Family] = (
    "hami_build_info",
    "hami build metadata exposed as labels with a constant value of 1.",
    ("build_date", "compiler", "go_version", "platform", "revision", "version"),
    lambda at: [(("", "", "", "", at.build.revision, at.build.version), 1)],
)
_FORMS: Final[Mapping[HamiNames, tuple[_Family, ...]]] = {
    HamiNames.NONE: (),
    HamiNames.CURRENT: (*_CURRENT, _HAMI_BUILD),
    HamiNames.LEGACY: (*_LEGACY, _HAMI_BUILD),
    HamiNames.BOTH: (*_CURRENT, *_LEGACY, _HAMI_BUILD),
}


class AgentCollector(Collector):
    """The agent's own series, made for every scrape of what `facts` and `series` return then.

    `names_pods`: what each container was promised and uses has series. `hami`: by which names
    HAMi's series are served, too.
    """

    def __init__(
        self,
        build: BuildInfo,
        facts: Callable[[], StatusFacts],
        series: Callable[[], MetricSources] = MetricSources,
        *,
        names_pods: bool = True,
        hami: HamiNames = HamiNames.NONE,
    ) -> None:
        self._build = build
        self._facts = facts
        self._series = series
        self._names_pods = names_pods
        self._hami = hami

    @override
    def collect(self) -> Iterator[Metric]:
        """Yield all families, each once."""
        facts, series = self._facts(), self._series()
        running = [row for row in facts.ledger.rows if takes_room(row, facts.pods)]
        rows = running if self._names_pods else ()
        given = [(row.holder, row) for row in rows if row.holder is not None and not row.adopted]
        newest = dict(sorted(given, key=lambda one: one[1].answered_at))
        uses = ((holder, facts.used(row.key)) for holder, row in newest.items())
        at = _Scrape(
            self._build,
            facts,
            labels=gpu_labels(facts.inventory, facts.gone),
            gpus=labelled(facts.inventory),
            counted=counted_gpus(series.tallies) | {uuid for _, row in given for uuid in row.gpus},
            running=running,
            given=given,
            newest=newest,
            used=[(holder, use) for holder, use in uses if use is not None],
        )
        own = (*_OWN, *(_OF_CONTAINERS if self._names_pods else ()))
        for name, text, labels, values in (*own, *_FORMS[self._hami]):
            # Two rows of one name: the agent has not seen yet that the other pod is gone.
            sums: dict[_Labels, float] = {}
            for of, number in values(at):
                sums[of] = sums.get(of, 0) + number
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(name, text, labels=labels)
            for of, number in sums.items():
                family.add_metric(of, number)
            yield family
        for reading in series.readings:
            yield GaugeMetricFamily(PREFIX + reading.name, reading.help, value=reading.read())
        yield from counters(series.tallies, {str(uuid): name for uuid, name in at.labels.items()})
        yield from histograms(series.durations)


class MetricsPage:
    """`/metrics`, in Prometheus' text format 0.0.4."""

    def __init__(self, collector: Collector) -> None:
        self._body = b""
        self._until = -math.inf
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)

    def page(self, _request: web.BaseRequest) -> web.Response:
        """Render the page, or reuse one of at most 0.25 s."""
        now = asyncio.get_running_loop().time()
        if self._until <= now:
            self._body, self._until = generate_latest(self._registry), now + KEPT
        return web.Response(body=self._body, headers={"Content-Type": TEXT})


def counters(tallies: Iterable[Tally], gpus: Mapping[str, str]) -> Iterator[Metric]:
    """Render the counters. Tallies name a GPU by its UUID; `gpus` has the label for it."""
    for tally in tallies:
        family = CounterMetricFamily(PREFIX + tally.name, tally.help, labels=tally.labels)
        counts = dict.fromkeys(tally.expected, 0) | dict(tally.items())
        for raw, count in sorted(counts.items()):
            named = zip(tally.labels, raw, strict=True)
            values = [gpus.get(value, value) if label == "gpu" else value for label, value in named]
            family.add_metric(values, count)
        yield family


def counted_gpus(tallies: Iterable[Tally]) -> frozenset[str]:
    """The UUIDs of the GPUs with a count."""
    return frozenset(
        values[tally.labels.index("gpu")]
        for tally in tallies
        if "gpu" in tally.labels
        for values, _ in tally.items()
    )


def histograms(durations: Iterable[Durations]) -> Iterator[Metric]:
    """Render the histograms."""
    for one in durations:
        family = HistogramMetricFamily(PREFIX + one.name, one.help, labels=one.labels)
        bounds = [*map(str, one.buckets), "+Inf"]
        for row in one.rows():
            buckets = list(zip(bounds, row.cumulative, strict=True))
            family.add_metric(row.labels, buckets, sum_value=row.total)
        yield family

"""The metrics page, which renders values in memory on request: the agent's own series.

In the order of the page: the agent itself, GPUs, what containers were promised and use, HAMi's
series (`hami`), and the counts and durations of the services.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

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
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from typing_extensions import override

from agent.allocate.edits import CORE_POLICY_ENV
from agent.allocate.room import promised, takes_room
from agent.cluster import PodTable
from agent.hami.region import RegionState
from agent.kit.timing import DurationRow, Durations, Tally
from agent.ledger import ContainerKey, Holder, Ledger, Row
from agent.model import MIB, Condition, GpuSample, GpuUuid, Inventory, Sampled, SharedGpu, SliceList
from agent.usage import ContainerUse
from agent.web.api import BuildInfo
from agent.web.hami import Used, hami_families
from agent.web.policy import HamiNames
from agent.web.status import StatusFacts, gpu_labels, labelled

PREFIX: Final = "hami_agent_"
TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text"
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

Named = Sequence[tuple[str, SharedGpu]]
"""The GPUs, each with its label."""
Values = Mapping[tuple[str, ...], float]
"""The number of each series, by the values of its labels."""
T = TypeVar("T", Tally, Durations)


class Gauge(msgspec.Struct, frozen=True):
    """A number that `read` returns. `name` is without the agent's prefix."""

    name: str
    help: str
    read: Callable[[], float]


class MetricSources(msgspec.Struct, frozen=True):
    """The counts and numbers of services; tallies and durations of equal name are added up."""

    tallies: Sequence[Tally] = ()
    durations: Sequence[Durations] = ()
    readings: Sequence[Gauge] = ()


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
        inventory, ledger, pods = facts.inventory, facts.ledger, facts.pods
        named, labels = labelled(inventory), gpu_labels(inventory, facts.gone)
        running = tuple(row for row in ledger.rows if takes_room(row, pods))
        rows = running if self._names_pods else ()
        held = (uuid for _, row in promised_rows(rows) for uuid in row.gpus)
        counted = counted_gpus(series.tallies).union(held)

        yield from agent_families(self._build, facts)
        yield info_family(inventory, facts.gone, counted)
        yield from health_families(named)
        yield from slice_families(named, facts.slices, ledger, pods)
        yield from use_families(named, facts.newest)
        used = tuple(used_containers(rows, facts.used))
        if self._names_pods:
            yield from promised_families(inventory, rows, labels)
            yield limits_family(rows, pods)
            yield from used_families(used, labels)
        regions = Counter(use.state for row in running if (use := facts.used(row.key)) is not None)
        yield _gauge(
            "container_regions",
            "Containers by the state of HAMi-core's shared region, which says what they use.",
            ("state",),
            {(state.value,): regions[state] for state in RegionState},
        )
        yield from hami_families(self._hami, self._build, facts, used)
        for reading in series.readings:
            yield GaugeMetricFamily(PREFIX + reading.name, reading.help, value=reading.read())
        yield from counters(series.tallies, {str(uuid): label for uuid, label in labels.items()})
        yield from histograms(series.durations)


class MetricsPage:
    """`/metrics`: text 0.0.4, or OpenMetrics for a client that accepts it."""

    def __init__(self, collector: Collector) -> None:
        self._rendered: dict[str, tuple[float, bytes]] = {}
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)

    def page(self, request: web.BaseRequest) -> web.Response:
        """Render the page, or reuse one of at most 0.25 s."""
        is_open = _accepts_openmetrics(request.headers.get("Accept", ""))
        form = openmetrics.CONTENT_TYPE_LATEST if is_open else TEXT
        now = asyncio.get_running_loop().time()
        until, body = self._rendered.get(form, (now, b""))
        if until <= now:
            body = (openmetrics.generate_latest if is_open else generate_latest)(self._registry)
            self._rendered[form] = now + KEPT, body
        return web.Response(body=body, headers={"Content-Type": form})


def _accepts_openmetrics(accept: str) -> bool:
    for item in accept.split(","):
        kind, *parameters = (part.strip().lower() for part in item.split(";"))
        if kind == OPENMETRICS:
            return not any(p.replace(" ", "") in {"q=0", "q=0.0"} for p in parameters)
    return False


def agent_families(build: BuildInfo, facts: StatusFacts) -> Iterator[Metric]:
    """Render the versions and the readiness of the agent."""
    labels = ("version", "revision", "python", "profile")
    yield _gauge(
        "build_info",
        "Version and build of this agent; the value is 1.",
        labels,
        {tuple(getattr(build, label) for label in labels): 1},
    )
    yield _gauge(
        "driver_info",
        "Version of the NVIDIA driver; the value is 1.",
        ("version",),
        {(facts.inventory.driver_version,): 1} if facts.inventory.driver_version else {},
    )
    yield _gauge(
        "ready",
        "1 for each condition of readiness that holds.",
        ("condition",),
        {(check.name,): int(check.ok) for check in facts.checks if check.required},
    )
    yield _gauge(
        "degraded",
        "1 for each failing check that pods do not notice.",
        ("reason",),
        {(check.name,): int(not check.ok) for check in facts.checks if not check.required},
    )


def info_family(
    inventory: Inventory, gone: Iterable[SharedGpu], counted: Collection[str]
) -> Metric:
    """Render which GPU each label means: the inventory, and the `gone` GPUs that are `counted`.

    So every label of another series has its series here.
    """
    labels = gpu_labels(inventory, gone)
    found = dict[tuple[str, ...], float]()
    for shared in (*inventory.gpus, *(gpu for gpu in gone if gpu.uuid in counted)):
        gpu, name = shared.gpu, labels[shared.uuid]
        numa = "" if gpu.numa is None else str(gpu.numa)
        found[name, gpu.uuid, gpu.name, gpu.pci, numa, shared.mode] = 1
    for uuid in sorted(uuid for uuid in counted if uuid not in labels and uuid != UNKNOWN):
        found[uuid, uuid, "", "", "", ""] = 1
    return _gauge(
        "gpu_info",
        "One series per GPU; the label gpu is its index in all series.",
        ("gpu", "uuid", "model", "pci", "numa", "mode"),
        found,
    )


def health_families(named: Named) -> Iterator[Metric]:
    """Render the health of each GPU and what it means. Labels hold words of the agent alone."""
    yield _gauge(
        "gpu_health",
        "1 for the present condition of each GPU, else 0.",
        ("gpu", "state"),
        {
            (name, condition.value): int(gpu.health.condition is condition)
            for name, gpu in named
            for condition in Condition
        },
    )
    yield _gauge(
        "gpu_health_since_timestamp_seconds",
        "Unix time at which the present condition of each GPU began.",
        GPU,
        {(name,): gpu.health.since.timestamp() for name, gpu in named},
    )
    yield _gauge(
        "gpu_served",
        "1 while the health of a GPU lets new containers have it, else 0; runbook is the id to "
        "look up.",
        ("gpu", "condition", "cause", "action", "runbook"),
        {
            (name, one.condition.value, one.cause, one.action, one.runbook): int(one.serving)
            for name, one in ((name, gpu.health) for name, gpu in named)
        },
    )


def slice_families(
    named: Named, slices: SliceList, ledger: Ledger, pods: PodTable
) -> Iterator[Metric]:
    """Render the slices and the memory of each GPU: listed, held, promised, registered."""
    listed = {(group.uuid, group.healthy): len(group.ids) for group in slices.groups}
    yield _gauge(
        "slices",
        "Slices of each GPU in the kubelet's list by reported health.",
        ("gpu", "state"),
        {
            (name, state): listed.get((gpu.uuid, state == "healthy"), 0)
            for name, gpu in named
            for state in ("healthy", "unhealthy")
        },
    )
    held = ledger.living(pods).held_ids()
    yield _gauge(
        "slices_allocated",
        "Slices of each GPU that containers hold.",
        GPU,
        {(name,): len(held.get(gpu.uuid, ())) for name, gpu in named},
    )
    yield _gauge(
        "memory_promised_bytes",
        "Bytes of each GPU promised to pods that have not ended: what the next pod finds taken.",
        GPU,
        {(name,): promised(ledger, pods, gpu).memory_mib * MIB for name, gpu in named},
    )
    yield _gauge(
        "memory_sellable_bytes",
        "Bytes of each GPU that are registered, after scaling.",
        GPU,
        {(name,): gpu.registered_mib * MIB for name, gpu in named},
    )


def use_families(named: Named, newest: Callable[[GpuUuid], Sampled | None]) -> Iterator[Metric]:
    """Render how much each GPU is used; a GPU without a present value has no series."""

    def known(read: Callable[[GpuSample], int | None], times: int, of: int) -> Values:
        return {
            (name,): value * times / of
            for name, gpu in named
            if (sampled := newest(gpu.uuid)) and (value := read(sampled.sample)) is not None
        }

    yield _gauge(
        "gpu_utilization_ratio",
        "Share of the time in which a kernel ran, 0 to 1.",
        GPU,
        known(lambda sample: sample.gpu_percent, 1, 100),
    )
    yield _gauge(
        "gpu_memory_utilization_ratio",
        "Share of the time in which memory was read or written, 0 to 1.",
        GPU,
        known(lambda sample: sample.memory_percent, 1, 100),
    )
    yield _gauge(
        "gpu_memory_used_bytes",
        "Bytes of each GPU's memory in use by any process.",
        GPU,
        known(lambda sample: sample.used_mib, MIB, 1),
    )


def promised_rows(rows: Iterable[Row]) -> Iterator[tuple[Holder, Row]]:
    """The rows of answers that the agent gave, each with the container, if its pod is known."""
    return ((row.holder, row) for row in rows if row.holder is not None and not row.adopted)


def newest_rows(rows: Iterable[Row]) -> Mapping[Holder, Row]:
    """The promised rows by container.

    Of two rows of one name the later counts: the agent has not seen yet that the other pod is gone.
    """
    return dict(sorted(promised_rows(rows), key=lambda one: one[1].answered_at))


def used_containers(
    rows: Iterable[Row], newest: Callable[[ContainerKey], ContainerUse | None]
) -> Iterator[Used]:
    """What the containers use, as far as that is known."""
    for holder, row in newest_rows(rows).items():
        use = newest(row.key)
        if use is not None:
            yield holder, use


def promised_families(
    inventory: Inventory, rows: Iterable[Row], labels: Mapping[GpuUuid, str]
) -> Iterator[Metric]:
    """Render the memory, compute and slices that each container was promised.

    `labels`: the value of the label `gpu`. Two rows of one name are added up.
    """
    whole = {gpu.uuid: gpu.registered_mib for gpu in inventory.gpus}
    memory, compute, slices = (Counter[tuple[str, ...]]() for _ in range(3))
    for holder, row in promised_rows(rows):
        for share in row.limits:
            part = labels.get(share.uuid, share.uuid), *astuple(holder)
            memory[part] += share.memory_mib or whole.get(share.uuid, 0)
            compute[part] += share.core_percent
        slices.update((labels.get(uuid, uuid), *astuple(holder)) for uuid in row.gpus)
    yield _gauge(
        "container_memory_promised_bytes",
        "Bytes of each GPU's memory promised to a container; none: it has no limit.",
        SHARE,
        {part: mib * MIB for part, mib in memory.items()},
    )
    yield _gauge(
        "container_cores_promised_ratio",
        "Share of each GPU's compute promised to a container, 0 to 1; 0: it has no limit.",
        SHARE,
        {part: percent / 100 for part, percent in compute.items()},
    )
    yield _gauge(
        "container_slices_promised",
        "Slices of each GPU promised to a container.",
        SHARE,
        slices,
    )


def limits_family(rows: Iterable[Row], pods: PodTable) -> Metric:
    """Render what keeps the limits of each container that has some, and by which policy."""
    found = dict[tuple[str, ...], float]()
    for holder, row in newest_rows(row for row in rows if row.limits).items():
        pod = pods.pods.get(row.key.pod_uid)
        own = {one.name: one.core_policy for one in pod.containers} if pod else {}
        given = own.get(holder.container) or dict(row.edits.envs).get(CORE_POLICY_ENV, "")
        keeper = "unknown" if pod is None else "hami-core"
        if pod and pod.unkept(holder.container):
            keeper = "none"
        found[*astuple(holder), keeper, given.lower() if given in APPLIED else "default"] = 1
    return _gauge(
        "container_limits_info",
        "Who keeps a container's limits (hami-core, none, or unknown: its pod is not known), and "
        "when its compute limit applies (default: beside other busy containers, force, "
        "disable); the value is 1.",
        (*CONTAINER, "keeper", "policy"),
        found,
    )


def used_families(used: Sequence[Used], labels: Mapping[GpuUuid, str]) -> Iterator[Metric]:
    """Render what each container uses of each GPU, and its present limits; `labels` as above."""
    parts = {
        (labels.get(GpuUuid(gpu.uuid), gpu.uuid), *astuple(holder)): gpu
        for holder, use in used
        for gpu in use.gpus
    }
    yield _gauge(
        "container_memory_used_bytes",
        "Bytes of each GPU's memory that a container uses, as HAMi-core counts them.",
        SHARE,
        {part: gpu.memory.total for part, gpu in parts.items()},
    )
    yield _gauge(
        "container_memory_limit_bytes",
        "Bytes of each GPU's memory to which HAMi-core limits a container now.",
        SHARE,
        {part: gpu.memory_limit for part, gpu in parts.items() if gpu.memory_limit > 0},
    )
    yield _gauge(
        "container_utilization_ratio",
        "Share of each GPU's compute that a container uses, 0 to 1.",
        SHARE,
        {part: min(gpu.sm_percent, 100) / 100 for part, gpu in parts.items()},
    )
    yield _gauge(
        "container_cores_limit_ratio",
        "Share of each GPU's compute to which HAMi-core limits a container now, 0 to 1.",
        SHARE,
        {
            part: gpu.core_limit / 100
            for part, gpu in parts.items()
            if 0 < gpu.core_limit < UNLIMITED
        },
    )
    yield _gauge(
        "container_idle_seconds",
        "Seconds since a process of a container last started a kernel.",
        CONTAINER,
        {astuple(one): use.idle.total_seconds() for one, use in used if use.idle is not None},
    )
    yield _gauge(
        "container_processes",
        "Processes of a container that use its GPUs.",
        CONTAINER,
        {astuple(one): use.processes for one, use in used if use.state is RegionState.READABLE},
    )


def _gauge(name: str, text: str, labels: Sequence[str], values: Values) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=labels)
    for names, value in values.items():
        family.add_metric(names, value)
    return family


def counters(tallies: Iterable[Tally], gpus: Mapping[str, str]) -> Iterator[Metric]:
    """Render one counter per name; tallies of equal name are added up.

    Tallies name a GPU by its UUID; `gpus` maps it to the value of the label `gpu`.
    """
    for name, group in _by_name(tallies).items():
        labels = group[0].labels
        family = CounterMetricFamily(PREFIX + name, group[0].help, labels=labels)
        counts: dict[tuple[str, ...], int] = {}
        for tally in group:
            for raw, count in (*((values, 0) for values in tally.expected), *tally.items()):
                values = tuple(
                    gpus.get(value, value) if label == "gpu" else value
                    for label, value in zip(labels, raw, strict=True)
                )
                counts[values] = counts.get(values, 0) + count
        if not labels:
            counts.setdefault((), 0)
        for values, count in sorted(counts.items()):
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
    """Render one histogram per name; those of equal name, with equal buckets, are added up."""
    for name, group in _by_name(durations).items():
        first = group[0]
        family = HistogramMetricFamily(PREFIX + name, first.help, labels=first.labels)
        rows: dict[tuple[str, ...], DurationRow] = {}
        for row in (row for item in group for row in item.rows()):
            rows[row.labels] = _sum(rows[row.labels], row) if row.labels in rows else row
        bounds = [*map(str, first.buckets), "+Inf"]
        for labels, row in sorted(rows.items()):
            buckets = list(zip(bounds, row.cumulative, strict=True))
            family.add_metric(labels, buckets, sum_value=row.total)
        yield family


def _sum(one: DurationRow, other: DurationRow) -> DurationRow:
    cumulative = tuple(a + b for a, b in zip(one.cumulative, other.cumulative, strict=True))
    return DurationRow(one.labels, cumulative, one.total + other.total)


def _by_name(items: Iterable[T]) -> dict[str, list[T]]:
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(item.name, []).append(item)
    return groups

"""Renders what each container was promised of each GPU, and what it uses."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from agent.core.inventory.gpu import GpuUuid
from agent.core.inventory.inventory import Inventory
from agent.core.inventory.slices import MIB
from agent.core.state.ledger import ContainerKey, Holder, Row
from agent.core.usage.region import RegionState
from agent.core.usage.use import ContainerUse

CONTAINER: Final = ("namespace", "pod", "container")
LABELS: Final = ("gpu", *CONTAINER)
UNLIMITED: Final = 100
"""Percent of compute from which on a limit is none."""

_Part = tuple[GpuUuid, Holder]
"""A GPU, and who was promised something of it."""

NewestUse = Callable[[ContainerKey], ContainerUse | None]


Used = tuple[Holder, ContainerUse]
"""A container, and what it uses."""


def promised_rows(rows: Iterable[Row]) -> Iterator[tuple[Holder, Row]]:
    """The rows of answers that the agent gave, each with the container, if its pod is known."""
    return ((row.holder, row) for row in rows if row.holder is not None and not row.adopted)


def used_containers(rows: Iterable[Row], newest: NewestUse) -> Iterator[Used]:
    """What the containers use, as far as that is known.

    Of two rows of one name the later counts: the agent has not seen yet that the other pod is gone.
    """
    held = sorted(promised_rows(rows), key=lambda one: one[1].answered_at)
    for holder, row in dict(held).items():
        use = newest(row.key)
        if use is not None:
            yield holder, use


def container_families(
    prefix: str, inventory: Inventory, rows: Iterable[Row], labels: Mapping[GpuUuid, str]
) -> Iterator[Metric]:
    """Render the memory, compute and slices that each container was promised.

    `labels`: the value of the label `gpu`. Two rows of one name are added up.
    """
    whole = {gpu.uuid: gpu.registered_mib for gpu in inventory.gpus}
    memory, compute, slices = Counter[_Part](), Counter[_Part](), Counter[_Part]()
    for holder, row in promised_rows(rows):
        for share in row.limits:
            part = share.uuid, holder
            memory[part] += share.memory_mib or whole.get(share.uuid, 0)
            compute[part] += share.core_percent
        slices.update((uuid, holder) for uuid in row.gpus)
    yield _family(
        prefix + "container_memory_promised_bytes",
        "Bytes of each GPU's memory promised to a container; none: it has no limit.",
        {part: mib * MIB for part, mib in memory.items()},
        labels,
    )
    yield _family(
        prefix + "container_cores_promised_ratio",
        "Share of each GPU's compute promised to a container, 0 to 1; 0: it has no limit.",
        {part: percent / 100 for part, percent in compute.items()},
        labels,
    )
    yield _family(
        prefix + "container_slices_promised",
        "Slices of each GPU promised to a container.",
        slices,
        labels,
    )


def region_family(prefix: str, rows: Iterable[Row], newest: NewestUse) -> Metric:
    """Render how many containers' regions are in each state."""
    counted = Counter(use.state for row in rows if (use := newest(row.key)) is not None)
    family = GaugeMetricFamily(
        prefix + "container_regions",
        "Containers by the state of HAMi-core's shared region, which says what they use.",
        labels=("state",),
    )
    for state in RegionState:
        family.add_metric([state.value], counted[state])
    return family


def used_families(
    prefix: str, used: Sequence[Used], labels: Mapping[GpuUuid, str]
) -> Iterator[Metric]:
    """Render what each container uses of each GPU, and its present limits; `labels` as above."""
    parts = {(GpuUuid(gpu.uuid), holder): gpu for holder, use in used for gpu in use.gpus}
    yield _family(
        prefix + "container_memory_used_bytes",
        "Bytes of each GPU's memory that a container uses, as HAMi-core counts them.",
        {part: gpu.memory.total for part, gpu in parts.items()},
        labels,
    )
    yield _family(
        prefix + "container_memory_limit_bytes",
        "Bytes of each GPU's memory to which HAMi-core limits a container now.",
        {part: gpu.memory_limit for part, gpu in parts.items() if gpu.memory_limit > 0},
        labels,
    )
    yield _family(
        prefix + "container_utilization_ratio",
        "Share of each GPU's compute that a container uses, 0 to 1.",
        {part: min(gpu.sm_percent, 100) / 100 for part, gpu in parts.items()},
        labels,
    )
    yield _family(
        prefix + "container_cores_limit_ratio",
        "Share of each GPU's compute to which HAMi-core limits a container now, 0 to 1.",
        {
            part: gpu.core_limit / 100
            for part, gpu in parts.items()
            if 0 < gpu.core_limit < UNLIMITED
        },
        labels,
    )
    idle = GaugeMetricFamily(
        prefix + "container_idle_seconds",
        "Seconds since a process of a container last started a kernel.",
        labels=CONTAINER,
    )
    processes = GaugeMetricFamily(
        prefix + "container_processes",
        "Processes of a container that use its GPUs.",
        labels=CONTAINER,
    )
    for holder, use in used:
        names = holder.namespace, holder.pod, holder.container
        if use.idle is not None:
            idle.add_metric(names, use.idle.total_seconds())
        if use.state is RegionState.READABLE:
            processes.add_metric(names, use.processes)
    yield idle
    yield processes


def _family(
    name: str, text: str, values: Mapping[_Part, float], labels: Mapping[GpuUuid, str]
) -> Metric:
    family = GaugeMetricFamily(name, text, labels=LABELS)
    for (uuid, holder), value in values.items():
        gpu = labels.get(uuid, str(uuid))
        family.add_metric([gpu, holder.namespace, holder.pod, holder.container], value)
    return family

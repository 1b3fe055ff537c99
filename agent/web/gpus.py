"""GPUs, slices and what is promised of them, as families of series."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from agent.core.allocation.room import claim_of, gpu_use
from agent.core.inventory.condition import Condition
from agent.core.inventory.gpu import GpuSample, GpuUuid, Sampled
from agent.core.inventory.inventory import Inventory, SharedGpu
from agent.core.inventory.slices import MIB, SliceList
from agent.core.state.ledger import Ledger


def gpu_families(
    prefix: str, inventory: Inventory, slices: SliceList, ledger: Ledger
) -> Iterator[Metric]:
    """What is told of the GPUs of the inventory, and the slices by state."""
    names = labelled(inventory)
    yield from _health(prefix, names)
    yield _listed(prefix, names, slices)
    held = ledger.held_ids()
    claims = list(map(claim_of, ledger.rows))
    yield _per_gpu(
        prefix + "slices_allocated",
        "Slices of each GPU that containers hold.",
        ((name, len(held.get(gpu.uuid, ()))) for name, gpu in names),
    )
    yield _per_gpu(
        prefix + "memory_promised_bytes",
        "Memory promised to pods, the greater of init and app containers of each.",
        ((name, gpu_use(claims, gpu).memory_mib * MIB) for name, gpu in names),
    )
    yield _per_gpu(
        prefix + "memory_sellable_bytes",
        "Memory that is registered of each GPU, after scaling.",
        ((name, gpu.registered_mib * MIB) for name, gpu in names),
    )


def use_families(
    prefix: str, inventory: Inventory, newest: Callable[[GpuUuid], Sampled | None]
) -> Iterator[Metric]:
    """How much each GPU is used; no series for one that does not tell just now."""
    found = [(name, newest(gpu.uuid)) for name, gpu in labelled(inventory)]
    samples = [(name, one.sample) for name, one in found if one is not None]

    def told(read: Callable[[GpuSample], float | None]) -> Iterator[tuple[str, float]]:
        for name, sample in samples:
            value = read(sample)
            if value is not None:
                yield name, value

    yield _per_gpu(
        prefix + "gpu_utilization_ratio",
        "Share of the time in which a kernel ran, 0 to 1.",
        told(lambda one: None if one.gpu_percent is None else one.gpu_percent / 100),
    )
    yield _per_gpu(
        prefix + "gpu_memory_utilization_ratio",
        "Share of the time in which memory was read or written, 0 to 1.",
        told(lambda one: None if one.memory_percent is None else one.memory_percent / 100),
    )
    yield _per_gpu(
        prefix + "gpu_memory_used_bytes",
        "Memory of each GPU that is in use, by whomever.",
        told(lambda one: None if one.used_mib is None else one.used_mib * MIB),
    )


Named = list[tuple[str, SharedGpu]]

UNKNOWN: Final = "unknown"
"""Stands for a GPU that the driver does not name in what it reports."""


def gpu_labels(inventory: Inventory, gone: Iterable[SharedGpu] = ()) -> Mapping[GpuUuid, str]:
    """What the label `gpu` says of each, in all series, also of those that are `gone` by now.

    Its index, which it keeps when it is gone; its UUID where it has none, or another has it now.
    """
    taken: set[int] = set()
    named: dict[GpuUuid, str] = {}
    for gpu in (*sorted(inventory.gpus, key=lambda gpu: not gpu.present), *gone):
        named[gpu.uuid] = str(gpu.uuid) if gpu.gpu.index in taken else gpu.gpu.label
        taken.add(gpu.gpu.index)
    return named


def labelled(inventory: Inventory) -> Named:
    """The GPUs in their order, each behind its label."""
    labels = gpu_labels(inventory)
    return [(labels[gpu.uuid], gpu) for gpu in inventory.gpus]


def info_family(
    prefix: str, inventory: Inventory, gone: Iterable[SharedGpu], counted: Collection[str]
) -> Metric:
    """Whom the label `gpu` means: all of the inventory, and those of `gone` that are `counted`.

    So a series is found here for as long as it is told.
    """
    family = GaugeMetricFamily(
        prefix + "gpu_info",
        "One series per GPU; the label gpu is its index here and everywhere.",
        labels=("gpu", "uuid", "model", "pci", "numa", "mode"),
    )
    labels = gpu_labels(inventory, gone)
    for shared in (*inventory.gpus, *(gpu for gpu in gone if gpu.uuid in counted)):
        gpu, name = shared.gpu, labels[shared.uuid]
        numa = "" if gpu.numa is None else str(gpu.numa)
        family.add_metric([name, gpu.uuid, gpu.name, gpu.pci, numa, shared.mode], 1)
    for uuid in sorted(one for one in counted if one not in labels and one != UNKNOWN):
        family.add_metric([uuid, uuid, "", "", "", ""], 1)
    return family


def _health(prefix: str, names: Named) -> Iterator[Metric]:
    """One series per condition, 1 for the present one: a state is found without a regex."""
    state = GaugeMetricFamily(
        prefix + "gpu_health",
        "1 for the condition of each GPU that holds now.",
        labels=("gpu", "state"),
    )
    for name, gpu in names:
        for condition in Condition:
            state.add_metric([name, condition.value], int(gpu.health.condition is condition))
    yield state
    yield _per_gpu(
        prefix + "gpu_health_since_timestamp_seconds",
        "Unix time since when the condition of each GPU holds.",
        ((name, gpu.health.since.timestamp()) for name, gpu in names),
    )


def _listed(prefix: str, names: Named, slices: SliceList) -> Metric:
    family = GaugeMetricFamily(
        prefix + "slices",
        "Slices of each GPU in the kubelet's list, by what the kubelet is told of them.",
        labels=("gpu", "state"),
    )
    groups = {group.uuid: group for group in slices.groups}
    for name, gpu in names:
        group = groups.get(gpu.uuid)
        for state, healthy in (("healthy", True), ("unhealthy", False)):
            counts = group is not None and group.healthy is healthy
            family.add_metric([name, state], len(group.ids) if group and counts else 0)
    return family


def _per_gpu(name: str, text: str, values: Iterable[tuple[str, float]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=("gpu",))
    for gpu, value in values:
        family.add_metric([gpu], value)
    return family

"""Renders GPUs, slices and promised memory as metric families."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from agent.core.allocation.room import promised
from agent.core.cluster.pods import PodTable
from agent.core.inventory.condition import Condition
from agent.core.inventory.gpu import GpuSample, GpuUuid, Sampled
from agent.core.inventory.inventory import Inventory, SharedGpu
from agent.core.inventory.slices import MIB, SliceList
from agent.core.state.ledger import Ledger


def gpu_families(
    prefix: str, inventory: Inventory, slices: SliceList, ledger: Ledger, pods: PodTable
) -> Iterator[Metric]:
    """Render the GPUs of the inventory, their health, slices and memory."""
    names = labelled(inventory)
    yield from _health(prefix, names)
    yield _served(prefix, names)
    yield _listed(prefix, names, slices)
    held = ledger.living(pods).held_ids()
    yield _per_gpu(
        prefix + "slices_allocated",
        "Slices of each GPU that containers hold.",
        ((name, len(held.get(gpu.uuid, ()))) for name, gpu in names),
    )
    yield _per_gpu(
        prefix + "memory_promised_bytes",
        "Bytes of each GPU promised to pods that have not ended: what the next pod finds taken.",
        ((name, promised(ledger, pods, gpu).memory_mib * MIB) for name, gpu in names),
    )
    yield _per_gpu(
        prefix + "memory_sellable_bytes",
        "Bytes of each GPU that are registered, after scaling.",
        ((name, gpu.registered_mib * MIB) for name, gpu in names),
    )


def use_families(
    prefix: str, inventory: Inventory, newest: Callable[[GpuUuid], Sampled | None]
) -> Iterator[Metric]:
    """Render how much each GPU is used; a GPU without a present value has no series."""
    newest_samples = [(name, newest(gpu.uuid)) for name, gpu in labelled(inventory)]
    samples = [(name, sampled.sample) for name, sampled in newest_samples if sampled is not None]

    def known(read: Callable[[GpuSample], float | None]) -> Iterator[tuple[str, float]]:
        for name, sample in samples:
            value = read(sample)
            if value is not None:
                yield name, value

    yield _per_gpu(
        prefix + "gpu_utilization_ratio",
        "Share of the time in which a kernel ran, 0 to 1.",
        known(lambda sample: None if sample.gpu_percent is None else sample.gpu_percent / 100),
    )
    yield _per_gpu(
        prefix + "gpu_memory_utilization_ratio",
        "Share of the time in which memory was read or written, 0 to 1.",
        known(
            lambda sample: None if sample.memory_percent is None else sample.memory_percent / 100
        ),
    )
    yield _per_gpu(
        prefix + "gpu_memory_used_bytes",
        "Bytes of each GPU's memory in use by any process.",
        known(lambda sample: None if sample.used_mib is None else sample.used_mib * MIB),
    )


Named = list[tuple[str, SharedGpu]]

UNKNOWN: Final = "unknown"
"""The label of a GPU that the driver's event does not name."""


def gpu_labels(inventory: Inventory, gone: Iterable[SharedGpu] = ()) -> Mapping[GpuUuid, str]:
    """The value of the label `gpu` for each GPU, also for those that are `gone`.

    It is the index, also after the GPU is gone; the UUID if it has none or another GPU has it now.
    """
    taken: set[int] = set()
    named: dict[GpuUuid, str] = {}
    for gpu in (*sorted(inventory.gpus, key=lambda gpu: not gpu.present), *gone):
        named[gpu.uuid] = str(gpu.uuid) if gpu.gpu.index in taken else gpu.gpu.label
        taken.add(gpu.gpu.index)
    return named


def labelled(inventory: Inventory) -> Named:
    """The GPUs in their order, each with its label."""
    labels = gpu_labels(inventory)
    return [(labels[gpu.uuid], gpu) for gpu in inventory.gpus]


def info_family(
    prefix: str, inventory: Inventory, gone: Iterable[SharedGpu], counted: Collection[str]
) -> Metric:
    """Render which GPU each label means: the inventory, and the `gone` GPUs that are `counted`.

    So every label of another series has its series here.
    """
    family = GaugeMetricFamily(
        prefix + "gpu_info",
        "One series per GPU; the label gpu is its index in all series.",
        labels=("gpu", "uuid", "model", "pci", "numa", "mode"),
    )
    labels = gpu_labels(inventory, gone)
    for shared in (*inventory.gpus, *(gpu for gpu in gone if gpu.uuid in counted)):
        gpu, name = shared.gpu, labels[shared.uuid]
        numa = "" if gpu.numa is None else str(gpu.numa)
        family.add_metric([name, gpu.uuid, gpu.name, gpu.pci, numa, shared.mode], 1)
    for uuid in sorted(uuid for uuid in counted if uuid not in labels and uuid != UNKNOWN):
        family.add_metric([uuid, uuid, "", "", "", ""], 1)
    return family


def _health(prefix: str, names: Named) -> Iterator[Metric]:
    """Render one series per condition, 1 for the present one."""
    state = GaugeMetricFamily(
        prefix + "gpu_health",
        "1 for the present condition of each GPU, else 0.",
        labels=("gpu", "state"),
    )
    for name, gpu in names:
        for condition in Condition:
            state.add_metric([name, condition.value], int(gpu.health.condition is condition))
    yield state
    yield _per_gpu(
        prefix + "gpu_health_since_timestamp_seconds",
        "Unix time at which the present condition of each GPU began.",
        ((name, gpu.health.since.timestamp()) for name, gpu in names),
    )


def _served(prefix: str, names: Named) -> Metric:
    """Render what the health of each GPU means. The labels hold words of the agent alone."""
    family = GaugeMetricFamily(
        prefix + "gpu_served",
        "1 while the health of a GPU lets new containers have it, else 0; runbook is the id to "
        "look up.",
        labels=("gpu", "condition", "cause", "action", "runbook"),
    )
    for name, gpu in names:
        health = gpu.health
        labels = [name, health.condition.value, health.cause, health.action, health.runbook]
        family.add_metric(labels, int(health.serving))
    return family


def _listed(prefix: str, names: Named, slices: SliceList) -> Metric:
    family = GaugeMetricFamily(
        prefix + "slices",
        "Slices of each GPU in the kubelet's list by reported health.",
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

"""Renders what each container was promised of each GPU."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from agent.core.inventory.gpu import GpuUuid
from agent.core.inventory.inventory import Inventory
from agent.core.inventory.slices import MIB
from agent.core.state.ledger import Holder, Row

LABELS: Final = ("gpu", "namespace", "pod", "container")

_Part = tuple[GpuUuid, Holder]
"""A GPU, and who was promised something of it."""


def promised_rows(rows: Iterable[Row]) -> Iterator[tuple[Holder, Row]]:
    """The rows of answers that the agent gave, each with the container, if its pod is known."""
    return ((row.holder, row) for row in rows if row.holder is not None and not row.adopted)


def container_families(
    prefix: str, inventory: Inventory, rows: Iterable[Row], labels: Mapping[GpuUuid, str]
) -> Iterator[Metric]:
    """Render the memory, compute and slices that each container was promised.

    `labels`: the value of the label `gpu`. Until the row of a pod that is gone is closed, another
    pod may have its name; then both hold room, and their promises are added up.
    """
    whole = {gpu.uuid: gpu.registered_mib for gpu in inventory.gpus}
    memory, compute, slices = Counter[_Part](), Counter[_Part](), Counter[_Part]()
    for holder, row in promised_rows(rows):
        for share in row.shares:
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


def _family(
    name: str, text: str, values: Mapping[_Part, float], labels: Mapping[GpuUuid, str]
) -> Metric:
    family = GaugeMetricFamily(name, text, labels=LABELS)
    for (uuid, holder), value in values.items():
        gpu = labels.get(uuid, str(uuid))
        family.add_metric([gpu, holder.namespace, holder.pod, holder.container], value)
    return family

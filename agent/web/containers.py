"""Renders what each container was promised of each GPU, and what it uses."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from msgspec.structs import astuple
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from agent.core.cluster.pods import PodTable
from agent.core.containers.container_edits import CORE_POLICY_ENV
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

APPLIED: Final = frozenset({"force", "FORCE", "disable", "DISABLE"})
"""The policies that HAMi-core knows; any other text is its default."""

NewestUse = Callable[[ContainerKey], ContainerUse | None]


Used = tuple[Holder, ContainerUse]
"""A container, and what it uses."""


def promised_rows(rows: Iterable[Row]) -> Iterator[tuple[Holder, Row]]:
    """The rows of answers that the agent gave, each with the container, if its pod is known."""
    return ((row.holder, row) for row in rows if row.holder is not None and not row.adopted)


def newest_rows(rows: Iterable[Row]) -> Mapping[Holder, Row]:
    """The promised rows by container.

    Of two rows of one name the later counts: the agent has not seen yet that the other pod is gone.
    """
    return dict(sorted(promised_rows(rows), key=lambda one: one[1].answered_at))


def used_containers(rows: Iterable[Row], newest: NewestUse) -> Iterator[Used]:
    """What the containers use, as far as that is known."""
    for holder, row in newest_rows(rows).items():
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
    memory, compute, slices = (Counter[tuple[str, ...]]() for _ in range(3))
    for holder, row in promised_rows(rows):
        for share in row.limits:
            part = labels.get(share.uuid, share.uuid), *astuple(holder)
            memory[part] += share.memory_mib or whole.get(share.uuid, 0)
            compute[part] += share.core_percent
        slices.update((labels.get(uuid, uuid), *astuple(holder)) for uuid in row.gpus)
    yield _family(
        prefix + "container_memory_promised_bytes",
        "Bytes of each GPU's memory promised to a container; none: it has no limit.",
        {part: mib * MIB for part, mib in memory.items()},
    )
    yield _family(
        prefix + "container_cores_promised_ratio",
        "Share of each GPU's compute promised to a container, 0 to 1; 0: it has no limit.",
        {part: percent / 100 for part, percent in compute.items()},
    )
    yield _family(
        prefix + "container_slices_promised",
        "Slices of each GPU promised to a container.",
        slices,
    )


def limits_family(prefix: str, rows: Iterable[Row], pods: PodTable) -> Metric:
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
    return _family(
        prefix + "container_limits_info",
        "Who keeps a container's limits (hami-core, none, or unknown: its pod is not known), and "
        "when its compute limit applies (default: beside other busy containers, force, "
        "disable); the value is 1.",
        found,
        (*CONTAINER, "keeper", "policy"),
    )


def region_family(prefix: str, rows: Iterable[Row], newest: NewestUse) -> Metric:
    """Render how many containers' regions are in each state."""
    counted = Counter(use.state for row in rows if (use := newest(row.key)) is not None)
    return _family(
        prefix + "container_regions",
        "Containers by the state of HAMi-core's shared region, which says what they use.",
        {(state.value,): counted[state] for state in RegionState},
        ("state",),
    )


def used_families(
    prefix: str, used: Sequence[Used], labels: Mapping[GpuUuid, str]
) -> Iterator[Metric]:
    """Render what each container uses of each GPU, and its present limits; `labels` as above."""
    parts = {
        (labels.get(GpuUuid(gpu.uuid), gpu.uuid), *astuple(holder)): gpu
        for holder, use in used
        for gpu in use.gpus
    }
    yield _family(
        prefix + "container_memory_used_bytes",
        "Bytes of each GPU's memory that a container uses, as HAMi-core counts them.",
        {part: gpu.memory.total for part, gpu in parts.items()},
    )
    yield _family(
        prefix + "container_memory_limit_bytes",
        "Bytes of each GPU's memory to which HAMi-core limits a container now.",
        {part: gpu.memory_limit for part, gpu in parts.items() if gpu.memory_limit > 0},
    )
    yield _family(
        prefix + "container_utilization_ratio",
        "Share of each GPU's compute that a container uses, 0 to 1.",
        {part: min(gpu.sm_percent, 100) / 100 for part, gpu in parts.items()},
    )
    yield _family(
        prefix + "container_cores_limit_ratio",
        "Share of each GPU's compute to which HAMi-core limits a container now, 0 to 1.",
        {
            part: gpu.core_limit / 100
            for part, gpu in parts.items()
            if 0 < gpu.core_limit < UNLIMITED
        },
    )
    yield _family(
        prefix + "container_idle_seconds",
        "Seconds since a process of a container last started a kernel.",
        {astuple(one): use.idle.total_seconds() for one, use in used if use.idle is not None},
        CONTAINER,
    )
    yield _family(
        prefix + "container_processes",
        "Processes of a container that use its GPUs.",
        {astuple(one): use.processes for one, use in used if use.state is RegionState.READABLE},
        CONTAINER,
    )


def _family(
    name: str, text: str, values: Mapping[tuple[str, ...], float], labels: Sequence[str] = LABELS
) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for names, value in values.items():
        family.add_metric(names, value)
    return family

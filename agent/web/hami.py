"""Renders HAMi's series about the host's GPUs, by HAMi's names, labels and scales.

Source: HAMi v2.10 cmd/vGPUmonitor/metrics.go.
"""

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from agent.core.inventory.gpu import NO_INDEX, GpuUuid, Sampled
from agent.core.inventory.inventory import Inventory, SharedGpu
from agent.core.inventory.slices import MIB

ZONE: Final = "vGPU"
UUID_LENGTH: Final = 40
TYPE_PREFIX: Final = "NVIDIA-"
"""Before every name, also before one that begins with it. The register annotation differs."""

_WITHOUT_NODE: Final = ("device_index", "device_uuid", "device_type", "zone")
_WITH_NODE: Final = ("node", *_WITHOUT_NODE)

_Newest = Callable[[GpuUuid], Sampled | None]


def host_families(node: str, inventory: Inventory, newest: _Newest) -> Iterator[Metric]:
    """Render memory, compute and memory traffic of each GPU that reports them."""
    gpus = [
        (gpu, sampled.sample)
        for gpu in inventory.gpus
        if gpu.gpu.index != NO_INDEX and (sampled := newest(gpu.uuid)) is not None
    ]
    used = GaugeMetricFamily(
        "hami_host_gpu_memory_used_bytes",
        "HAMi's series: bytes of the GPU's memory in use by any process.",
        labels=_WITH_NODE,
    )
    compute = GaugeMetricFamily(
        "hami_host_gpu_utilization_ratio",
        "HAMi's series: share of the time in which a kernel ran, in percent, 0 to 100.",
        labels=_WITH_NODE,
    )
    traffic = GaugeMetricFamily(
        "hami_host_gpu_memory_controller_utilization_ratio",
        "HAMi's series: share of the time in which memory was used, in percent, 0 to 100.",
        labels=_WITHOUT_NODE,
    )
    for gpu, sample in gpus:
        labels = _labels(gpu)
        if sample.used_mib is not None:
            used.add_metric([node, *labels], sample.used_mib * MIB)
        if sample.gpu_percent is not None:
            compute.add_metric([node, *labels], sample.gpu_percent)
        if sample.memory_percent is not None:
            traffic.add_metric(labels, sample.memory_percent)
    yield from (used, compute, traffic)


def _labels(shared: SharedGpu) -> list[str]:
    gpu = shared.gpu
    return [str(gpu.index), gpu.uuid[:UUID_LENGTH], TYPE_PREFIX + gpu.name, ZONE]

"""Renders the series of HAMi's vGPUmonitor, by HAMi's names, labels and scales.

Source: HAMi v2.10 cmd/vGPUmonitor/metrics.go, pkg/metrics/metrics.go; HAMi #2732 (temperature,
power, ECC) and #2808.
"""

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from agent.ledger import Holder
from agent.model import MIB, NO_INDEX
from agent.usage import ContainerUse
from agent.web.api import BuildInfo
from agent.web.policy import HamiNames
from agent.web.status import StatusFacts

ZONE: Final = "vGPU"
UUID_LENGTH: Final = 40
TYPE_PREFIX: Final = "NVIDIA-"
"""Before every name, also before one that begins with it. The register annotation differs."""
WHOLE: Final = 2**64
"""HAMi's sums are of 64 bits without a sign."""

Used = tuple[Holder, ContainerUse]
"""A container, and what it uses."""


class _Series(msgspec.Struct, frozen=True):
    """One series of HAMi's; the label `zone` comes last."""

    name: str
    text: str
    labels: tuple[str, ...]


class _Value(msgspec.Struct, frozen=True):
    """One number of HAMi's. `of`: the key of the series. The labels are all but the zone."""

    of: str
    labels: tuple[str, ...]
    number: float


_NODE: Final = ("node", "device_index", "device_uuid", "device_type")
_CONTAINER: Final = ("namespace", "pod", "container", "vdevice_index", "device_uuid")

_CURRENT: Final[Mapping[str, _Series]] = {
    "gpu memory": _Series(
        "hami_host_gpu_memory_used_bytes", "GPU device memory usage in bytes", _NODE
    ),
    "gpu compute": _Series(
        "hami_host_gpu_utilization_ratio", "GPU core utilization ratio (0-100)", _NODE
    ),
    "gpu traffic": _Series(
        "hami_host_gpu_memory_controller_utilization_ratio",
        "GPU memory controller utilization ratio (0-100)",
        _NODE,
    ),
    "temperature": _Series(
        "hami_host_gpu_temperature_celsius", "GPU temperature in degrees Celsius", _NODE
    ),
    "power": _Series("hami_host_gpu_power_usage_watts", "GPU power draw in watts", _NODE),
    "ecc": _Series(
        "hami_host_gpu_ecc_errors_total", "GPU ECC errors in its lifetime", (*_NODE, "error_type")
    ),
    "memory": _Series(
        "hami_vgpu_memory_used_bytes", "vGPU device memory usage in bytes", _CONTAINER
    ),
    "limit": _Series(
        "hami_vgpu_memory_limit_bytes", "vGPU device memory limit in bytes", _CONTAINER
    ),
    "memory again": _Series(
        "hami_container_device_memory_bytes", "Container device memory usage in bytes", _CONTAINER
    ),
    "compute": _Series(
        "hami_container_device_utilization_ratio",
        "Container device SM utilization ratio",
        _CONTAINER,
    ),
    "idle": _Series(
        "hami_container_last_kernel_elapsed_seconds",
        "Seconds since last kernel execution in container",
        _CONTAINER,
    ),
    "context": _Series(
        "hami_vgpu_memory_context_bytes",
        "Container device memory context size in bytes",
        _CONTAINER,
    ),
    "module": _Series(
        "hami_vgpu_memory_module_bytes", "Container device memory module size in bytes", _CONTAINER
    ),
    "buffer": _Series(
        "hami_vgpu_memory_buffer_bytes", "Container device memory buffer size in bytes", _CONTAINER
    ),
}

_OLD_NODE: Final = ("nodeid", "deviceidx", "deviceuuid", "devicetype")
_OLD_CONTAINER: Final = ("podnamespace", "podname", "ctrname", "vdeviceid", "deviceuuid")

_LEGACY: Final[Mapping[str, _Series]] = {
    "gpu memory": _Series("HostGPUMemoryUsage", "GPU device memory usage", _OLD_NODE),
    "gpu compute": _Series("HostCoreUtilization", "GPU core utilization", _OLD_NODE),
    "memory": _Series("vGPU_device_memory_usage_in_bytes", "vGPU device usage", _OLD_CONTAINER),
    "limit": _Series("vGPU_device_memory_limit_in_bytes", "vGPU device limit", _OLD_CONTAINER),
    "parts": _Series(
        "Device_memory_desc_of_container",
        "Container device memory description",
        (*_OLD_CONTAINER, "context", "module", "data", "offset"),
    ),
    "compute": _Series(
        "Device_utilization_desc_of_container",
        "Container device utilization description",
        _OLD_CONTAINER,
    ),
    "idle": _Series(
        "Device_last_kernel_of_container",
        "Container device last kernel description",
        _OLD_CONTAINER,
    ),
}

_FORMS: Final[Mapping[HamiNames, tuple[Mapping[str, _Series], ...]]] = {
    HamiNames.NONE: (),
    HamiNames.CURRENT: (_CURRENT,),
    HamiNames.LEGACY: (_LEGACY,),
    HamiNames.BOTH: (_CURRENT, _LEGACY),
}

_BUILD: Final = ("build_date", "compiler", "go_version", "platform", "revision", "version")


def hami_families(
    names: HamiNames, build: BuildInfo, facts: StatusFacts, used: Iterable[Used]
) -> Iterator[Metric]:
    """Render what the GPUs report and what containers use, and the agent's version as HAMi's."""
    forms = _FORMS[names]
    if not forms:
        return
    values = [
        *_of_gpus(facts),
        *(one for holder, use in used for one in _of(holder, use)),
    ]
    for form in forms:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for key, one in form.items():
            kind = CounterMetricFamily if one.name.endswith("_total") else GaugeMetricFamily
            families[key] = kind(one.name, one.text, labels=(*one.labels, "zone"))
        for value in values:
            if value.of in families:
                families[value.of].add_metric((*value.labels, ZONE), value.number)
        yield from families.values()
    info = GaugeMetricFamily(
        "hami_build_info",
        "hami build metadata exposed as labels with a constant value of 1.",
        labels=_BUILD,
    )
    info.add_metric(("", "", "", "", build.revision, build.version), 1)
    yield info


def _of_gpus(facts: StatusFacts) -> Iterator[_Value]:
    """What each GPU reports; what it does not report has no series."""
    for shared in facts.inventory.gpus:
        gpu, sampled = shared.gpu, facts.newest(shared.uuid)
        if gpu.index == NO_INDEX or sampled is None:
            continue
        one = sampled.sample
        # As HAMi's monitor counts.
        used = None if one.used_mib is None else (one.used_mib + one.reserved_mib) * MIB
        labels = (facts.about.name, str(gpu.index), gpu.uuid[:UUID_LENGTH], TYPE_PREFIX + gpu.name)
        for key, kind, value in (
            ("gpu memory", (), used),
            ("gpu compute", (), one.gpu_percent),
            ("gpu traffic", (), one.memory_percent),
            ("temperature", (), one.celsius),
            ("power", (), one.milliwatts and one.milliwatts / 1000),
            ("ecc", ("corrected",), one.ecc_corrected),
            ("ecc", ("uncorrected",), one.ecc_uncorrected),
        ):
            if value is not None:
                yield _Value(key, (*labels, *kind), value)


def _of(holder: Holder, use: ContainerUse) -> Iterator[_Value]:
    """What one container uses of each GPU; the time since the last kernel is the same for all."""
    for gpu in use.gpus:
        uuid, memory = gpu.uuid[:UUID_LENGTH], gpu.memory
        labels = (holder.namespace, holder.pod, holder.container, str(gpu.index), uuid)
        for key, number in (
            ("memory", memory.total),
            ("limit", gpu.memory_limit),
            ("memory again", memory.total),
            ("compute", gpu.sm_percent),
            ("context", memory.context),
            ("module", memory.module),
            ("buffer", memory.buffer),
        ):
            yield _Value(key, labels, number)
        # Sizes that HAMi has as label values; the last is what the others leave of the total.
        known = memory.context, memory.module, memory.buffer
        parts = (*known, (memory.total - sum(known)) % WHOLE)
        yield _Value("parts", (*labels, *map(str, parts)), memory.total)
        if use.idle is not None:
            yield _Value("idle", labels, use.idle // dt.timedelta(seconds=1))

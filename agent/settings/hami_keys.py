"""Which keys of HAMi's two files are settings."""

from collections.abc import Mapping
from typing import Final

DEVICE_CONFIG: Final[Mapping[str, str]] = {
    "resourceCountName": "sharing.resourceName",
    "resourceMemoryName": "sharing.memoryResourceName",
    "resourceMemoryPercentageName": "sharing.memoryPercentResourceName",
    "resourceCoreName": "sharing.coreResourceName",
    "memoryFactor": "sharing.memoryFactor",
    "defaultMemory": "sharing.defaultMemoryMiB",
    "defaultCores": "sharing.defaultCorePercent",
    "deviceSplitCount": "sharing.splitCount",
    "deviceMemoryScaling": "sharing.memoryScaling",
    "deviceCoreScaling": "sharing.coreScaling",
    "preConfiguredDeviceMemory": "sharing.preconfiguredMemoryMiB",
    "enableNumaTopology": "sharing.numaTopology",
    "libCudaLogLevel": "library.cudaLogLevel",
    "disableCoreLimit": "library.disableCoreLimit",
    "gpuCorePolicy": "library.corePolicy",
}
"""Key of device-config.yaml → setting. The other keys are for scheduler, webhook or MIG."""

NODE_CONFIG: Final[Mapping[str, str]] = {
    "operatingmode": "sharing.operatingMode",
    "devicesplitcount": "sharing.splitCount",
    "devicememoryscaling": "sharing.memoryScaling",
    "devicecorescaling": "sharing.coreScaling",
    "preconfigureddevicememory": "sharing.preconfiguredMemoryMiB",
    "libcudaloglevel": "library.cudaLogLevel",
    "enablenumatopology": "sharing.numaTopology",
}
"""Key of config.json → setting."""

NODE_CAPACITY: Final = "the kubelet would then reject pods that fit, by a sum of its own"
"""Why `reportNodeCapacity`, in all its spellings, has no effect."""

"""Settings of sharing, of the answers to containers, and of HAMi-core's library."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from agent.core.allocation.settings import UnlockedPods
from agent.core.containers.device_list import CDI_KIND, CDI_PREFIX, STRATEGIES
from agent.settings.fields import Field
from agent.settings.kinds import (
    boolean,
    choice,
    indexes,
    number,
    optional_path,
    optional_resource,
    path,
    resource_name,
    several,
    text,
    text_like,
    text_or_whole,
    texts,
    whole,
)

POLICIES = {"": "default", "FORCE": "force", "DISABLE": "disable"}
"""Other spellings that HAMi-core accepts. The empty one is its default."""

MODES = msgspec.structs.replace(
    choice("hami-core", "mps", "mig"), schema=choice("hami-core", "mps").schema
)
"""HAMi's operating modes. The agent does not share GPUs in `mig` yet. HAMi's config.json may set it
for nodes that run HAMi's plugin."""

_INT32 = whole(-(2**31), 2**31 - 1)
_REQUESTS: Mapping[str, tuple[str, str | int, str]] = {
    "memoryResourceName": ("memory", "nvidia.com/gpumem", "the resource for MiB of each GPU"),
    "memoryPercentResourceName": (
        "memory_percent",
        "nvidia.com/gpumem-percentage",
        "the resource for percent of each GPU's memory",
    ),
    "coreResourceName": ("cores", "nvidia.com/gpucores", "the resource for percent of compute"),
    "memoryFactor": ("memory_factor", 1, "the factor on MiB"),
    "defaultMemoryMiB": ("default_memory_mib", 0, "MiB in place of none; 0: all memory"),
    "defaultCorePercent": ("default_core_percent", 0, "compute in place of none; 0: no limit"),
}
"""How HAMi's scheduler reads requests: attribute of RequestRules, default, help."""

SHARING: tuple[Field, ...] = (
    Field(
        "scheduler",
        "hami",
        choice("hami", "none"),
        "Who chooses a container's slices. hami: HAMi's scheduler. none: the kubelet; the agent "
        "gives the slices that it names and needs no API server. The agent refuses a change "
        "while a pod holds slices.",
        flag="--scheduler",
    ),
    Field(
        "plain.memoryLimits",
        default=False,
        read=boolean,
        text="With scheduler none: HAMi-core limits each slice to an equal part of its GPU's "
        "memory.",
        section="plain.memory_limits",
    ),
    Field(
        "sharing.resourceName",
        "nvidia.com/gpu",
        resource_name,
        "Resource name that pods request and the kubelet advertises. The agent refuses a change "
        "while a pod holds slices.",
        flag="--resource-name",
        live=True,
        profiled=False,
        section=("sharing.resource", "edits.resource", "match.resource"),
    ),
    Field(
        "sharing.splitCount",
        10,
        whole(1, 10_000),
        "Slices per GPU.",
        flag="--split-count",
        live=True,
        section="sharing.split_count",
    ),
    Field(
        "sharing.memoryScaling",
        1.0,
        number(0.01, 10),
        "Factor on the registered memory. Above 1 the memory is oversubscribed.",
        flag="--memory-scaling",
        live=True,
        section=("sharing.memory_scaling", "edits.memory_scaling"),
    ),
    Field(
        "sharing.coreScaling",
        1.0,
        number(0.01, 10),
        "Factor on the registered compute.",
        flag="--core-scaling",
        live=True,
        section="sharing.core_scaling",
    ),
    Field(
        "sharing.preconfiguredMemoryMiB",
        0,
        whole(0, 2**31 - 1),
        "MiB to register for a GPU whose memory the driver does not report; 0 leaves it out.",
        live=True,
        section="sharing.preconfigured_mib",
    ),
    Field(
        "sharing.filterUUIDs",
        (),
        texts,
        "GPUs not to share, by UUID.",
        live=True,
        section="sharing.filter_uuids",
        part=frozenset,
    ),
    Field(
        "sharing.filterIndexes",
        (),
        indexes,
        "GPUs not to share, by index.",
        live=True,
        section="sharing.filter_indexes",
        part=lambda indexes: frozenset(map(int, indexes)),
    ),
    Field(
        "sharing.operatingMode",
        "hami-core",
        MODES,
        "HAMi's operating mode of this node's GPUs, for the register annotation. Pods can ask for "
        "it (nvidia.com/vgpu-mode). HAMi-core enforces the limits in hami-core and in mps. For "
        "mps see allocation.mpsRoot.",
        flag="--operating-mode",
        live=True,
        section=("sharing.mode", "edits.mode"),
    ),
    Field(
        "sharing.numaTopology",
        default=False,
        read=boolean,
        text="Tell the kubelet's topology manager the NUMA node of each GPU. Its policy "
        "single-numa-node then refuses pods whose GPUs and CPUs are on several NUMA nodes.",
        live=True,
        section="sharing.numa_topology",
    ),
    *(
        Field(
            f"sharing.{name}",
            default,
            _INT32 if isinstance(default, int) else optional_resource,
            f"Requests of pods as HAMi's scheduler reads them: {words}.",
            live=True,
            profiled=False,
            section=f"match.requests.{part}",
        )
        for name, (part, default, words) in _REQUESTS.items()
    ),
    Field(
        "allocation.unlockedPods",
        UnlockedPods.SCHEDULED,
        choice(*UnlockedPods),
        "Which pods without a node lock are served, if the kubelet (1.34 or later) confirms that "
        "they are being admitted. strict: none. scheduled: those for which HAMi's scheduler takes "
        "none, because only init containers request GPUs; it must have bound them, and the "
        "annotation must be what it makes of their requests. unique: all.",
        flag="--unlocked-pods",
        live=True,
        section="match.unlocked_pods",
        part=UnlockedPods,
    ),
    Field(
        "allocation.schedulerName",
        "hami-scheduler",
        text,
        "spec.schedulerName of the pods that HAMi's scheduler places.",
        live=True,
        section="match.scheduler_name",
    ),
    Field(
        "allocation.fence",
        "none",
        choice("none", "prestart"),
        "prestart: the kubelet asks the agent before each start of a container with a GPU. The "
        "agent refuses the start if the kubelet recorded another GPU. While no agent runs, no "
        "such container starts.",
        flag="--fence",
        section="fenced",
        part=lambda fence: fence == "prestart",
    ),
    Field(
        "allocation.deviceListStrategy",
        ("envvar",),
        several(*STRATEGIES),
        "How the runtime learns a container's GPUs: envvar, volume-mounts, cdi-annotations, "
        "cdi-cri.",
        env=("DEVICE_LIST_STRATEGY",),
        flag="--device-list-strategy",
        live=True,
        section="edits.device_list_strategies",
    ),
    Field(
        "allocation.cdiKind",
        "nvidia.com/gpu",
        text_like(CDI_KIND, "nvidia.com/gpu"),
        "vendor/class of the GPUs in this host's CDI specification, which must name them by UUID.",
        flag="--cdi-kind",
        live=True,
        section="edits.cdi_kind",
    ),
    Field(
        "allocation.cdiSpecDirs",
        ("/etc/cdi", "/var/run/cdi"),
        texts,
        "Directories in which the container runtime looks for CDI specifications; the last wins. "
        "With a cdi strategy, a GPU that none of them defines is not offered. Empty: do not look.",
        flag="--cdi-spec-dirs",
        live=True,
        section="edits.cdi_spec_dirs",
    ),
    Field(
        "allocation.cdiAnnotationPrefix",
        "cdi.k8s.io/",
        text_like(CDI_PREFIX, "cdi.k8s.io/"),
        "Prefix of the annotation of strategy cdi-annotations.",
        env=("CDI_ANNOTATION_PREFIX",),
        flag="--cdi-annotation-prefix",
        live=True,
        section="edits.cdi_annotation_prefix",
    ),
    Field(
        "allocation.passDeviceSpecs",
        default=False,
        read=boolean,
        text="Also pass the GPUs' device files to the runtime.",
        env=("PASS_DEVICE_SPECS",),
        flag="--pass-device-specs",
        live=True,
        section="edits.pass_device_specs",
    ),
    Field(
        "allocation.devRoot",
        "/",
        path,
        "Host directory above dev/, which holds the device files.",
        env=("NVIDIA_DEV_ROOT", "NVIDIA_DRIVER_ROOT"),
        flag="--dev-root",
        other_flags=("--nvidia-dev-root", "--nvidia-driver-root"),
        live=True,
        section="edits.dev_root",
    ),
    *(
        Field(
            f"allocation.{name}",
            default=False,
            read=boolean,
            text=f"Ask the runtime for {words} in all containers with a GPU.",
            env=(f"{name.upper()}_ENABLED",),
            flag=f"--{name}-enabled",
            live=True,
            section=f"edits.{name}",
        )
        for name, words in (
            ("gdrcopy", "GDRCopy"),
            ("gds", "GPUDirect Storage"),
            ("mofed", "MOFED devices"),
        )
    ),
    Field(
        "allocation.mpsRoot",
        None,
        optional_path,
        "In mode mps: host directory of the MPS control daemon, which you run. Containers then "
        "get CUDA_MPS_PIPE_DIRECTORY, <mpsRoot>/<resource name>/pipe and <mpsRoot>/shm.",
        env=("MPS_ROOT",),
        flag="--mps-root",
        live=True,
        section="edits.mps_root",
        part=lambda root: root or "",
    ),
    Field(
        "library.hookPath",
        "/usr/local",
        path,
        "Host directory above vgpu/, which holds libvgpu.so and the containers' directories.",
        env=("HOOK_PATH",),
        flag="--hook-path",
        section="paths.hook",
        part=Path,
    ),
    Field(
        "library.version",
        "",
        text,
        "Mount libvgpu.so.<version> if that file exists.",
        section="library_version",
    ),
    Field(
        "library.cudaLogLevel",
        "1",
        text_or_whole,
        "LIBCUDA_LOG_LEVEL of the containers; empty leaves it unset.",
        live=True,
        section="edits.cuda_log_level",
    ),
    Field(
        "library.disableCoreLimit",
        default=False,
        read=boolean,
        text="Switch the compute limit off in all containers.",
        live=True,
        section="edits.disable_core_limit",
    ),
    Field(
        "library.corePolicy",
        "default",
        choice("default", "force", "disable", like=POLICIES),
        "GPU_CORE_UTILIZATION_POLICY of the containers: when compute limits apply; default leaves "
        "it unset.",
        live=True,
        section="edits.core_policy",
    ),
)

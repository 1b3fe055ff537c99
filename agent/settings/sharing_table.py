"""The settings of what is shared, and of what a container is given."""

import dataclasses
from pathlib import Path

from agent.core.allocation.settings import UnlockedPods
from agent.core.containers.device_list import CDI_KIND, CDI_PREFIX, STRATEGIES
from agent.settings.fields import Field
from agent.settings.kinds import (
    boolean,
    choice,
    indexes,
    number,
    optional_path,
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
"""Spellings that HAMi-core takes, too; empty is its default."""

MODES = dataclasses.replace(
    choice("hami-core", "mps", "mig"), schema=choice("hami-core", "mps").schema
)
"""HAMi's operating modes. Nothing is shared in the last one yet: HAMi's config.json may name it for
nodes that have HAMi's plugin."""

SHARING: tuple[Field, ...] = (
    Field(
        "scheduler",
        "hami",
        choice("hami", "none"),
        "Who says what a container gets: HAMi's scheduler, or nobody. With none each slice that "
        "the kubelet names is given as it is, and no API server is needed. Another one is refused "
        "while a pod holds slices.",
        flag="--scheduler",
    ),
    Field(
        "plain.memoryLimits",
        default=False,
        read=boolean,
        text="Without a scheduler: limit each slice to an equal part of its GPU's memory, kept by "
        "HAMi-core.",
        section="plain.memory_limits",
    ),
    Field(
        "sharing.resourceName",
        "nvidia.com/gpu",
        resource_name,
        "Resource name that pods request and the kubelet advertises. Another one is refused while "
        "a pod holds slices.",
        flag="--resource-name",
        live=True,
        profiled=False,
        section=("sharing.resource", "edits.resource"),
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
        "Factor on the registered memory; above 1 is oversubscription.",
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
        "MiB to register for a GPU whose memory the driver cannot tell; 0 leaves it out.",
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
        "HAMi's operating mode of this node's GPUs, in the register annotation, by which pods can "
        "choose them (nvidia.com/vgpu-mode). HAMi-core keeps the limits in hami-core and in mps, "
        "which has allocation.mpsRoot.",
        flag="--operating-mode",
        live=True,
        section=("sharing.mode", "edits.mode"),
    ),
    Field(
        "sharing.numaTopology",
        default=False,
        read=boolean,
        text="Tell the kubelet's topology manager on which NUMA node each GPU is. With its policy "
        "single-numa-node pods are then refused whose GPUs and CPUs are on several.",
        live=True,
        section="sharing.numa_topology",
    ),
    Field(
        "sharing.memoryResourceName",
        "nvidia.com/gpumem",
        resource_name,
        "Resource name that pods request memory in MiB under; the scheduler counts it.",
        section="memory_resource",
    ),
    Field(
        "allocation.unlockedPods",
        "strict",
        choice("strict", "unique"),
        "What to do with a pod that holds no node lock: refuse it, or serve it when the kubelet "
        "confirms that it is the one being admitted (unique).",
        flag="--unlocked-pods",
        section="match.unlocked_pods",
        part=UnlockedPods,
    ),
    Field(
        "allocation.fence",
        "none",
        choice("none", "prestart"),
        "prestart: the kubelet asks before each start of a container with a GPU, and one for "
        "which it booked another GPU is refused; without the agent none starts then.",
        flag="--fence",
        section="fenced",
        part=lambda fence: fence == "prestart",
    ),
    Field(
        "allocation.deviceListStrategy",
        ("envvar",),
        several(*STRATEGIES),
        "How a container is told its GPUs: envvar, volume-mounts, cdi-annotations, cdi-cri.",
        env=("DEVICE_LIST_STRATEGY",),
        flag="--device-list-strategy",
        live=True,
        section="edits.device_list_strategies",
    ),
    Field(
        "allocation.cdiKind",
        "nvidia.com/gpu",
        text_like(CDI_KIND, "nvidia.com/gpu"),
        "vendor/class of the GPUs in this host's CDI specification, which names them by UUID.",
        flag="--cdi-kind",
        live=True,
        section="edits.cdi_kind",
    ),
    Field(
        "allocation.cdiAnnotationPrefix",
        "cdi.k8s.io/",
        text_like(CDI_PREFIX, "cdi.k8s.io/"),
        "Begin of the annotation of strategy cdi-annotations.",
        env=("CDI_ANNOTATION_PREFIX",),
        flag="--cdi-annotation-prefix",
        live=True,
        section="edits.cdi_annotation_prefix",
    ),
    Field(
        "allocation.passDeviceSpecs",
        default=False,
        read=boolean,
        text="Name the device files of the GPUs to the runtime, too.",
        env=("PASS_DEVICE_SPECS",),
        flag="--pass-device-specs",
        live=True,
        section="edits.pass_device_specs",
    ),
    Field(
        "allocation.devRoot",
        "/",
        path,
        "Host directory above dev/, where the device files lie.",
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
        "In mode mps: host directory of the MPS control daemon, which you run; with it containers "
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
        "Host directory above vgpu/, where libvgpu.so and the containers' directories lie.",
        env=("HOOK_PATH",),
        flag="--hook-path",
        section="paths.hook",
        part=Path,
    ),
    Field(
        "library.version",
        "",
        text,
        "Mount libvgpu.so.<version> where that file exists.",
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
        "GPU_CORE_UTILIZATION_POLICY of the containers: when compute limits act; default leaves it "
        "unset.",
        live=True,
        section="edits.core_policy",
    ),
)

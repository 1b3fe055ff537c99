"""All settings of the agent, in the order of `config show`.

A new setting is a row here. Help, schema and SETTINGS.md follow from it.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from agent.allocate.candidates import UnlockedPods
from agent.allocate.edits import CDI_KIND, CDI_PREFIX, STRATEGIES
from agent.hami.register import ReportProfile
from agent.health.judge import XidSwitches, read_switches
from agent.health.xids import XidClass
from agent.settings.fields import (
    FALSE,
    HOW,
    TRUE,
    Field,
    ValueType,
    WrongValue,
    boolean,
    choice,
    duration,
    indexes,
    node_name,
    number,
    optional_path,
    optional_resource,
    optional_text,
    path,
    resource_name,
    several,
    shown,
    text,
    text_like,
    text_or_whole,
    texts,
    whole,
)
from agent.web.policy import HamiNames, ReaderPolicy

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

CLASSES = {kind.value: kind for kind in XidClass}
MOST_XID = 65535


def _class_of(item: str) -> tuple[int, XidClass]:
    xid, _, name = (part.strip() for part in item.partition("="))
    is_xid = xid.isascii() and xid.isdigit() and len(xid) < 6 and 0 < int(xid) <= MOST_XID
    if not is_xid or name not in CLASSES:
        words = ", ".join(CLASSES)
        raise WrongValue(f"expected XID=CLASS with one of {words}", shown(item))
    return int(xid), CLASSES[name]


def _xid_classes(value: object) -> tuple[str, ...]:
    found = texts(value)
    items = found if isinstance(found, tuple) else ()
    named = [_class_of(item)[0] for item in items]
    if twice := sorted({xid for xid in named if named.count(xid) > 1}):
        raise WrongValue(f"expected one class for XID {twice[0]}", "more")
    return items


xid_classes = ValueType(
    _xid_classes,
    {
        "type": "array",
        "items": {"type": "string", "pattern": f"^[1-9][0-9]{{0,4}} *= *({'|'.join(CLASSES)})$"},
    },
)
"""A list of texts like `94=fatal`; in variables and flags separated by commas."""


def classes_of(items: tuple[str, ...]) -> Mapping[int, XidClass]:
    """Read `health.xids`: the class of each XID."""
    return dict(map(_class_of, items))


def switches_of(disabled: str, enabled: str) -> XidSwitches:
    """Read `health.disabledXids` and `health.enabledXids`."""
    return read_switches(disabled, enabled)


HEALTH: tuple[Field, ...] = (
    Field(
        "health.driverHang",
        60.0,
        duration(1, 3600),
        f"Time without an answer of the driver after which new pods get none of its GPUs. {HOW}",
        section="health.driver_hang",
    ),
    Field(
        "health.quietPeriod",
        600.0,
        duration(1, 86400),
        "Cool-down: a GPU is ok after this time without a bad report and 3 passed probes. " + HOW,
        section="health.quiet",
    ),
    Field(
        "health.probePeriod",
        10.0,
        duration(0.1, 3600),
        f"Time between probes of a GPU. {HOW}",
        section="health.probe_interval",
    ),
    Field(
        "health.longestQuietPeriod",
        7200.0,
        duration(1, 604800),
        "Longest cool-down. The cool-down of a GPU doubles each time that the GPU becomes bad "
        f"again soon after it recovered. {HOW}",
        section="health.longest_quiet",
    ),
    Field(
        "health.xids",
        (),
        xid_classes,
        "Classes of XIDs that differ from the agent's table, such as 94=fatal: "
        f"{', '.join([*CLASSES][:-1])} or {[*CLASSES][-1]}.",
        section="health.xids",
        part=classes_of,
    ),
    Field(
        "health.disabledXids",
        "",
        text,
        "XIDs to ignore, separated by commas. all or xids: no health checks at all, as in "
        "NVIDIA's plugin. Then a GPU that hangs or fails stays on offer; a lost GPU stays until "
        "the next scan, at most 1 minute.",
        env=("DP_DISABLE_HEALTHCHECKS",),
    ),
    Field(
        "health.enabledXids",
        "",
        text,
        "XIDs to count even if an application causes them or they are disabled; all: every XID.",
        env=("DP_ENABLE_HEALTHCHECKS",),
    ),
)

TRUTH = dict.fromkeys(TRUE, "exit") | dict.fromkeys(FALSE, "wait")
"""NVIDIA's FAIL_ON_INIT_ERROR as values of driver.onNoDriver."""

FIELDS: tuple[Field, ...] = (
    Field(
        "node.name",
        None,
        node_name,
        "Name of this Node in Kubernetes; if not set, the host name.",
        env=("NODE_NAME",),
        flag="--node-name",
        section=("node", "match.node"),
    ),
    Field(
        "node.kubeconfig",
        None,
        optional_text,
        "Kubeconfig file; if not set, the pod's service account.",
        env=("KUBECONFIG",),
        flag="--kubeconfig",
        section="kubeconfig",
    ),
    Field(
        "files.deviceConfig",
        "/etc/hami/device-config.yaml",
        text,
        "HAMi's device-config.yaml; empty: none. The default file is read only if it exists.",
        env=("CONFIG_FILE",),
        flag="--device-config",
        other_flags=("--config-file",),
        live=True,
        profiled=False,
    ),
    Field(
        "files.nodeConfig",
        "/etc/hami/config.json",
        text,
        "HAMi's config.json with settings of nodes by name, by labels, or of all others (`*`); "
        "empty: none. The default file is read only if it exists.",
        flag="--nodeconfig",
        live=True,
        profiled=False,
    ),
    *SHARING,
    Field(
        "observe",
        default=False,
        read=boolean,
        text="Only show what the agent would list and write, beside another plugin. It registers "
        "and writes nothing; its temporary state is in the run directory.",
        flag="--observe",
        section="observe",
    ),
    Field(
        "takeover",
        default=False,
        read=boolean,
        text="Serve even if another device plugin of this node serves the same resource. The "
        "kubelet uses the one that registered last.",
        flag="--takeover",
        section="takeover",
    ),
    Field(
        "report.profile",
        "json",
        choice("json", "colon"),
        "Form of the register annotation, by the version of HAMi's scheduler. json: 2.8 and "
        "later. colon: 2.5 up to and including 2.7.1.",
        flag="--report-profile",
        live=True,
        section="report.profile",
        part=ReportProfile,
    ),
    Field(
        "report.topologyScore",
        default=False,
        read=boolean,
        text="Also write the annotation with the links between the GPUs.",
        env=("ENABLE_TOPOLOGY_SCORE",),
        live=True,
        section="report.topology_score",
    ),
    Field(
        "report.nodeCondition",
        default=False,
        read=boolean,
        text="Write the Node's condition GpuDegraded. It needs the right to patch nodes/status.",
        section="node_condition",
    ),
    *HEALTH,
    Field(
        "driver.nvmlLibrary",
        None,
        optional_text,
        "Path of libnvidia-ml.so.1, if the loader does not find it.",
        flag="--nvml-library",
        section="driver.nvml_library",
    ),
    Field(
        "driver.root",
        "/driver-root",
        path,
        "Directory with the layout of the host's /. It is searched first for the driver's library.",
        env=("DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"),
        flag="--driver-root-ctr-path",
        other_flags=("--container-driver-root",),
        section="driver.root",
        part=Path,
    ),
    Field(
        "driver.simulate",
        None,
        optional_text,
        "Simulated GPUs instead of the driver: PROFILE:COUNT or unix:PATH.",
        flag="--simulate",
        section="driver.simulate",
    ),
    Field(
        "driver.onNoDriver",
        "wait",
        choice("wait", "exit", like=TRUTH),
        "If no driver answers at the start: wait for it, or exit with code 69.",
        env=("FAIL_ON_INIT_ERROR",),
        flag="--on-no-driver",
        other_flags=("--fail-on-init-error",),
        section="driver.exit_without",
        part=lambda word: word == "exit",
    ),
    Field(
        "paths.state",
        "/var/lib/hami-agent",
        path,
        "Directory of the ledger.",
        flag="--state-dir",
        section="paths.state",
        part=Path,
    ),
    Field(
        "paths.run",
        "/run/hami-agent",
        path,
        "Directory of the instance lock and the sockets.",
        flag="--run-dir",
        section="paths.run",
        part=Path,
    ),
    Field(
        "paths.kubeletSocket",
        "/var/lib/kubelet/device-plugins/kubelet.sock",
        path,
        "The kubelet's registration socket; the agent's own socket goes beside it.",
        env=("KUBELET_SOCKET",),
        flag="--kubelet-socket",
        section="paths.kubelet_socket",
        part=Path,
    ),
    Field(
        "paths.podResourcesSocket",
        "/var/lib/kubelet/pod-resources/kubelet.sock",
        path,
        "The kubelet's PodResources socket.",
        flag="--pod-resources-socket",
        section="paths.pod_resources_socket",
        part=Path,
    ),
    Field(
        "paths.cgroup",
        "/sys/fs/cgroup",
        path,
        "The cgroup tree, read only.",
        section="paths.cgroup",
        part=Path,
    ),
    Field(
        "paths.sysfs", "/sys", path, "sysfs, read for NUMA nodes.", section="paths.sysfs", part=Path
    ),
    Field(
        "web.address",
        "127.0.0.1",
        text,
        "Address of the probes and metrics.",
        flag="--web-address",
        section="web.address",
    ),
    Field(
        "web.port",
        9394,
        whole(0, 65535),
        "Port of the probes and metrics; 0 takes a free one, which the log names.",
        flag="--web-port",
        section="web.port",
    ),
    Field(
        "web.readers",
        ReaderPolicy.LOCAL,
        choice(*ReaderPolicy),
        "Who may read the page and /api/v1 at the port, which name pods: local or all.",
        flag="--web-readers",
        section="web.readers",
        part=ReaderPolicy,
    ),
    Field(
        "metrics.containers",
        default=True,
        read=boolean,
        text="Name namespace, pod and container in the metrics, with what each container was "
        "promised of each GPU and what it uses.",
        section="metrics.containers",
    ),
    Field(
        "metrics.hami",
        HamiNames.CURRENT,
        choice(*HamiNames),
        "Serve the series of HAMi's vGPUmonitor, too: none, by its current names (2.9 and later), "
        "by its legacy names (up to 2.8), or by both. An agent that observes serves none. Sums "
        "over them double where the monitor of the same node is scraped: set none there.",
        section="metrics.hami",
        part=HamiNames,
    ),
    Field(
        "usage.feedback",
        default=True,
        read=boolean,
        text="Limit and hold back containers by priority while others use the same GPUs, as HAMi's "
        "vGPUmonitor does. Set it to false where the monitor runs too: both would write.",
        section="feedback",
    ),
    Field(
        "log.level",
        "info",
        choice("debug", "info", "warning", "error"),
        "Lowest level of the log lines to write.",
        flag="--log-level",
        section="log.level",
    ),
    Field(
        "log.format",
        "auto",
        choice("auto", "json", "text"),
        "JSON lines, readable text, or text on a terminal only.",
        flag="--log-format",
        section="log.format",
    ),
)

BY_KEY = {field.key: field for field in FIELDS}

SECTIONS = frozenset(key.partition(".")[0] for key in BY_KEY) | {"profiles"}
"""The keys allowed at the top of the agent's own file."""

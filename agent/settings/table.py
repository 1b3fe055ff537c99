"""All settings of the agent, in the order of `config show`.

A new setting is a row here, in sharing_table or in health_table. Help and schema follow from it.
"""

from pathlib import Path

from agent.core.report_settings import ReportProfile
from agent.settings.fields import Field
from agent.settings.health_table import HEALTH
from agent.settings.kinds import (
    FALSE,
    TRUE,
    boolean,
    choice,
    exactly_true,
    node_name,
    optional_text,
    path,
    text,
    whole,
)
from agent.settings.sharing_table import SHARING
from agent.web.policy import HamiNames, ReaderPolicy

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
        choice("json", "colon", "colon-7"),
        "Form of the register annotation, by the version of HAMi's scheduler. json: 2.8 and "
        "later. colon: 2.5 up to and including 2.7.1. colon-7: 2.4.",
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
        kept_read=exactly_true,
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

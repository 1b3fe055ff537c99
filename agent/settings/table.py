"""Every setting of the agent, in the order in which `config show` prints them.

A new one is a row here, or in the pages of sharing and of health. What people see of it follows.
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

TRUTH = dict.fromkeys(TRUE, "exit") | dict.fromkeys(FALSE, "wait")
"""How NVIDIA's FAIL_ON_INIT_ERROR says it."""

FIELDS: tuple[Field, ...] = (
    Field(
        "node.name",
        None,
        node_name,
        "Name of this Node in Kubernetes; the host name where it is not set.",
        env=("NODE_NAME",),
        flag="--node-name",
        section=("node", "match.node"),
    ),
    Field(
        "node.kubeconfig",
        None,
        optional_text,
        "Kubeconfig file; the pod's service account where it is not set.",
        env=("KUBECONFIG",),
        flag="--kubeconfig",
        section="kubeconfig",
    ),
    Field(
        "files.deviceConfig",
        "/etc/hami/device-config.yaml",
        text,
        "HAMi's device-config.yaml; empty: none. The default is read only where it is there.",
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
        "HAMi's config.json with settings of nodes by name; empty: none. The default is read only "
        "where it is there.",
        flag="--nodeconfig",
        live=True,
        profiled=False,
    ),
    *SHARING,
    Field(
        "observe",
        default=False,
        read=boolean,
        text="Only show what would be listed and written, beside another plugin: nothing is "
        "registered or written, and the state is a throwaway in the run directory.",
        flag="--observe",
        section="observe",
    ),
    Field(
        "takeover",
        default=False,
        read=boolean,
        text="Serve although another device plugin of this node serves the same resource: the "
        "kubelet takes whoever registered last.",
        flag="--takeover",
        section="takeover",
    ),
    Field(
        "report.profile",
        "json",
        choice("json", "colon", "colon-7"),
        "Form of the register annotation: json for HAMi's scheduler from 2.8 on, colon for 2.5 to "
        "2.7.1, colon-7 for 2.4.",
        flag="--report-profile",
        live=True,
        section="report.profile",
        part=ReportProfile,
    ),
    Field(
        "report.topologyScore",
        default=False,
        read=boolean,
        text="Write the annotation with the links between the GPUs, too.",
        env=("ENABLE_TOPOLOGY_SCORE",),
        live=True,
        kept_read=exactly_true,
        section="report.topology_score",
    ),
    Field(
        "report.nodeCondition",
        default=False,
        read=boolean,
        text="Keep the Node's condition GpuDegraded, which needs the right to patch nodes/status.",
        section="node_condition",
    ),
    *HEALTH,
    Field(
        "driver.nvmlLibrary",
        None,
        optional_text,
        "Path of libnvidia-ml.so.1, where the loader does not find it.",
        flag="--nvml-library",
        section="driver.nvml_library",
    ),
    Field(
        "driver.root",
        "/driver-root",
        path,
        "Directory laid out like the host's / in which the driver's library is looked for first.",
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
        "Simulated GPUs instead of the driver: PROFILE:COUNT, a YAML file or unix:PATH.",
        flag="--simulate",
        section="driver.simulate",
    ),
    Field(
        "driver.onNoDriver",
        "wait",
        choice("wait", "exit", like=TRUTH),
        "Without a driver that answers: wait for it, or exit with 69 at the start.",
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
        "Port of the probes and metrics; 0 takes a free one and says which.",
        flag="--web-port",
        section="web.port",
    ),
    Field(
        "log.level",
        "info",
        choice("debug", "info", "warning", "error"),
        "Least severe log lines to write.",
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
"""What can stand at the top of the agent's own file."""

"""The settings as each part of the agent receives them: frozen sections, built from the values."""

import dataclasses
from pathlib import Path

from agent.core.edits import EditSettings
from agent.core.errors import SettingsError
from agent.core.health.settings import HealthSettings
from agent.core.match_settings import MatchSettings, UnlockedPods
from agent.core.plain import PlainSettings
from agent.core.report_settings import ReportProfile, ReportSettings
from agent.core.slices import MIG_MODE, SharingSettings, check_list_size
from agent.settings.fields import DEFAULT, Effective
from agent.settings.health_table import classes_of, switches_of


@dataclasses.dataclass(frozen=True, slots=True)
class HostPaths:
    """Directories and sockets of this host."""

    state: Path
    run: Path
    kubelet_socket: Path
    pod_resources_socket: Path
    hook: Path
    cgroup: Path
    sysfs: Path

    @property
    def plugins(self) -> Path:
        """The kubelet's device plugin directory."""
        return self.kubelet_socket.parent


@dataclasses.dataclass(frozen=True, slots=True)
class DriverSettings:
    """Which driver: NVML, or simulated GPUs. `root`: where its library is looked for first."""

    nvml_library: str | None
    root: Path
    simulate: str | None
    exit_without: bool


@dataclasses.dataclass(frozen=True, slots=True)
class WebSettings:
    """Where the probes and metrics listen."""

    address: str
    port: int


@dataclasses.dataclass(frozen=True, slots=True)
class LogSettings:
    """What is logged, and how."""

    level: str
    format: str


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Everything that `run` was told. `fenced`: the kubelet asks before each start.

    `plain`: there is no scheduler of ours, the kubelet's ids decide; None in hami mode.
    `observe`: nothing is registered or written, beside another plugin. `takeover`: another plugin
    may serve the same resource.
    `node_condition`: the Node's condition GpuDegraded is kept.
    `memory_resource` is the name that pods request memory under.
    """

    node: str
    kubeconfig: str | None
    memory_resource: str
    library_version: str
    sharing: SharingSettings
    report: ReportSettings
    match: MatchSettings
    edits: EditSettings
    plain: PlainSettings | None
    fenced: bool
    health: HealthSettings
    node_condition: bool
    driver: DriverSettings
    paths: HostPaths
    observe: bool
    takeover: bool
    web: WebSettings
    log: LogSettings


class _Values:
    """Typed access to effective values; a wrong type here is a defect of the table."""

    def __init__(self, effective: Effective) -> None:
        self._effective = effective

    def text(self, key: str) -> str:
        value = self._effective[key].value
        return value if isinstance(value, str) else ""

    def optional(self, key: str) -> str | None:
        return self.text(key) or None

    def number(self, key: str) -> float:
        value = self._effective[key].value
        return float(value) if isinstance(value, int | float) else 0.0

    def whole(self, key: str) -> int:
        return int(self.number(key))

    def flag(self, key: str) -> bool:
        return self._effective[key].value is True

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._effective[key].value
        return value if isinstance(value, tuple) else ()

    def path(self, key: str) -> Path:
        return Path(self.text(key))


def build(effective: Effective, *, host_name: str, gpus: int = 1) -> Settings:
    """The sections of `effective` for a node with so many GPUs.

    Raises SettingsError where values do not go together.
    """
    get = _Values(effective)
    node = get.optional("node.name") or host_name
    sharing = _sharing(get)
    check_list_size(gpus, sharing.split_count, effective["sharing.splitCount"].origin)
    edits = _edits(get, sharing)
    return Settings(
        node=node,
        kubeconfig=get.optional("node.kubeconfig"),
        memory_resource=get.text("sharing.memoryResourceName"),
        library_version=get.text("library.version"),
        sharing=sharing,
        report=ReportSettings(
            profile=ReportProfile(get.text("report.profile")),
            topology_score=get.flag("report.topologyScore"),
        ),
        match=MatchSettings(
            node=node,
            unlocked_pods=UnlockedPods(get.text("allocation.unlockedPods")),
        ),
        edits=edits,
        plain=_plain(get),
        fenced=get.text("allocation.fence") == "prestart",
        health=HealthSettings(
            driver_hang=get.number("health.driverHang"),
            quiet=get.number("health.quietPeriod"),
            longest_quiet=get.number("health.longestQuietPeriod"),
            probe_interval=get.number("health.probePeriod"),
            xids=classes_of(get.texts("health.xids")),
            switches=switches_of(get.text("health.disabledXids"), get.text("health.enabledXids")),
        ),
        node_condition=get.flag("report.nodeCondition"),
        driver=DriverSettings(
            nvml_library=get.optional("driver.nvmlLibrary"),
            root=get.path("driver.root"),
            simulate=get.optional("driver.simulate"),
            exit_without=get.text("driver.onNoDriver") == "exit",
        ),
        paths=_paths(get),
        observe=get.flag("observe"),
        takeover=get.flag("takeover"),
        web=_web(get, effective),
        log=LogSettings(get.text("log.level"), get.text("log.format")),
    )


def check_shares(effective: Effective) -> None:
    """Nothing, where settings let GPUs be shared. Raises SettingsError where they share none.

    Such a node runs all the same: it tells by Events why it has no slices.
    """
    mode = effective["sharing.operatingMode"]
    if mode.value == MIG_MODE:
        raise SettingsError(
            f"{mode.origin}: sharing.operatingMode: mig is not shared yet, so that a node with "
            "it has no slices; set hami-core or mps, or leave that node to HAMi's plugin"
        )


def _plain(get: _Values) -> PlainSettings | None:
    if get.text("scheduler") == "hami":
        return None
    return PlainSettings(memory_limits=get.flag("plain.memoryLimits"))


def _sharing(get: _Values) -> SharingSettings:
    return SharingSettings(
        split_count=get.whole("sharing.splitCount"),
        memory_scaling=get.number("sharing.memoryScaling"),
        core_scaling=get.number("sharing.coreScaling"),
        preconfigured_mib=get.whole("sharing.preconfiguredMemoryMiB"),
        mode=get.text("sharing.operatingMode"),
        numa_topology=get.flag("sharing.numaTopology"),
        filter_uuids=frozenset(get.texts("sharing.filterUUIDs")),
        filter_indexes=frozenset(int(word) for word in get.texts("sharing.filterIndexes")),
        resource=get.text("sharing.resourceName"),
    )


def _edits(get: _Values, sharing: SharingSettings) -> EditSettings:
    return EditSettings(
        memory_scaling=sharing.memory_scaling,
        cuda_log_level=get.text("library.cudaLogLevel"),
        disable_core_limit=get.flag("library.disableCoreLimit"),
        core_policy=get.text("library.corePolicy"),
        mode=sharing.mode,
        device_list_strategies=get.texts("allocation.deviceListStrategy"),
        cdi_kind=get.text("allocation.cdiKind"),
        cdi_annotation_prefix=get.text("allocation.cdiAnnotationPrefix"),
        pass_device_specs=get.flag("allocation.passDeviceSpecs"),
        dev_root=get.text("allocation.devRoot"),
        gdrcopy=get.flag("allocation.gdrcopy"),
        gds=get.flag("allocation.gds"),
        mofed=get.flag("allocation.mofed"),
        mps_root=get.text("allocation.mpsRoot"),
        resource=sharing.resource,
    )


def _web(get: _Values, effective: Effective) -> WebSettings:
    """Who observes beside the node's agent leaves it the usual port."""
    usual = effective["web.port"].origin == DEFAULT
    port = 0 if get.flag("observe") and usual else get.whole("web.port")
    return WebSettings(get.text("web.address"), port)


def _paths(get: _Values) -> HostPaths:
    """Who observes has a lock, a socket and a state of its own, which end with the next boot."""
    state, run = get.path("paths.state"), get.path("paths.run")
    if get.flag("observe"):
        run = run / "observe"
        state = run / "state"
    return HostPaths(
        state=state,
        run=run,
        kubelet_socket=get.path("paths.kubeletSocket"),
        pod_resources_socket=get.path("paths.podResourcesSocket"),
        hook=get.path("library.hookPath"),
        cgroup=get.path("paths.cgroup"),
        sysfs=get.path("paths.sysfs"),
    )

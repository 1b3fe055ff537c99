"""The settings as each part of the agent receives them: frozen sections, built from the values."""

import dataclasses
from pathlib import Path

from agent.core.container_edits import check_edit_settings
from agent.core.edits import EditSettings
from agent.core.errors import SettingsError
from agent.core.health import HealthSettings
from agent.core.match_settings import MatchSettings, UnlockedPods
from agent.core.plain import PlainSettings
from agent.core.slices import SharingSettings
from agent.settings.load import Effective


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
    """Which driver: NVML, or simulated GPUs."""

    nvml_library: str | None
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
    """

    node: str
    kubeconfig: str | None
    resource: str
    library_version: str
    sharing: SharingSettings
    match: MatchSettings
    edits: EditSettings
    plain: PlainSettings | None
    fenced: bool
    health: HealthSettings
    driver: DriverSettings
    paths: HostPaths
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


def build(effective: Effective, *, host_name: str) -> Settings:
    """The sections of `effective`. Raises SettingsError where values do not go together."""
    get = _Values(effective)
    node = get.optional("node.name") or host_name
    resource = get.text("sharing.resourceName")
    sharing = _sharing(get, effective)
    edits = _edits(get, sharing)
    check_edit_settings(edits)
    return Settings(
        node=node,
        kubeconfig=get.optional("node.kubeconfig"),
        resource=resource,
        library_version=get.text("library.version"),
        sharing=sharing,
        match=MatchSettings(
            node=node,
            resource=resource,
            unlocked_pods=UnlockedPods(get.text("allocation.unlockedPods")),
        ),
        edits=edits,
        plain=_plain(get),
        fenced=get.text("allocation.fence") == "prestart",
        health=HealthSettings(
            driver_hang=get.number("health.driverHang"),
            quiet=get.number("health.quietPeriod"),
            probe_interval=get.number("health.probePeriod"),
        ),
        driver=DriverSettings(
            nvml_library=get.optional("driver.nvmlLibrary"),
            simulate=get.optional("driver.simulate"),
            exit_without=get.text("driver.onNoDriver") == "exit",
        ),
        paths=_paths(get),
        web=WebSettings(get.text("web.address"), get.whole("web.port")),
        log=LogSettings(get.text("log.level"), get.text("log.format")),
    )


def _plain(get: _Values) -> PlainSettings | None:
    if get.text("scheduler") == "hami":
        return None
    return PlainSettings(memory_limits=get.flag("plain.memoryLimits"))


def _sharing(get: _Values, effective: Effective) -> SharingSettings:
    indexes = get.texts("sharing.filterIndexes")
    for word in indexes:
        if not (word.isascii() and word.isdigit()):
            origin = effective["sharing.filterIndexes"].origin
            raise SettingsError(
                f"{origin}: sharing.filterIndexes: expected GPU indexes, found {word!r}"
            )
    return SharingSettings(
        split_count=get.whole("sharing.splitCount"),
        memory_scaling=get.number("sharing.memoryScaling"),
        core_scaling=get.number("sharing.coreScaling"),
        preconfigured_mib=get.whole("sharing.preconfiguredMemoryMiB"),
        mode=get.text("sharing.operatingMode"),
        filter_uuids=frozenset(get.texts("sharing.filterUUIDs")),
        filter_indexes=frozenset(int(word) for word in indexes),
    )


def _edits(get: _Values, sharing: SharingSettings) -> EditSettings:
    return EditSettings(
        hook_path=get.text("library.hookPath"),
        memory_scaling=sharing.memory_scaling,
        cuda_log_level=get.text("library.cudaLogLevel"),
        disable_core_limit=get.flag("library.disableCoreLimit"),
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
        resource=get.text("sharing.resourceName"),
    )


def _paths(get: _Values) -> HostPaths:
    return HostPaths(
        state=get.path("paths.state"),
        run=get.path("paths.run"),
        kubelet_socket=get.path("paths.kubeletSocket"),
        pod_resources_socket=get.path("paths.podResourcesSocket"),
        hook=get.path("library.hookPath"),
        cgroup=get.path("paths.cgroup"),
        sysfs=get.path("paths.sysfs"),
    )

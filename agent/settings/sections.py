"""The settings as each part of the agent receives them: frozen sections, built from the values."""

import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import Any

from agent.core.allocation.plain import PlainSettings
from agent.core.allocation.settings import MatchSettings
from agent.core.containers.edits import EditSettings
from agent.core.errors import SettingsError
from agent.core.health.settings import HealthSettings
from agent.core.inventory.slices import MIG_MODE, SharingSettings, check_list_size
from agent.core.report_settings import ReportSettings
from agent.settings.fields import DEFAULT, Values
from agent.settings.health_table import switches_of


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


def build(values: Values, *, host_name: str, gpus: int = 1) -> Settings:
    """The sections of `values` for a node with so many GPUs.

    Raises SettingsError where values do not go together.
    """
    parts = _parts(values)
    top = parts.pop("")
    top["node"] = parts["match"]["node"] = top["node"] or host_name
    if top["observe"]:
        _stand_aside(parts, values)
    parts["health"]["switches"] = switches_of(
        str(values["health.disabledXids"].value), str(values["health.enabledXids"].value)
    )
    is_plain = values["scheduler"].value == "none"
    found = Settings(
        **top,
        sharing=SharingSettings(**parts["sharing"]),
        report=ReportSettings(**parts["report"]),
        match=MatchSettings(**parts["match"]),
        edits=EditSettings(**parts["edits"]),
        plain=PlainSettings(**parts["plain"]) if is_plain else None,
        health=HealthSettings(**parts["health"]),
        driver=DriverSettings(**parts["driver"]),
        paths=HostPaths(**parts["paths"]),
        web=WebSettings(**parts["web"]),
        log=LogSettings(**parts["log"]),
    )
    split_count = values["sharing.splitCount"]
    check_list_size(gpus, found.sharing.split_count, split_count.origin)
    return found


def check_shares(values: Values) -> None:
    """Nothing, where settings let GPUs be shared. Raises SettingsError where they share none.

    Such a node runs all the same: it tells by Events why it has no slices.
    """
    mode = values["sharing.operatingMode"]
    if mode.value == MIG_MODE:
        raise SettingsError(
            f"{mode.origin}: sharing.operatingMode: mig is not shared yet, so that a node with "
            "it has no slices; set hami-core or mps, or leave that node to HAMi's plugin"
        )


def _parts(values: Values) -> dict[str, dict[str, Any]]:
    """The attributes of each section by its name, and of Settings itself by none."""
    parts: dict[str, dict[str, Any]] = defaultdict(dict)
    for setting in values.values():
        for place in setting.field.sections:
            section, _, attribute = place.rpartition(".")
            parts[section][attribute] = setting.field.part(setting.value)
    return parts


def _stand_aside(parts: dict[str, dict[str, Any]], values: Values) -> None:
    """Who observes leaves the usual port to the node's agent.

    It has a lock, a socket and a state of its own, which end with the next boot.
    """
    paths = parts["paths"]
    paths["run"] /= "observe"
    paths["state"] = paths["run"] / "state"
    if values["web.port"].origin == DEFAULT:
        parts["web"]["port"] = 0

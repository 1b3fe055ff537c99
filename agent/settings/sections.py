"""Builds the frozen sections of settings that the parts of the agent receive."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from agent.allocate.candidates import MatchSettings
from agent.allocate.plain import PlainSettings
from agent.allocate.room import RequestRules
from agent.errors import SettingsError
from agent.hami.register import ReportSettings
from agent.health.judge import HealthSettings
from agent.ledger import EditSettings
from agent.model import MIG_MODE, SharingSettings, check_list_size
from agent.settings.fields import DEFAULT, Values
from agent.settings.table import switches_of
from agent.web.policy import HamiNames, ReaderPolicy


class HostPaths(msgspec.Struct, frozen=True):
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


class DriverSettings(msgspec.Struct, frozen=True):
    """The driver: NVML or simulated GPUs. `root`: the directory to search first for its library."""

    nvml_library: str | None
    root: Path
    simulate: str | None
    exit_without: bool


class WebSettings(msgspec.Struct, frozen=True):
    """Address and port of the probes and metrics, and who may read at the port what names pods."""

    address: str
    port: int
    readers: ReaderPolicy = ReaderPolicy.LOCAL


class MetricSettings(msgspec.Struct, frozen=True):
    """Which series are served: those that name containers, and HAMi's own."""

    containers: bool
    hami: HamiNames


class LogSettings(msgspec.Struct, frozen=True):
    """Level and format of the log."""

    level: str
    format: str


class Settings(msgspec.Struct, frozen=True):
    """All settings of one node. `fenced`: the kubelet asks before each start of a container.

    `plain`: without HAMi's scheduler, the kubelet's ids decide; None in hami mode. `observe`:
    register and write nothing, beside another plugin. `takeover`: another plugin may serve the
    same resource. `node_condition`: write the Node's condition GpuDegraded. `feedback`: limit and
    hold back containers that share GPUs.
    """

    node: str
    kubeconfig: str | None
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
    feedback: bool
    web: WebSettings
    metrics: MetricSettings
    log: LogSettings


def build(
    values: Values, *, host_name: str, gpus: int = 1, knows_requests: bool = False
) -> Settings:
    """Build the sections from `values` for a node with `gpus` GPUs.

    `knows_requests`: HAMi's device-config.yaml says how its scheduler reads requests.

    Raises SettingsError: the list of slices would be too long for the kubelet.
    """
    parts = _parts(values)
    top = parts.pop("")
    top["node"] = parts["match"]["node"] = top["node"] or host_name
    if top["observe"]:
        _stand_aside(parts, values)
    parts["health"]["switches"] = switches_of(
        str(values["health.disabledXids"].value), str(values["health.enabledXids"].value)
    )
    requests = RequestRules(**parts["match.requests"], known=knows_requests)
    is_plain = values["scheduler"].value == "none"
    settings = Settings(
        **top,
        sharing=SharingSettings(**parts["sharing"]),
        report=ReportSettings(**parts["report"]),
        match=MatchSettings(**parts["match"], requests=requests),
        edits=EditSettings(**parts["edits"]),
        plain=PlainSettings(**parts["plain"]) if is_plain else None,
        health=HealthSettings(**parts["health"]),
        driver=DriverSettings(**parts["driver"]),
        paths=HostPaths(**parts["paths"]),
        web=WebSettings(**parts["web"]),
        metrics=MetricSettings(**parts["metrics"]),
        log=LogSettings(**parts["log"]),
    )
    split_count = values["sharing.splitCount"]
    check_list_size(gpus, settings.sharing.split_count, split_count.origin)
    return settings


def check_shares(values: Values) -> None:
    """Check that the settings share GPUs. Raises SettingsError: they share none.

    The agent runs with such settings, and an Event says why the node has no slices.
    """
    mode = values["sharing.operatingMode"]
    if mode.value == MIG_MODE:
        raise SettingsError(
            f"{mode.origin}: sharing.operatingMode: the agent does not share GPUs in mode mig "
            "yet: the node has no slices; set hami-core or mps, or run HAMi's plugin there"
        )


def _parts(values: Values) -> dict[str, dict[str, Any]]:
    """The attributes of each section, by its name. Settings itself has the empty name."""
    parts: dict[str, dict[str, Any]] = defaultdict(dict)
    for setting in values.values():
        for place in setting.field.sections:
            section, _, attribute = place.rpartition(".")
            parts[section][attribute] = setting.field.part(setting.value)
    return parts


def _stand_aside(parts: dict[str, dict[str, Any]], values: Values) -> None:
    """Give an observing agent another port, lock, socket and state than the node's agent has.

    They are in the run directory, which the next boot empties.
    """
    paths = parts["paths"]
    paths["run"] /= "observe"
    paths["state"] = paths["run"] / "state"
    if values["web.port"].origin == DEFAULT:
        parts["web"]["port"] = 0

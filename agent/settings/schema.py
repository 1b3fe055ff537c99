"""All settings of a node, and the table that their declarations make.

A new setting is an attribute of one of the structs in Settings, with a Field. File, variables,
flags, help, JSON schema and SETTINGS.md follow from it. Declarations are laid out by hand (`fmt:
off`): name and type, then what help says and how else it is called, then the default.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, get_args

import msgspec

from agent.allocate.match import MatchSettings
from agent.allocate.plain import PlainSettings
from agent.cluster import Requirement, parse_selector
from agent.errors import MalformedText, SettingsError, cap
from agent.hami.annotations import ReportSettings
from agent.health.judge import HealthSettings
from agent.ledger import EditSettings
from agent.model import MIG_MODE, HamiNames, ReaderPolicy, SharingSettings
from agent.setting import (
    FALSE,
    TRUE,
    Field,
    Value,
    ValueType,
    WrongValue,
    boolean,
    choice,
    list_of,
    node_name,
    optional_text,
    path,
    text,
    text_where,
    whole,
)


class HostPaths(msgspec.Struct, frozen=True):
    """Directories and sockets of this host."""

    # fmt: off
    state: Annotated[Path, Field("paths.state", path,
        "Directory of the ledger.", "--state-dir")] = Path("/var/lib/hami-agent")
    run: Annotated[Path, Field("paths.run", path,
        "Directory of the lock and the sockets.", "--run-dir")] = Path("/run/hami-agent")
    kubelet_socket: Annotated[Path, Field("paths.kubeletSocket", path,
        "The kubelet's registration socket; the agent's own socket goes beside it.",
        "--kubelet-socket", env=("KUBELET_SOCKET",),
        )] = Path("/var/lib/kubelet/device-plugins/kubelet.sock")
    pod_resources_socket: Annotated[Path, Field("paths.podResourcesSocket", path,
        "The kubelet's PodResources socket.", "--pod-resources-socket",
        )] = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
    cgroup: Annotated[Path, Field("paths.cgroup", path,
        "The cgroup tree.")] = Path("/sys/fs/cgroup")
    # fmt: on

    @property
    def plugins(self) -> Path:
        """The kubelet's device plugin directory."""
        return self.kubelet_socket.parent


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of one node. `config show` lists them in this order, by section."""

    # fmt: off
    node: Annotated[str, Field("node.name", node_name,
        "Name of this Node in Kubernetes; if not set, the host name.", "--node-name",
        env=("NODE_NAME",))]
    kubeconfig: Annotated[Path | None, Field("node.kubeconfig", optional_text,
        "Kubeconfig file; if not set, the pod's service account.", "--kubeconfig",
        env=("KUBECONFIG",))] = None
    device_config: Annotated[str, Field("files.deviceConfig", text,
        "HAMi's device-config.yaml; empty: none. The default file is read only if it exists.",
        "--device-config", env=("CONFIG_FILE",), other_flags=("--config-file",), live=True,
        profiled=False)] = "/etc/hami/device-config.yaml"
    node_config: Annotated[str, Field("files.nodeConfig", text,
        "HAMi's config.json with settings of nodes by name, by labels, or of all others (`*`); "
        "empty: none. The default file is read only if it exists.", "--nodeconfig", live=True,
        profiled=False)] = "/etc/hami/config.json"
    scheduler: Annotated[str, Field("scheduler", choice("hami", "none"),
        "Who chooses a container's slices. hami: HAMi's scheduler. none: the kubelet; the agent "
        "then needs no API server. A change is refused while a pod holds slices.",
        "--scheduler")] = "hami"
    plain: PlainSettings | None
    """None: HAMi's scheduler chooses."""

    sharing: SharingSettings
    match: MatchSettings
    fence: Annotated[str, Field("allocation.fence", choice("none", "prestart"),
        "prestart: the kubelet asks the agent before each start of a container with a GPU, and "
        "the agent refuses it if the kubelet recorded another GPU. While no agent runs, none "
        "starts.", "--fence")] = "none"
    hook_path: Annotated[Path, Field("library.hookPath", path,
        "Host directory above vgpu/, which holds libvgpu.so and the containers' directories.",
        "--hook-path", env=("HOOK_PATH",))] = Path("/usr/local")
    library_version: Annotated[str, Field("library.version", text,
        "Mount libvgpu.so.<version> if that file exists.")] = ""
    edits: EditSettings
    observe: Annotated[bool, Field("observe", boolean,
        "Show what the agent would list and write, beside another plugin. It registers and writes "
        "nothing; its temporary state is in the run directory.", "--observe")] = False
    takeover: Annotated[bool, Field("takeover", boolean,
        "Serve beside another plugin of the resource.", "--takeover")] = False
    report: ReportSettings
    node_condition: Annotated[bool, Field("report.nodeCondition", boolean,
        "Write the Node's condition GpuDegraded.")] = False
    health: HealthSettings
    nvml_library: Annotated[Path | None, Field("driver.nvmlLibrary", optional_text,
        "Path of libnvidia-ml.so.1.", "--nvml-library")] = None
    driver_root: Annotated[Path, Field("driver.root", path,
        "Directory with the layout of the host's /, searched first for the driver's library.",
        "--driver-root-ctr-path", env=("DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"),
        other_flags=("--container-driver-root",))] = Path("/driver-root")
    simulate: Annotated[str | None, Field("driver.simulate", optional_text,
        "Simulated GPUs: PROFILE:COUNT or unix:PATH.", "--simulate")] = None
    # NVIDIA's FAIL_ON_INIT_ERROR is true or false.
    on_no_driver: Annotated[str, Field("driver.onNoDriver",
        choice("wait", "exit", like=dict.fromkeys(TRUE, "exit") | dict.fromkeys(FALSE, "wait")),
        "If no driver answers at the start: wait for it, or exit with code 69.", "--on-no-driver",
        env=("FAIL_ON_INIT_ERROR",), other_flags=("--fail-on-init-error",))] = "wait"
    paths: HostPaths
    web_address: Annotated[str, Field("web.address", text,
        "Address of the probes and metrics.", "--web-address")] = "127.0.0.1"
    web_port: Annotated[int, Field("web.port", whole(0, 65535),
        "Port of the probes and metrics; 0: any free one.", "--web-port")] = 9394
    web_readers: Annotated[ReaderPolicy, Field("web.readers", choice("local", "all"),
        "Who may read the page and /api/v1 at the port, which name pods: local or all.",
        "--web-readers")] = "local"
    metric_containers: Annotated[bool, Field("metrics.containers", boolean,
        "Name pods and containers in the metrics.")] = True
    metric_names: Annotated[HamiNames, Field("metrics.hami",
        choice("none", "current", "legacy", "both"),
        "Serve the series of HAMi's vGPUmonitor by its names since 2.9 (current), up to 2.8 "
        "(legacy), or both. Set none where the monitor of the same node is scraped, or sums "
        "double. An agent that observes serves none.")] = "current"
    feedback: Annotated[bool, Field("usage.feedback", boolean,
        "Limit and hold back containers by priority while others use the same GPUs, as HAMi's "
        "vGPUmonitor does. Set it to false where the monitor runs too: both would write.")] = True
    log_level: Annotated[str, Field("log.level", choice("debug", "info", "warning", "error"),
        "Lowest level of the log lines to write.", "--log-level")] = "info"
    log_format: Annotated[str, Field("log.format", choice("auto", "json", "text"),
        "auto: text on a terminal, else JSON.", "--log-format")] = "auto"
    # fmt: on

    @property
    def fenced(self) -> bool:
        """The kubelet asks before each start of a container."""
        return self.fence == "prestart"


def _declared(struct: type[msgspec.Struct], above: tuple[str, ...] = ()) -> Iterator[Field]:
    """The settings of a struct and of those in it, in the order of their attributes."""
    for attribute in msgspec.structs.fields(struct):
        place = (*above, attribute.name)
        for part in (attribute.type, *get_args(attribute.type)):
            if isinstance(part, type) and issubclass(part, msgspec.Struct):
                yield from _declared(part, place)

        for field in getattr(attribute.type, "__metadata__", ()):
            value = None if attribute.default is msgspec.NODEFAULT else attribute.default

            # As the files have it: text of a path or a choice, items of a set.
            default = msgspec.to_builtins(value, enc_hook=str)
            if attribute.default_factory is not msgspec.NODEFAULT or isinstance(default, list):
                default = tuple(default or ())
            yield msgspec.structs.replace(field, default=default, place=place)


_FOUND: Final = tuple(_declared(Settings))
_ORDER: Final = tuple(dict.fromkeys(field.key.partition(".")[0] for field in _FOUND))

FIELDS: Final = tuple(sorted(_FOUND, key=lambda field: _ORDER.index(field.key.partition(".")[0])))
"""All settings, in the order of `config show`."""

BY_KEY: Final = {field.key: field for field in FIELDS}
LIVE: Final = {field.key: field for field in FIELDS if field.live and field.profiled}
"""What a profile may set."""

_some_text = text_where(bool, "expected a text that is not empty", minLength=1)


def _read_labels(value: object) -> tuple[Requirement, ...]:
    try:
        return parse_selector(_some_text(value))
    except MalformedText as error:
        raise WrongValue(cap(str(error))) from error


_labels = ValueType(_read_labels, _some_text.schema)

HEAD: Final = {
    field.key: field
    for field in (
        Field("name", _some_text, "Name in messages."),
        Field("match.nodes", list_of(_some_text, least=1), "Names; * and ? are patterns."),
        Field("match.labels", _labels, "A label selector in kubectl's form."),
    )
}
"""What a profile has beside its settings: every condition of `match` must hold."""

PROFILE: Final = HEAD | LIVE

DEFAULT: Final = "default"
"""The origin of a value that no source sets."""


class Setting(msgspec.Struct, frozen=True):
    """A value and its origin (`default`, file:line:column, `env NAME` or a flag)."""

    field: Field
    value: Value
    origin: str


def read_setting(field: Field, value: object, where: str, written: str = "") -> Setting:
    """Read `value` from `where` (file:line:column, variable or flag). Raises SettingsError.

    `written`: the value as the source writes it, for a message.
    """
    try:
        return Setting(field, field.read(value), where)
    except WrongValue as error:
        found = written or cap(repr(value), 40)
        raise SettingsError(f"{where}: {field.key}: {error}, found {found}") from error


def build(
    values: Mapping[str, Setting], host_name: str, *, knows_requests: bool = False
) -> Settings:
    """Build the sections from all `values`.

    `knows_requests`: HAMi's device-config.yaml says how its scheduler reads requests.
    """
    parts: dict[str, Any] = {}
    for one in values.values():
        *structs, name = one.field.place
        here = parts
        for struct in structs:
            here = here.setdefault(struct, {})
        here[name] = one.value if one.field.convert is None else one.field.convert(one.value)

    # What several sections use is declared in one of them.
    sharing, match = parts["sharing"], parts["match"]
    parts["node"] = match["node"] = parts["node"] or host_name
    match["resource"] = sharing["resource"]
    match["requests"]["known"] = knows_requests
    parts["edits"] |= {name: sharing[name] for name in ("resource", "memory_scaling", "mode")}

    if parts["scheduler"] == "hami":
        parts["plain"] = None

    if parts["observe"]:
        # An observer must not meet the node's agent: it has a lock, sockets, a state and a port of
        # its own, in the run directory, which the next boot empties.
        run = f"{parts['paths']['run']}/observe"
        parts["paths"] |= {"run": run, "state": f"{run}/state"}
        if values["web.port"].origin == DEFAULT:
            parts["web_port"] = 0

    return msgspec.convert(parts, Settings, dec_hook=lambda kind, value: kind(value))


def check_shares(values: Mapping[str, Setting]) -> None:
    """Check that the settings share GPUs. Raises SettingsError: they share none.

    The agent runs with such settings, and an Event says why the node has no slices.
    """
    mode = values["sharing.operatingMode"]
    if mode.value == MIG_MODE:
        raise SettingsError(
            f"{mode.origin}: sharing.operatingMode: the agent does not share GPUs in mode mig "
            "yet: the node has no slices; set hami-core or mps, or run HAMi's plugin there"
        )


# The JSON schema of the agent's own file, for editors.

DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, object]:
    """The schema of the whole file."""
    profile = _mapping(PROFILE.values()) | {"type": "object"}
    profile["required"] = ["name", "match"]
    profile["properties"]["match"] |= {"type": "object", "minProperties": 1}

    schema = _mapping(FIELDS)
    schema["properties"]["profiles"] = {
        "type": ["array", "null"],
        "description": "Settings for some nodes; a later profile wins.",
        "items": profile,
    }

    return {"$schema": DRAFT, "title": "hami-agent's settings", **schema}


def _mapping(fields: Iterable[Field]) -> dict[str, Any]:
    """The schema of a mapping with these settings, nested by the dots in their keys."""
    root = _empty()
    for field in fields:
        *parents, name = field.key.split(".")
        here = root
        for parent in parents:
            here = here["properties"].setdefault(parent, _empty())

        leaf = {**field.read.schema, "description": field.text}
        default = field.read.write(field.default)
        if default is not None:
            leaf["default"] = list(default) if isinstance(default, tuple) else default

        here["properties"][name] = leaf
    return root


def _empty() -> dict[str, Any]:
    # YAML reads null for a section whose keys are all commented out.
    return {"type": ["object", "null"], "additionalProperties": False, "properties": {}}

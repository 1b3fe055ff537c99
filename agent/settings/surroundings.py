"""Reads settings from the environment and from flags."""

import re
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from agent.core.errors import SettingsError, cap
from agent.core.health.settings import malformed
from agent.settings.fields import Field, Setting, setting
from agent.settings.kinds import FALSE, shown
from agent.settings.sources import NODE_CAPACITY, Faults, Layer
from agent.settings.table import FIELDS

PREFIX: Final = "HAMI_AGENT_"
SERVICE_HOST: Final = "_SERVICE_HOST"
VARIABLES: Final = tuple(field.variables[0] for field in FIELDS)

XID_LISTS: Final = ("DP_DISABLE_HEALTHCHECKS", "DP_ENABLE_HEALTHCHECKS")
SCORE_SWITCH: Final = "ENABLE_TOPOLOGY_SCORE"
_ADDRESS: Final = re.compile("(?:tcp|udp|sctp)://")
_SINCE: Final = "HAMi's plugin ignores it since 2.4.1, and so does the agent; set"
_CDI: Final = "the agent writes no CDI specification"
_IMEX: Final = "the agent serves no IMEX channels"


class InheritedSetting(msgspec.Struct, frozen=True):
    """A variable and a flag of HAMi's and NVIDIA's plugins without effect here, and the reason.

    `harmless`: values that ask for what the agent does anyway. `strict`: any other value is
    refused instead of ignored. `switch`: the flag may stand alone and then means true.
    """

    reason: str
    variable: str = ""
    flags: tuple[str, ...] = ()
    harmless: frozenset[str] = frozenset()
    strict: bool = False
    switch: bool = False


FOREIGN: Final[tuple[InheritedSetting, ...]] = (
    InheritedSetting(
        "the agent does not share MIG instances yet; it leaves out GPUs in MIG mode, with an Event",
        "MIG_STRATEGY",
        ("--mig-strategy",),
        frozenset({"none"}),
    ),
    InheritedSetting(
        f"{_SINCE} sharing.splitCount",
        "DEVICE_SPLIT_COUNT",
        ("--device-split-count",),
    ),
    InheritedSetting(
        f"{_SINCE} sharing.memoryScaling",
        "DEVICE_MEMORY_SCALING",
        ("--device-memory-scaling",),
    ),
    InheritedSetting(
        f"{_SINCE} sharing.coreScaling",
        "DEVICE_CORES_SCALING",
        ("--device-cores-scaling",),
    ),
    InheritedSetting(
        f"{_SINCE} library.disableCoreLimit",
        "DISABLE_CORE_LIMIT",
        ("--disable-core-limit",),
        FALSE,
        switch=True,
    ),
    InheritedSetting(
        "the agent always names GPUs by UUID",
        "DEVICE_ID_STRATEGY",
        ("--device-id-strategy",),
        frozenset({"uuid"}),
    ),
    InheritedSetting(
        "the agent always finds GPUs by NVML",
        "DEVICE_DISCOVERY_STRATEGY",
        ("--device-discovery-strategy",),
        frozenset({"auto", "nvml"}),
        strict=True,
    ),
    InheritedSetting(
        NODE_CAPACITY, "REPORT_NODE_CAPACITY", ("--report-node-capacity",), FALSE, switch=True
    ),
    InheritedSetting(_CDI, "NVIDIA_CDI_HOOK_PATH", ("--nvidia-cdi-hook-path",)),
    InheritedSetting(_CDI, "NVIDIA_CTK_PATH", ("--nvidia-ctk-path",)),
    InheritedSetting(_IMEX, "IMEX_CHANNEL_IDS", ("--imex-channel-ids",)),
    InheritedSetting(_IMEX, "IMEX_REQUIRED", ("--imex-required",), FALSE, strict=True, switch=True),
    InheritedSetting("set log.level", flags=("-v", "--v")),
)
"""What an environment or a command line made for HAMi's plugin may also contain."""


def read_surroundings(
    environ: Mapping[str, str], flags: Mapping[str, str], faults: Faults
) -> Layer:
    """Read what variables and flags set; flags win. Errors go to `faults`."""
    settings = (*_read_environment(environ, faults), *_read_flags(flags, faults))
    return Layer(settings, warnings=_ignored(environ, flags))


def _read_environment(environ: Mapping[str, str], faults: Faults) -> tuple[Setting, ...]:
    """What variables set. Errors go to `faults`, with the variable's name."""
    environ = _without_links(environ)
    _refuse_unknown(environ, faults)
    for foreign, name, value in _foreign(environ, {}):
        _refuse(foreign, name, value, faults)
    return tuple(one for field in FIELDS for one in _variable(field, environ, faults))


def _read_flags(flags: Mapping[str, str], faults: Faults) -> tuple[Setting, ...]:
    """What flags set. Errors go to `faults`, with the flag."""
    for foreign, name, value in _foreign({}, flags):
        _refuse(foreign, name, value, faults)
    settings: list[Setting] = []
    for field in FIELDS:
        if field.flag and field.flag in flags:
            with faults.kept():
                settings.append(setting(field, flags[field.flag], field.flag))
    return tuple(settings)


def _ignored(environ: Mapping[str, str], flags: Mapping[str, str]) -> tuple[str, ...]:
    """A warning for each variable and flag that is set and has no effect.

    Also for each item of the lists of XIDs that is neither an XID nor `all`.
    """
    unread = tuple(
        f"env {name}: {shown(item)} is neither an XID nor all: it is ignored"
        for name in XID_LISTS
        for item in malformed(environ.get(name, ""))
    )
    score = environ.get(SCORE_SWITCH, "")
    if score and score != "true" and score not in FALSE:
        text = f"env {SCORE_SWITCH}: {shown(score)} is not true"
        unread += (f"{text}, so the scores are off, as in HAMi's plugin",)
    return unread + tuple(
        f"{name}: has no effect: {foreign.reason}"
        for foreign, name, value in _foreign(environ, flags)
        if value not in foreign.harmless and not foreign.strict
    )


def _foreign(
    environ: Mapping[str, str], flags: Mapping[str, str]
) -> Iterator[tuple[InheritedSetting, str, str]]:
    """Those of FOREIGN that are set and not empty, with their name in messages and their value."""
    for foreign in FOREIGN:
        named = [(f"env {foreign.variable}", environ.get(foreign.variable, ""))]
        named += [(flag, flags.get(flag, "")) for flag in foreign.flags[:1]]
        yield from ((foreign, name, value) for name, value in named if value)


def _refuse(foreign: InheritedSetting, name: str, value: str, faults: Faults) -> None:
    """Refuse a strict setting: the operator relies on something that the agent does not do."""
    if foreign.strict and value not in foreign.harmless:
        served = "false" if foreign.switch else " or ".join(sorted(foreign.harmless))
        with faults.kept():
            raise SettingsError(
                f"{name}: {foreign.reason}; expected {served}, found {shown(value)}"
            )


def _variable(field: Field, environ: Mapping[str, str], faults: Faults) -> Iterator[Setting]:
    """The first variable that is set. Another plugin's empty variable counts as not set."""
    own, *others = field.variables
    names = [own] if own in environ else [name for name in others if environ.get(name)]
    for name in names[:1]:
        with faults.kept():
            kept = field.kept_read if name != own else None
            read = field if kept is None else msgspec.structs.replace(field, read=kept)
            yield msgspec.structs.replace(setting(read, environ[name], f"env {name}"), field=field)


def _refuse_unknown(environ: Mapping[str, str], faults: Faults) -> None:
    """Refuse a variable with our prefix that no setting reads: it is most likely misspelled."""
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in VARIABLES:
            with faults.kept():
                raise SettingsError(
                    f"env {cap(name)}: unknown setting; a variable is {PREFIX} and the words of a "
                    f"key, such as {PREFIX}SHARING_SPLIT_COUNT; `hami-agent config show` lists all "
                    "keys; the flag --config names the settings file"
                )


def _without_links(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The variables without the service links that Kubernetes sets.

    Beside a Service named hami-agent, every container of its namespace gets
    HAMI_AGENT_SERVICE_HOST, HAMI_AGENT_PORT and more. A Service named hami-agent-web sets
    HAMI_AGENT_WEB_PORT to an address; the operator's own value is a number.
    """
    links = tuple(
        name.removesuffix(SERVICE_HOST) + part
        for name in environ
        if name.startswith(PREFIX) and name.endswith(SERVICE_HOST)
        for part in ("_SERVICE_", "_PORT")
    )
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(links) or (name in VARIABLES and not _ADDRESS.match(value))
    }

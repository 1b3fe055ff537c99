"""Settings from the environment and from flags."""

from collections.abc import Iterator, Mapping
from typing import Final

from agent.core.errors import SettingsError
from agent.settings.fields import Field, Setting, setting
from agent.settings.own_file import hint
from agent.settings.table import FIELDS

PREFIX: Final = "HAMI_AGENT_"
SERVICE_HOST: Final = "_SERVICE_HOST"
VARIABLES: Final = tuple(field.variables[0] for field in FIELDS)

_SINCE: Final = "HAMi's plugin ignores it since 2.4.1, and so does the agent; set"
_CDI: Final = "the agent writes no CDI specification"
WITHOUT_EFFECT: Final[Mapping[str, tuple[frozenset[str], str]]] = {
    "DEVICE_SPLIT_COUNT": (frozenset(), f"{_SINCE} sharing.splitCount"),
    "DEVICE_MEMORY_SCALING": (frozenset(), f"{_SINCE} sharing.memoryScaling"),
    "DEVICE_CORES_SCALING": (frozenset(), f"{_SINCE} sharing.coreScaling"),
    "DISABLE_CORE_LIMIT": (frozenset({"false"}), f"{_SINCE} library.disableCoreLimit"),
    "DEVICE_ID_STRATEGY": (frozenset({"uuid"}), "GPUs are always named by UUID"),
    "DEVICE_DISCOVERY_STRATEGY": (frozenset({"auto", "nvml"}), "GPUs are always found by NVML"),
    "NVIDIA_CDI_HOOK_PATH": (frozenset(), _CDI),
    "NVIDIA_CTK_PATH": (frozenset(), _CDI),
    "IMEX_CHANNEL_IDS": (frozenset(), "IMEX channels are not served"),
    "IMEX_REQUIRED": (frozenset({"false"}), "IMEX channels are not served"),
    "DP_DISABLE_HEALTHCHECKS": (frozenset(), "health checks cannot be switched off"),
    "DP_ENABLE_HEALTHCHECKS": (frozenset(), "all health checks are always on"),
}
"""Variables of HAMi's and NVIDIA's plugin that change nothing here.

For each the values that would change nothing there either, and why.
"""


def read_environment(environ: Mapping[str, str]) -> tuple[Setting, ...]:
    """What variables set. Raises SettingsError with the variable's name."""
    _refuse_unknown(environ)
    return tuple(one for field in FIELDS for one in _variable(field, environ))


def read_flags(flags: Mapping[str, str]) -> tuple[Setting, ...]:
    """What flags set. Raises SettingsError with the flag."""
    return tuple(
        setting(field, flags[field.flag], field.flag)
        for field in FIELDS
        if field.flag and field.flag in flags
    )


def ignored(environ: Mapping[str, str]) -> tuple[str, ...]:
    """A sentence for each variable that somebody set for HAMi's plugin and that changes nothing."""
    return tuple(
        f"env {name}: has no effect: {reason}"
        for name, (harmless, reason) in WITHOUT_EFFECT.items()
        if environ.get(name) and environ[name] not in harmless
    )


def _variable(field: Field, environ: Mapping[str, str]) -> Iterator[Setting]:
    """The first variable that is set; one of HAMi's or NVIDIA's that is empty counts as not set."""
    own, *kept = field.variables
    names = [own] if own in environ else [name for name in kept if environ.get(name)]
    for name in names[:1]:
        yield setting(field, environ[name], f"env {name}")


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    """A variable with our prefix that no setting reads is a mistake, most likely of spelling.

    Kubernetes' own are none: beside a Service named hami-agent, every container of its namespace
    gets HAMI_AGENT_SERVICE_HOST, HAMI_AGENT_PORT and more (service links).
    """
    links = tuple(
        name.removesuffix(SERVICE_HOST) + part
        for name in environ
        if name.startswith(PREFIX) and name.endswith(SERVICE_HOST)
        for part in ("_SERVICE_", "_PORT")
    )
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in VARIABLES and not name.startswith(links):
            raise SettingsError(f"env {name}: unknown setting{hint(name, VARIABLES)}")

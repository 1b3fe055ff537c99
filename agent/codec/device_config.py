"""HAMi's device-config.yaml, section `nvidia`: the values of all nodes.

Read by the rules of Go's yaml.v2: keys in this spelling, any scalar is a text, null is absent, and
one value of the wrong type refuses the file. Sections of other vendors are not looked at.
Source: HAMi v2.10, the ConfigMap `<release>-scheduler-device`, which the scheduler reads, too.
"""

import dataclasses
from collections.abc import Mapping

from agent.codec.gojson import INT32, INT64, UINT64
from agent.codec.known_keys import Found, Reader, many, nested, read_known, whole
from agent.codec.places import Place
from agent.codec.yaml_places import read_yaml

SECTION = "nvidia"


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceConfig:
    """The known keys of the section, and what was passed over."""

    found: tuple[Found, ...] = ()
    warnings: tuple[str, ...] = ()


def read_device_config(content: bytes, name: str) -> DeviceConfig:
    """The section of the file; `name` is what messages call it.

    Raises:
        SettingsError: no YAML, a key twice, or a value of the wrong type, with its place.
    """
    document = read_yaml(content, name)
    sections = {} if document is None else {key: value for key, _, value in document.pairs()}
    section = sections.get(SECTION)
    if section is None or section.null:
        return DeviceConfig((), (f"{name}: there is no section {SECTION}; nothing is taken",))
    warnings: list[str] = []
    found = read_known(section, _table(warnings), warnings)
    return DeviceConfig(found, tuple(warnings))


def _table(warnings: list[str]) -> Mapping[str, Reader]:
    models = many(_text)
    allowed = nested({"models": models, "profiles": models}, warnings)
    template = {
        "name": _text,
        "core": whole(*INT32),
        "memory": whole(*INT32),
        "count": whole(*INT32),
    }
    geometries = many(many(nested(template, warnings)))
    return {
        **dict.fromkeys(_TEXTS, _text),
        **dict.fromkeys(_WHOLES, whole(*INT32)),
        **dict.fromkeys(_FLAGS, Place.boolean),
        **dict.fromkeys(_NUMBERS, Place.number),
        "deviceSplitCount": whole(*UINT64),
        "preConfiguredDeviceMemory": whole(*INT64),
        "migProfileAllowlist": many(allowed),
        "knownMigGeometries": many(
            nested({"models": models, "allowedGeometries": geometries}, warnings)
        ),
    }


_TEXTS = (
    "resourceCountName",
    "resourceMemoryName",
    "resourceMemoryPercentageName",
    "resourceCoreName",
    "resourcePriorityName",
    "libCudaLogLevel",
    "gpuCorePolicy",
    "runtimeClassName",
)
_WHOLES = ("defaultMemory", "defaultCores", "defaultGPUNum", "memoryFactor")
_FLAGS = ("overwriteEnv", "enableNumaTopology", "disableCoreLimit")
_NUMBERS = ("deviceMemoryScaling", "deviceCoreScaling")


def _text(place: Place) -> str:
    """Any scalar as it is written: yaml.v2 gives a bare number to a field of text."""
    return place.raw() if place.node.value else ""

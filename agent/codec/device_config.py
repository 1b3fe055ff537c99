"""Reads the section `nvidia` of HAMi's device-config.yaml: the values of all nodes.

It follows Go's yaml.v2: keys in this spelling; any scalar is a text; null is absent; one value of
the wrong type refuses the file. It also refuses what yaml.v2 accepts: a repeated key, an alias, a
second document, a fraction in place of a whole number, an infinite number. It ignores the sections
of other vendors.
Source: HAMi v2.10, the ConfigMap `<release>-scheduler-device`, which the scheduler also reads.
"""

from collections.abc import Mapping

import msgspec

from agent.codec.faults import Faults
from agent.codec.gojson import INT32, INT64, UINT64
from agent.codec.goyaml import flag, number, read_go_yaml, text, whole
from agent.codec.key_readers import Reader, many, nested, read_known
from agent.codec.known_keys import IgnoredKeys, KnownKey
from agent.codec.strangers import refuse_stranger

SECTION = "nvidia"


class DeviceConfig(msgspec.Struct, frozen=True):
    """The known keys of the section, and warnings about ignored ones.

    `others`: the places of the other sections, by name.
    """

    found: tuple[KnownKey, ...] = ()
    warnings: tuple[str, ...] = ()
    others: Mapping[str, str] = msgspec.field(default_factory=dict)


def read_device_config(content: bytes, name: str, faults: Faults | None = None) -> DeviceConfig:
    """Read the section; messages call the file `name`. Wrong values go to `faults`.

    Raises:
        SettingsError: not YAML, a repeated key, or a value of the wrong type, with its place.
    """
    document = read_go_yaml(content, name)
    if document is not None:
        refuse_stranger(document)
    pairs = () if document is None or document.null else tuple(document.pairs())
    section = next((value for key, _, value in pairs if key == SECTION), None)
    others = {key: here.where for key, here, _ in pairs if key != SECTION}
    if section is None or section.null:
        nothing = f"{name}: there is no section {SECTION}; nothing is taken"
        return DeviceConfig((), (nothing,), others)
    passed = IgnoredKeys(name)
    found = read_known(section, _table(passed), passed, faults)
    return DeviceConfig(found, passed.warnings, others)


def _table(passed: IgnoredKeys) -> Mapping[str, Reader]:
    models = many(text)
    allowed = nested({"models": models, "profiles": models}, passed)
    template = {
        "name": text,
        "core": whole(*INT32),
        "memory": whole(*INT32),
        "count": whole(*INT32),
    }
    geometries = many(many(nested(template, passed)))
    return {
        **dict.fromkeys(_TEXTS, text),
        **dict.fromkeys(_WHOLES, whole(*INT32)),
        **dict.fromkeys(_FLAGS, flag),
        **dict.fromkeys(_NUMBERS, number),
        "deviceSplitCount": whole(*UINT64),
        "preConfiguredDeviceMemory": whole(*INT64),
        "migProfileAllowlist": many(allowed),
        "knownMigGeometries": many(
            nested({"models": models, "allowedGeometries": geometries}, passed)
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
_FLAGS = ("overwriteEnv", "enableNumaTopology", "disableCoreLimit", "reportNodeCapacity")
_NUMBERS = ("deviceMemoryScaling", "deviceCoreScaling")

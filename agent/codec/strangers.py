"""Recognises files that are neither the agent's nor HAMi's settings, and says what they are.

A list of unknown keys would hide that it is the wrong file.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import yaml

from agent.codec.gojson import fold
from agent.codec.places import STR, Place
from agent.core.errors import SettingsError, cap

EXPECTED: Final = (
    "expected the agent's config.yaml, or HAMi's device-config.yaml (section nvidia) or "
    "config.json (nodeconfig)"
)

_FILES: Final = ("device-config.yaml", "config.json", "config.yaml")
"""The names of settings files in a ConfigMap of HAMi or the agent."""

_ANOTHERS: Final = ("KubeSchedulerConfiguration", '"Policy"')
"""Texts that only kube-scheduler's configuration contains; HAMi stores it under the same names."""

_CHART: Final = frozenset({"devicePlugin", "nameOverride", "resourceMem", "image"})
_VENDORS: Final = frozenset(
    [
        "amd",
        "awsneuron",
        "biren",
        "cambricon",
        "enflame",
        "hygon",
        "iluvatars",
        "kunlun",
        "metax",
        "mthreads",
        "vastai",
        "vnpus",
    ]
)
"""Sections of HAMi's device-config.yaml (HAMi v2.10.0 pkg/scheduler/config/config.go, Config)."""

_NVIDIA: Final = frozenset({"flags", "resources"})
_NVIDIA_SHARING: Final = frozenset({"mps", "timeSlicing"})
"""Keys of NVIDIA's configuration (k8s-device-plugin v0.20 api/config/v1): at the top, and below
`sharing`, which is a section of the agent's own file too."""


def refuse_stranger(document: Place) -> None:
    """Raise SettingsError for another kind of file; it says which one, and what to give instead."""
    if not isinstance(document.node, yaml.MappingNode) and not document.null:
        shown = document.shown()
        raise document.fault(f"keys and values are expected here, not {shown}; {EXPECTED}")
    keys = dict(_keys(document.node))
    kind = keys.get("kind")
    if kind is not None and ("apiVersion" in keys or "apiversion" in keys):
        raise _object(document, keys, str(kind.value))
    if _CHART & keys.keys():
        raise document.fault(
            "these are values of a Helm chart; give the file in the ConfigMap that the chart "
            "renders; of a values file of the agent's chart, give the part below config"
        )
    sharing = dict(_keys(keys["sharing"])) if "sharing" in keys else {}
    if "version" in keys and (_NVIDIA & keys.keys() or _NVIDIA_SHARING & sharing.keys()):
        raise document.fault(
            "this is a configuration of NVIDIA's device plugin, which the agent does not read; "
            f"{EXPECTED}"
        )


def refuse_files_of_hami(document: Place) -> None:
    """Raise SettingsError if the file is one of HAMi's instead of the agent's own."""
    keys = dict(_keys(document.node))
    folded = set(map(fold, keys))
    if "nodeconfig" in folded:
        raise document.fault(
            "this is HAMi's config.json: name it with --nodeconfig (files.nodeConfig), as JSON"
        )
    if "nvidia" in keys:
        raise document.fault(
            "this is HAMi's device-config.yaml: name it with --device-config (files.deviceConfig)"
        )
    if "nvidia" in folded:
        raise document.fault(
            "this looks like HAMi's device-config.yaml; its section is `nvidia`, in lower case"
        )
    if _VENDORS & keys.keys():
        raise document.fault(
            "this looks like HAMi's device-config.yaml, and its section `nvidia` is missing: "
            "complete it and name it with --device-config (files.deviceConfig)"
        )


def _object(document: Place, keys: Mapping[str, yaml.Node], kind: str) -> SettingsError:
    if kind != "ConfigMap":
        fault = f"this is a Kubernetes object of kind {cap(kind, 64)}, not a settings file"
        remedy = "give the file in one of its ConfigMaps" if kind == "List" else EXPECTED
        return document.fault(f"{fault}; {remedy}")
    metadata = dict(_keys(keys["metadata"])) if "metadata" in keys else {}
    names = {key: str(metadata[key].value) for key in ("name", "namespace") if key in metadata}
    name = cap(names.get("name", "NAME"), 64)
    held = list(_held(keys["data"])) if "data" in keys else []
    if not held:
        return document.fault(
            f"this is the whole ConfigMap {name}, which contains no settings file; {EXPECTED}"
        )
    key = held[0].replace(".", "\\.")
    return document.fault(
        f"this is the whole ConfigMap {name}; give the file below its key {held[0]}: kubectl get "
        f"configmap {name} --namespace {cap(names.get('namespace', 'NAMESPACE'), 64)} --output "
        f"jsonpath='{{.data.{key}}}' | hami-agent config check -"
    )


def _held(data: yaml.Node) -> Iterator[str]:
    """The names of the settings files in the data of a ConfigMap."""
    for key, value in _keys(data):
        text = value.value if isinstance(value, yaml.ScalarNode) else ""
        if key in _FILES and not any(mark in text for mark in _ANOTHERS):
            yield key


def _keys(node: yaml.Node) -> Iterator[tuple[str, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag == STR:
                yield key.value, value

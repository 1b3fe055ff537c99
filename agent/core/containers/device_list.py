"""NVIDIA's device list strategies: how an answer names the GPUs of a container.

Source: NVIDIA k8s-device-plugin v0.19 internal/plugin/server.go, getAllocateResponse, in HAMi
v2.10's copy. The agent writes no CDI specification; it uses the names of an existing one.
"""

import re
import uuid
from collections.abc import Collection, Iterable, Sequence

from agent.core.containers.edits import EditSettings, MountEdit
from agent.core.errors import SettingsError, cap
from agent.core.inventory.gpu import GpuUuid

ENVVAR = "envvar"
VOLUME_MOUNTS = "volume-mounts"
CDI_ANNOTATIONS = "cdi-annotations"
CDI_CRI = "cdi-cri"
STRATEGIES = (ENVVAR, VOLUME_MOUNTS, CDI_ANNOTATIONS, CDI_CRI)

JIT_KIND = "runtime.nvidia.com/gpu"
CONTAINERD_PREFIX = "cdi.k8s.io/"
LIST_DIRECTORY = "/var/run/nvidia-container-devices"
_ANNOTATION = "nvidia-device-plugin_"
_ANNOTATION_NAMES = uuid.UUID("3c0ad2c6-6ef1-5d4e-8a52-6a0f6c4b9b17")
CDI_KIND = re.compile(
    r"[A-Za-z](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?/[A-Za-z](?:[A-Za-z0-9_-]*[A-Za-z0-9])?"
)
"""vendor/class."""
CDI_PREFIX = re.compile(r"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?/")
"""The prefix of an annotation key."""


def check_device_list(settings: EditSettings) -> None:
    """Check that the settings name GPUs in a supported way.

    Raises:
        SettingsError: a strategy is unknown, there is none, or a CDI name is malformed.
    """
    strategies = settings.device_list_strategies
    unknown = [name for name in strategies if name not in STRATEGIES]
    if unknown or not strategies:
        names = ", ".join(cap(name) for name in unknown) or "none"
        raise SettingsError(
            f"device list strategy {names} is not supported; use {', '.join(STRATEGIES)}"
        )
    if not CDI_KIND.fullmatch(settings.cdi_kind):
        raise SettingsError(
            f"CDI kind {cap(settings.cdi_kind)!r} is not vendor/class, such as nvidia.com/gpu"
        )
    if not CDI_PREFIX.fullmatch(settings.cdi_annotation_prefix):
        prefix = cap(settings.cdi_annotation_prefix)
        raise SettingsError(
            f"CDI annotation prefix {prefix!r} is not a DNS name with a slash, such as cdi.k8s.io/"
        )


def is_cdi_only(settings: EditSettings) -> bool:
    """Whether only CDI names the GPUs. Then the answer has no variable and no device node."""
    return not {ENVVAR, VOLUME_MOUNTS} & set(settings.device_list_strategies)


def visible_devices(uuids: Sequence[GpuUuid], settings: EditSettings) -> str | None:
    """The value of NVIDIA_VISIBLE_DEVICES; None: the answer does not set it."""
    if VOLUME_MOUNTS in settings.device_list_strategies:
        return LIST_DIRECTORY
    return ",".join(uuids) if ENVVAR in settings.device_list_strategies else None


def list_mounts(uuids: Sequence[GpuUuid], settings: EditSettings) -> Iterable[MountEdit]:
    """The GPUs as names of mounted files. A tenant cannot set these, unlike variables."""
    if VOLUME_MOUNTS in settings.device_list_strategies:
        for gpu in uuids:
            yield MountEdit(f"{LIST_DIRECTORY}/{gpu}", "/dev/null", read_only=False)


def cdi_names(uuids: Sequence[GpuUuid], settings: EditSettings) -> tuple[str, ...]:
    """The CDI names of the GPUs and of the enabled features; empty without `cdi-cri`."""
    return _names(uuids, settings) if CDI_CRI in settings.device_list_strategies else ()


def cdi_annotations(
    answer: str, uuids: Sequence[GpuUuid], settings: EditSettings
) -> tuple[tuple[str, str], ...]:
    """The CDI names as an annotation for the runtime; empty without `cdi-annotations`.

    `answer` is unique among the answers on this node. HAMi's key has a random UUID instead; here
    equal answers give equal bytes.
    """
    if CDI_ANNOTATIONS not in settings.device_list_strategies:
        return ()
    key = f"{settings.cdi_annotation_prefix}{_ANNOTATION}{uuid.uuid5(_ANNOTATION_NAMES, answer)}"
    return ((key, ",".join(_names(uuids, settings))),)


def looks_up_cdi(settings: EditSettings) -> bool:
    """Whether the runtime must find the CDI names of an answer in the specification directories.

    NVIDIA's runtime makes devices of the kind JIT_KIND itself, if containerd does not read the
    annotation first. Source: nvidia-container-toolkit internal/modifier/cdi.go.
    """
    strategies = set(settings.device_list_strategies)
    if settings.cdi_kind == JIT_KIND and settings.cdi_annotation_prefix != CONTAINERD_PREFIX:
        strategies.discard(CDI_ANNOTATIONS)
    return bool(settings.cdi_spec_dirs) and not strategies.isdisjoint((CDI_CRI, CDI_ANNOTATIONS))


def undefined(
    gpus: Sequence[GpuUuid], settings: EditSettings, defined: Collection[str] | None
) -> tuple[str, str] | None:
    """Why a runtime can start no container with one of these GPUs, and what to do; None: it may.

    `defined`: the names that the specifications define; None: not known.
    """
    if defined is None or not looks_up_cdi(settings):
        return None
    lacking = [name for name in _names(gpus, settings) if name not in defined]
    if not lacking:
        return None
    directories, kind = settings.cdi_spec_dirs, settings.cdi_kind.split("/")
    said = f"no single CDI specification in {' or '.join(directories)} defines"
    remedy = "write one, or switch gdrcopy, gds and mofed off"
    if lacking[0].startswith(f"{settings.cdi_kind}="):
        is_usual = settings.cdi_kind == "nvidia.com/gpu"
        flags = "" if is_usual else f" --vendor={kind[0]} --class={kind[1]}"
        remedy = f"write one: nvidia-ctk cdi generate --device-name-strategy=uuid{flags} --output="
        remedy += f"{directories[-1]}/{'nvidia' if is_usual else '-'.join(kind)}.yaml"
    return f"{said} {' and '.join(lacking)}", remedy


def _names(uuids: Sequence[GpuUuid], settings: EditSettings) -> tuple[str, ...]:
    vendor = settings.cdi_kind.partition("/")[0]
    modes = (("gdrcopy", settings.gdrcopy), ("gds", settings.gds), ("mofed", settings.mofed))
    return (
        *(f"{settings.cdi_kind}={gpu}" for gpu in uuids),
        *(f"{vendor}/{name}=all" for name, wanted in modes if wanted),
    )

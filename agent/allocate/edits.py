"""What a container gets: variables, mounts and devices."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from uuid import UUID, uuid5

import msgspec

from agent.cluster import CORE_POLICY_ENV, ContainerView
from agent.errors import Refusal, RefusalReason, cap
from agent.ledger import (
    CDI_ANNOTATIONS,
    CDI_CRI,
    ENVVAR,
    VOLUME_MOUNTS,
    ContainerEdits,
    ContainerKey,
    EditSettings,
    GrantedShare,
    HookFacts,
    MountEdit,
    NodeEdit,
    container_directory,
)
from agent.model import GpuUuid

# NVIDIA's device list strategies: how an answer names the GPUs of a container.
#
# Source: NVIDIA k8s-device-plugin v0.19 internal/plugin/server.go, getAllocateResponse, in HAMi
# v2.10's copy. The agent writes no CDI specification; it uses the names of an existing one.

LIST_DIRECTORY = "/var/run/nvidia-container-devices"
_ANSWERS = UUID("3c0ad2c6-6ef1-5d4e-8a52-6a0f6c4b9b17")


def looks_up_cdi(settings: EditSettings) -> bool:
    """Whether the runtime must find the CDI names of an answer in the specification directories.

    NVIDIA's runtime makes devices of its own kind itself, if containerd does not read the
    annotation first. Source: nvidia-container-toolkit internal/modifier/cdi.go.
    """
    is_own = settings.cdi_kind == "runtime.nvidia.com/gpu"
    is_made = is_own and settings.cdi_annotation_prefix != "cdi.k8s.io/"
    looked_up = {CDI_CRI} if is_made else {CDI_CRI, CDI_ANNOTATIONS}
    return bool(settings.cdi_spec_dirs) and bool(looked_up & set(settings.device_list_strategies))


def undefined(
    gpus: Sequence[GpuUuid], settings: EditSettings, defined: Collection[str] | None
) -> tuple[str, str] | None:
    """Why a runtime can start no container with one of these GPUs, and what to do; None: it may.

    `defined`: the names that the specifications define; None: not known.
    """
    names = _names(gpus, settings) if looks_up_cdi(settings) else ()
    lacking = [name for name in names if defined is not None and name not in defined]
    if not lacking:
        return None
    directories = settings.cdi_spec_dirs
    said = f"no single CDI specification in {' or '.join(directories)} defines"
    flags, file = "", "nvidia"
    if settings.cdi_kind != "nvidia.com/gpu":
        vendor, device = settings.cdi_kind.split("/")
        flags, file = f" --vendor={vendor} --class={device}", f"{vendor}-{device}"
    command = f"nvidia-ctk cdi generate --device-name-strategy=uuid{flags}"
    remedy = f"write one: {command} --output={directories[-1]}/{file}.yaml"
    if not lacking[0].startswith(f"{settings.cdi_kind}="):
        remedy = "write one, or switch gdrcopy, gds and mofed off"
    return f"{said} {' and '.join(lacking)}", remedy


def _names(uuids: Sequence[GpuUuid], settings: EditSettings) -> tuple[str, ...]:
    vendor = settings.cdi_kind.partition("/")[0]
    return (
        *(f"{settings.cdi_kind}={gpu}" for gpu in uuids),
        *(f"{vendor}/{name}=all" for name in _modes(settings)),
    )


def _modes(settings: EditSettings) -> list[str]:
    return [name for name in ("gdrcopy", "gds", "mofed") if getattr(settings, name)]


LOCK_DIRECTORY = "/tmp/vgpulock"  # noqa: S108 -- where libvgpu.so looks in the container
NOT_LOADABLE = "is empty or no library for this machine"
CACHE_NAMES = UUID("8f1f6f0e-6e0e-5d0c-9a65-0c2f8b6d3a41")
"""The namespace of cache file names. It must never change: running containers map the files."""


def container_edits(
    key: ContainerKey,
    shares: Iterable[GrantedShare],
    settings: EditSettings,
    facts: HookFacts,
    *,
    control_disabled: bool = False,
) -> ContainerEdits:
    """The whole answer for one container. `control_disabled`: it asks to run without HAMi-core.

    Equal inputs give equal bytes. The answer differs from HAMi's in three points:

    - The shares are in `cuda_order`, and the answer makes CUDA keep to it.
    - 0 MiB becomes all registered memory of the GPU, because HAMi-core takes `0m` for no limit and
      then reports a size of 0.
    - File names are derived from pod UID and container; HAMi's are random.

    Raises Refusal if pod UID or container cannot name a directory. Source: HAMi v2.10
    pkg/device-plugin/nvidiadevice/nvinternal/plugin/server.go, Allocate and getAllocateResponse.
    """
    shares = cuda_order(shares)
    gpus = gpu_edits(f"{key.pod_uid}/{key.container}", shares, settings, facts)
    hook = f"{facts.hook_path}/vgpu"
    own = f"{hook}/containers/{container_directory(key.pod_uid, key.container)}"
    policy = "disable" if settings.disable_core_limit else settings.core_policy
    is_many = len({granted.share.uuid for granted in shares}) > 1
    limits = {
        f"CUDA_DEVICE_MEMORY_LIMIT_{index}": f"{one.share.memory_mib or one.gpu.registered_mib}m"
        for index, one in enumerate(shares)
    }
    # The variables that HAMi-core reads; an empty one is left out.
    envs = {
        "CUDA_DEVICE_SM_LIMIT": str(shares[0].share.core_percent) if shares else "",
        **limits,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID" if is_many else "",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": f"{hook}/{cache_file(key.pod_uid, key.container)}",
        "CUDA_OVERSUBSCRIBE": "true" if settings.memory_scaling > 1 else "",
        "LIBCUDA_LOG_LEVEL": settings.cuda_log_level,
        CORE_POLICY_ENV: "" if policy == "default" else policy,
    }
    mounts = [
        MountEdit(mounted_library(facts), facts.library, read_only=True),
        MountEdit(hook, own, read_only=False),
        # A lock directory of its own: through a shared one, a tenant could block others.
        MountEdit(LOCK_DIRECTORY, own, read_only=False),
    ]
    if not control_disabled:
        mounts.append(MountEdit("/etc/ld.so.preload", f"{hook}/ld.so.preload", read_only=True))
    if facts.has_license:
        mounts += (
            MountEdit("/tmp/license", f"{hook}/license", read_only=True),  # noqa: S108 -- external
            MountEdit("/usr/bin/vgpuvalidator", f"{hook}/vgpuvalidator", read_only=True),
        )
    added = (pair for pair in envs.items() if pair[1])
    return msgspec.structs.replace(
        gpus, envs=tuple(sorted((*gpus.envs, *added))), mounts=(*gpus.mounts, *mounts)
    )


def gpu_edits(
    answer: str, shares: Sequence[GrantedShare], settings: EditSettings, facts: HookFacts
) -> ContainerEdits:
    """The part of the answer that makes GPUs visible, by the configured strategies.

    `answer` is unique among the answers on this node. `shares` are in CUDA order. If the settings
    name the root of an MPS control daemon, the answer has what a client of it needs. Source:
    NVIDIA k8s-device-plugin v0.19 internal/plugin/mps.go, cmd/mps-control-daemon/mps/root.go.
    """
    uuids = tuple(dict.fromkeys(granted.share.uuid for granted in shares))
    strategies, named = set(settings.device_list_strategies), _names(uuids, settings)
    envs: dict[str, str] = {}
    mounts: list[MountEdit] = []
    if settings.mode == "mps" and settings.mps_root:
        root, pipe = settings.mps_root.rstrip("/"), f"{settings.resource}/pipe"
        envs["CUDA_MPS_PIPE_DIRECTORY"] = f"/mps/{pipe}"
        mounts += (
            MountEdit(f"/mps/{pipe}", f"{root}/{pipe}", read_only=False),
            MountEdit("/dev/shm", f"{root}/shm", read_only=False),  # noqa: S108 -- CUDA's place
        )
    if VOLUME_MOUNTS in strategies:
        # The GPUs as names of mounted files. A tenant cannot set these, unlike variables.
        envs["NVIDIA_VISIBLE_DEVICES"] = LIST_DIRECTORY
        mounts += (
            MountEdit(f"{LIST_DIRECTORY}/{gpu}", "/dev/null", read_only=False) for gpu in uuids
        )
    elif ENVVAR in strategies:
        envs["NVIDIA_VISIBLE_DEVICES"] = ",".join(uuids)

    nodes: dict[str, NodeEdit] = {}
    # If CDI alone names the GPUs, the answer has no variable and no device node.
    if strategies & {ENVVAR, VOLUME_MOUNTS}:
        envs |= {f"NVIDIA_{mode.upper()}": "enabled" for mode in _modes(settings)}
        if settings.pass_device_specs:
            # The existing control nodes, then one for each GPU; on the host below the dev root.
            minors = (one.gpu.gpu.minor for one in shares)
            gpus = (f"/dev/nvidia{minor}" for minor in minors if minor is not None)
            below = settings.dev_root.rstrip("/")
            nodes = {one: NodeEdit(one, below + one, "rw") for one in (*facts.device_nodes, *gpus)}

    annotations: tuple[tuple[str, str], ...] = ()
    if CDI_ANNOTATIONS in strategies:
        # HAMi's key has a random UUID at its end; here equal answers give equal bytes.
        name = f"nvidia-device-plugin_{uuid5(_ANSWERS, answer)}"
        annotations = ((f"{settings.cdi_annotation_prefix}{name}", ",".join(named)),)
    return ContainerEdits(
        envs=tuple(sorted(envs.items())),
        mounts=tuple(mounts),
        nodes=tuple(nodes.values()),
        annotations=annotations,
        cdi_names=named if CDI_CRI in strategies else (),
    )


def check_library(facts: HookFacts, container: ContainerView | None = None) -> None:
    """Check that the container would load HAMi-core. Raises Refusal.

    If the source of a mount is missing, a container runtime creates a directory there and starts
    the container. The container would run without limits, and the directory would block the
    installation of HAMi-core. What the dynamic loader cannot load, it ignores with a warning.
    """
    loads = container is None or not container.control_disabled
    missing = [file for file in facts.missing if loads or not file.endswith("/ld.so.preload")]
    if missing:
        said = f"HAMi-core is not installed: {' and '.join(missing)} missing or not a file"
        remedy = "install it"
    elif loads and not facts.loadable:
        said, remedy = f"{facts.library} {NOT_LOADABLE}", "put HAMi-core's file there"
    elif loads and (names := misnamed(facts)):
        said = f"ld.so.preload in {facts.hook_path}/vgpu names {names}"
        remedy = f"make {mounted_library(facts)} its only line"
    else:
        return
    text = f"{said}, so no limit would be enforced; an operator has to {remedy}."
    raise Refusal(RefusalReason.NO_LIBRARY, text)


def mounted_library(facts: HookFacts) -> str:
    """The path of libvgpu.so in containers."""
    return f"{facts.hook_path}/vgpu/libvgpu.so"


def misnamed(facts: HookFacts) -> str:
    """What ld.so.preload names instead of the library; empty: it names it, or is not known.

    A name counts as the loader of the container reads it: a carriage return belongs to the name,
    and a link, `$LIB` or a relative path may lead elsewhere in the container.
    Source: glibc elf/rtld.c, dl_main (separators and comments of /etc/ld.so.preload).
    """
    if facts.preload is None:
        return ""
    text = re.sub(r"#[^\n]*", " ", facts.preload)
    names = [name for name in re.split(r"[: \t\n]", text) if name]
    if _short(mounted_library(facts)) in map(_short, names):
        return ""
    return " and ".join(cap(repr(name)) for name in names[:3]) or "no library"


def cache_file(pod_uid: str, container: str) -> str:
    """The name of the container's cache file, derived from pod UID and container name."""
    return f"{uuid5(CACHE_NAMES, f'{pod_uid}/{container}')}.cache"


def cuda_order(shares: Iterable[GrantedShare]) -> tuple[GrantedShare, ...]:
    """Sort the shares by PCI bus id: this is how GPUs are numbered wherever a number counts.

    - NVML numbers so: on the node (the index that people see and that is registered) and in the
      container (HAMi-core's region, `vdevice_index`). Where the bus ids say nothing, its index of
      the node decides.
    - HAMi-core takes the i of CUDA_DEVICE_MEMORY_LIMIT_i for CUDA's index. CUDA by itself puts the
      fastest GPU first; with CUDA_DEVICE_ORDER=PCI_BUS_ID it numbers as NVML does.

    Everywhere else a GPU goes by its UUID. A second share of one GPU has no index of its own, so it
    follows all first shares.
    """
    given, seen = tuple(shares), Counter[GpuUuid]()
    by_bus = all(pci_key(one.gpu.gpu.pci) for one in given)

    def place(one: GrantedShare) -> tuple[tuple[int, ...], int]:
        return pci_key(one.gpu.gpu.pci) if by_bus else (), one.gpu.gpu.index

    def times(one: GrantedShare) -> int:
        seen[one.share.uuid] += 1
        return seen[one.share.uuid]

    return tuple(sorted(sorted(given, key=place), key=times))


def pci_key(pci: str) -> tuple[int, ...]:
    """A PCI bus id as numbers, so that `0000:0A:00.0` and `00000000:0a:00.0` are equal."""
    return tuple(int(part, 16) for part in re.findall(r"[0-9A-Fa-f]+", pci))


def _short(path: str) -> str:
    """The path without repeated slashes and `.`."""
    return re.sub(r"/(?:\.?/)+", "/", path)

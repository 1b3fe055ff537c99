"""The values of an Allocate answer, and the settings and facts that it is made from."""

import re

import msgspec

from agent.core.errors import Refusal, RefusalReason, cap
from agent.core.inventory.gpu import NO_INDEX
from agent.core.inventory.share import Share

_POD_UID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}")
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


class MountEdit(msgspec.Struct, frozen=True):
    """A bind mount of `host_path` at `container_path`."""

    container_path: str
    host_path: str
    read_only: bool


class NodeEdit(msgspec.Struct, frozen=True):
    """A device node of the host; permissions are a subset of `rwm`."""

    container_path: str
    host_path: str
    permissions: str


class ContainerEdits(msgspec.Struct, frozen=True):
    """The whole answer for one container. Maps are sorted pairs, to give equal bytes."""

    envs: tuple[tuple[str, str], ...] = ()
    mounts: tuple[MountEdit, ...] = ()
    nodes: tuple[NodeEdit, ...] = ()
    annotations: tuple[tuple[str, str], ...] = ()
    cdi_names: tuple[str, ...] = ()


class EditSettings(msgspec.Struct, frozen=True):
    """How answers are made. Strategies are NVIDIA's names.

    - `cdi_kind`: `vendor/class` of the GPUs in this host's CDI specification.
    - `cdi_spec_dirs`: where the runtime reads specifications, the last wins; empty: do not look.
    - `core_policy`: when HAMi-core enforces compute limits, unless they are disabled.
    - `mps_root`: the host directory of the MPS control daemon of `resource`; empty: no daemon.
    """

    memory_scaling: float = 1.0
    cuda_log_level: str = "1"
    disable_core_limit: bool = False
    core_policy: str = "default"
    mode: str = "hami-core"
    device_list_strategies: tuple[str, ...] = ("envvar",)
    cdi_kind: str = "nvidia.com/gpu"
    cdi_spec_dirs: tuple[str, ...] = ("/etc/cdi", "/var/run/cdi")
    cdi_annotation_prefix: str = "cdi.k8s.io/"
    pass_device_specs: bool = False
    dev_root: str = "/"
    gdrcopy: bool = False
    gds: bool = False
    mofed: bool = False
    mps_root: str = ""
    resource: str = "nvidia.com/gpu"


class HookFacts(msgspec.Struct, frozen=True):
    """What this host has in its hook directory and in /dev. It decides the mounts.

    - `library`: the host path of libvgpu.so to mount, the versioned one if present.
    - `missing`: the files that every answer mounts and that do not exist.
    - `loadable`: False if `library` is empty or no library for this machine.
    - `preload`: the content of ld.so.preload; None if it is not known.
    - `device_nodes`: the driver's control nodes that exist.
    - `hook_path`: HAMi's HOOK_PATH, the directory above vgpu/.
    """

    library: str
    missing: tuple[str, ...] = ()
    loadable: bool = True
    preload: str | None = None
    has_license: bool = False
    device_nodes: tuple[str, ...] = ()
    hook_path: str = "/usr/local"


class GrantedShare(msgspec.Struct, frozen=True):
    """A share and the facts of its GPU that an answer needs. `index`: of the node, as NVML's."""

    share: Share
    pci: str
    registered_mib: int
    minor: int | None = None
    index: int = NO_INDEX


def container_directory(pod_uid: str, container: str) -> str:
    """The name of the container's own directory: `<pod UID>_<container>`, one path component.

    Raises:
        Refusal: the pod UID is no UID, or the container name is no DNS label. Such a name could
            lead out of the parent directory.
    """
    if not _POD_UID.fullmatch(pod_uid):
        raise Refusal(RefusalReason.HOST_DIRECTORY, f"{cap(pod_uid)!r} is not a pod UID")
    if not _LABEL.fullmatch(container):
        raise Refusal(
            RefusalReason.HOST_DIRECTORY, f"{cap(container)!r} is not a valid container name"
        )
    return f"{pod_uid}_{container}"

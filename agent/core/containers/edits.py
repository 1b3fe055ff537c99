"""What a container receives: environment, mounts, device nodes, CDI names."""

import dataclasses

from agent.core.inventory.share import Share


@dataclasses.dataclass(frozen=True, slots=True)
class MountEdit:
    """A bind mount of `host_path` at `container_path`."""

    container_path: str
    host_path: str
    read_only: bool


@dataclasses.dataclass(frozen=True, slots=True)
class NodeEdit:
    """A device node of the host; permissions are a subset of `rwm`."""

    container_path: str
    host_path: str
    permissions: str


@dataclasses.dataclass(frozen=True, slots=True)
class ContainerEdits:
    """The whole answer to one container request. Maps are sorted pairs: equal means equal bytes."""

    envs: tuple[tuple[str, str], ...] = ()
    mounts: tuple[MountEdit, ...] = ()
    nodes: tuple[NodeEdit, ...] = ()
    annotations: tuple[tuple[str, str], ...] = ()
    cdi_names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class EditSettings:
    """How answers are made. Strategies are NVIDIA's names.

    `cdi_kind` is `vendor/class` of the GPUs in the CDI specification on this host; `core_policy`
    says when HAMi-core's compute limits act, unless they are disabled. `mps_root` is the host
    directory of an MPS control daemon for `resource`, empty where there is none.
    """

    memory_scaling: float = 1.0
    cuda_log_level: str = "1"
    disable_core_limit: bool = False
    core_policy: str = "default"
    mode: str = "hami-core"
    device_list_strategies: tuple[str, ...] = ("envvar",)
    cdi_kind: str = "nvidia.com/gpu"
    cdi_annotation_prefix: str = "cdi.k8s.io/"
    pass_device_specs: bool = False
    dev_root: str = "/"
    gdrcopy: bool = False
    gds: bool = False
    mofed: bool = False
    mps_root: str = ""
    resource: str = "nvidia.com/gpu"


@dataclasses.dataclass(frozen=True, slots=True)
class HookFacts:
    """What lies in the hook directory of this host: decides mounts.

    `library` is the host path of libvgpu.so to mount (the versioned one if present), `hook_path`
    is HAMi's HOOK_PATH, the directory above vgpu/.
    `missing`: which of the files that every answer mounts are not there. `device_nodes` are the
    control nodes of the driver that exist.
    """

    library: str
    missing: tuple[str, ...] = ()
    has_license: bool = False
    device_nodes: tuple[str, ...] = ()
    hook_path: str = "/usr/local"


@dataclasses.dataclass(frozen=True, slots=True)
class GrantedShare:
    """A share and the facts of its GPU that an answer needs, in PCI bus id order."""

    share: Share
    pci: str
    registered_mib: int
    minor: int | None = None

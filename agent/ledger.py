"""The ledger: one row for each answered container; and what else is kept on disk."""

import datetime as dt
import enum
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Final

import msgspec

from agent.cluster import DEFAULT_PRIORITY, ContainerView, PodKey, PodTable, PodUid, PodView, Role
from agent.errors import Refusal, RefusalReason, cap
from agent.model import GpuUuid, Health, Held, Share, SharedGpu, SliceId, split_slice_id
from agent.setting import (
    Field,
    boolean,
    choice,
    list_of,
    optional_path,
    path,
    text_like,
    text_or_whole,
    texts,
)

# The values of an Allocate answer, and the settings and facts that it is made from.

DIRECTORY_NAME: Final = re.compile(
    r"(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32})"  # pod UID; a static pod's
    r"_[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
)
"""Names of container directories: <pod UID>_<container>."""


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


ENVVAR = "envvar"
VOLUME_MOUNTS = "volume-mounts"
CDI_ANNOTATIONS = "cdi-annotations"
CDI_CRI = "cdi-cri"
STRATEGIES = (ENVVAR, VOLUME_MOUNTS, CDI_ANNOTATIONS, CDI_CRI)

CDI_KIND = re.compile(
    r"[A-Za-z](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?/[A-Za-z](?:[A-Za-z0-9_-]*[A-Za-z0-9])?"
)
"""vendor/class."""
CDI_PREFIX = re.compile(r"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?/")
"""The prefix of an annotation key."""


_live = functools.partial(Field, live=True)


def _driver_part(key: str, words: str, variable: str, flag: str) -> Field:
    text = f"Ask the runtime for {words} in all containers with a GPU."
    return _live(key, boolean, text, env=(variable,), flag=flag)


class EditSettings(msgspec.Struct, frozen=True):
    """How answers are made. `resource`, `memory_scaling`, `mode`: those of SharingSettings."""

    resource: str = "nvidia.com/gpu"
    memory_scaling: float = 1.0
    mode: str = "hami-core"
    # fmt: off
    device_list_strategies: Annotated[tuple[str, ...], _live("allocation.deviceListStrategy",
        list_of(choice(*STRATEGIES), least=1),
        "How the runtime learns a container's GPUs: envvar, volume-mounts, cdi-annotations, "
        "cdi-cri.", env=("DEVICE_LIST_STRATEGY",), flag="--device-list-strategy")] = (ENVVAR,)
    cdi_kind: Annotated[str, _live("allocation.cdiKind", text_like(CDI_KIND, "nvidia.com/gpu"),
        "vendor/class of the GPUs in this host's CDI specification, which must name them by UUID.",
        flag="--cdi-kind")] = "nvidia.com/gpu"
    cdi_spec_dirs: Annotated[tuple[str, ...], _live("allocation.cdiSpecDirs", texts,
        "Directories in which the container runtime looks for CDI specifications; the last wins. "
        "With a cdi strategy, a GPU that none of them defines is not offered. Empty: do not look.",
        flag="--cdi-spec-dirs")] = ("/etc/cdi", "/var/run/cdi")
    cdi_annotation_prefix: Annotated[str, _live("allocation.cdiAnnotationPrefix",
        text_like(CDI_PREFIX, "cdi.k8s.io/"),
        "Prefix of the annotation of strategy cdi-annotations.", env=("CDI_ANNOTATION_PREFIX",),
        flag="--cdi-annotation-prefix")] = "cdi.k8s.io/"
    pass_device_specs: Annotated[bool, _live("allocation.passDeviceSpecs", boolean,
        "Also pass the GPUs' device files to the runtime.", env=("PASS_DEVICE_SPECS",),
        flag="--pass-device-specs")] = False
    dev_root: Annotated[str, _live("allocation.devRoot", path,
        "Host directory above dev/, which holds the device files.",
        env=("NVIDIA_DEV_ROOT", "NVIDIA_DRIVER_ROOT"), flag="--dev-root",
        other_flags=("--nvidia-dev-root", "--nvidia-driver-root"))] = "/"
    gdrcopy: Annotated[
        bool, _driver_part("allocation.gdrcopy", "GDRCopy", "GDRCOPY_ENABLED", "--gdrcopy-enabled")
    ] = False
    gds: Annotated[
        bool, _driver_part("allocation.gds", "GPUDirect Storage", "GDS_ENABLED", "--gds-enabled")
    ] = False
    mofed: Annotated[
        bool, _driver_part("allocation.mofed", "MOFED devices", "MOFED_ENABLED", "--mofed-enabled")
    ] = False
    mps_root: Annotated[str | None, _live("allocation.mpsRoot", optional_path,
        "In mode mps: host directory of the MPS control daemon, which you run. Containers then "
        "get CUDA_MPS_PIPE_DIRECTORY, <mpsRoot>/<resource name>/pipe and <mpsRoot>/shm.",
        env=("MPS_ROOT",), flag="--mps-root")] = None
    cuda_log_level: Annotated[str, _live("library.cudaLogLevel", text_or_whole,
        "LIBCUDA_LOG_LEVEL of the containers; empty leaves it unset.")] = "1"
    disable_core_limit: Annotated[bool, _live("library.disableCoreLimit", boolean,
        "Switch the compute limit off in all containers.")] = False
    # HAMi-core also accepts these spellings; the empty one is its default.
    core_policy: Annotated[str, _live("library.corePolicy", choice("default", "force", "disable",
        like={"": "default", "FORCE": "force", "DISABLE": "disable"}),
        "GPU_CORE_UTILIZATION_POLICY of the containers: when compute limits apply; default leaves "
        "it unset.")] = "default"
    # fmt: on


class HookFacts(msgspec.Struct, frozen=True):
    """What this host has in its hook directory and in /dev. It decides the mounts.

    - `library`: the host path of libvgpu.so to mount. `loadable`: False if it is empty or no
      library for this machine. `missing`: the files that every answer mounts and that do not exist.
    - `preload`: the content of ld.so.preload; None if it is not known.
    - `device_nodes`: the driver's control nodes that exist.
    - `hook_path`: HAMi's HOOK_PATH, the directory above vgpu/; empty for the root.
    """

    library: str
    missing: tuple[str, ...] = ()
    loadable: bool = True
    preload: str | None = None
    has_license: bool = False
    device_nodes: tuple[str, ...] = ()
    hook_path: str = "/usr/local"


class GrantedShare(msgspec.Struct, frozen=True):
    """A share and its GPU, of which an answer needs some facts."""

    share: Share
    gpu: SharedGpu


def container_directory(pod_uid: str, container: str) -> str:
    """The name of the container's own directory. Raises Refusal if it could lead elsewhere."""
    name = f"{pod_uid}_{container}"
    if not DIRECTORY_NAME.fullmatch(name):
        text = f"{cap(name)!r} is not the UID of a pod and the name of a container"
        raise Refusal(RefusalReason.HOST_DIRECTORY, text)
    return name


class Holding(msgspec.Struct, frozen=True):
    """One pod that the kubelet knows, with the slice ids of its containers by resource name.

    PodResources has no UID and no ordinary init containers.
    """

    namespace: str
    pod: str
    containers: Mapping[str, Mapping[str, frozenset[SliceId]]] = msgspec.field(default_factory=dict)

    def ids_of(self, container: str, resource: str) -> frozenset[SliceId]:
        """The ids of `resource` that the kubelet holds for the container; may be empty."""
        return self.containers.get(container, {}).get(resource, frozenset())


class KubeletEpoch(msgspec.Struct, frozen=True):
    """A kubelet instance: its socket's inode and ctime (an inode alone is often reused)."""

    inode: int = 0
    ctime_ns: int = 0

    @property
    def since(self) -> dt.datetime:
        """When its socket appeared, in UTC."""
        return dt.datetime.fromtimestamp(self.ctime_ns / 1e9, dt.UTC)


def is_over(container: ContainerView, epoch: KubeletEpoch) -> bool:
    """Whether the container ended for good under this kubelet, which asks for earlier ones anew."""
    return container.ended_at is not None and container.ended_at > epoch.since


# The ledger: one row for each container that holds slices. Methods return a new ledger.

PLAIN = "plain"
"""The container name in the key of a row whose pod is not known."""


class ContainerKey(msgspec.Struct, frozen=True, order=True):
    """The identity of a row."""

    pod_uid: PodUid
    container: str


class Holder(msgspec.Struct, frozen=True, order=True):
    """A container as PodResources names it, without a UID."""

    namespace: str
    pod: str
    container: str


class Decider(enum.StrEnum):
    """Who decides what a container gets: HAMi's scheduler, or the kubelet by its slice ids."""

    SCHEDULER = "scheduler"
    KUBELET = "kubelet"


class Row(msgspec.Struct, frozen=True):
    """The allocation of one container.

    - `key`: names its directory. In plain mode the UID is random, because the pod is not known.
    - `holder`: in plain mode None until PodResources names one.
    - `shares`: in the order of the answer; empty: without limits.
    - `slice_ids`: the kubelet's ids of the last answer. In hami mode only their number counts.
    - `epoch`: the last kubelet instance that was answered or has booked the answer; `confirmed`:
      it has booked the answer.
    - `group`: the container's position in `…-allocated`.
    - `adopted`: another plugin answered; the row only keeps the ids in use.
    - `offered`: the kubelet was offered free ids of the right GPUs before the last answer.
    - `lock`: the exact text of the node lock at the first answer, the only one that is removed for
      the row; empty: there was none.
    - `live_limits`: what an agent of an earlier version let an operator set in place of `shares`:
      the container has them. Empty: never. No agent sets them now.
    """

    key: ContainerKey
    holder: Holder | None
    shares: tuple[Share, ...]
    slice_ids: tuple[SliceId, ...]
    edits: ContainerEdits
    answered_at: dt.datetime
    epoch: KubeletEpoch
    decided_by: Decider = Decider.SCHEDULER
    role: Role = Role.APP
    group: int = 0
    confirmed: bool = False
    adopted: bool = False
    offered: bool = False
    resource: str = ""
    lock: str = ""
    priority: int = DEFAULT_PRIORITY
    live_limits: tuple[Share, ...] = ()

    @property
    def limits(self) -> tuple[Share, ...]:
        """The shares in force, which count: the live limits, or else what was answered."""
        return self.live_limits or self.shares

    @property
    def namespace(self) -> str:
        """The namespace of the holder's pod; empty: not known."""
        return self.holder.namespace if self.holder else ""

    @property
    def pod(self) -> str:
        """The name of the holder's pod; empty: not known."""
        return self.holder.pod if self.holder else ""

    @property
    def pod_key(self) -> PodKey:
        """Namespace and name of the holder's pod; empty: not known."""
        return self.namespace, self.pod

    @property
    def pod_uid(self) -> PodUid:
        """The UID of the holder's pod; empty in plain mode."""
        return self.key.pod_uid if self.decided_by is Decider.SCHEDULER else PodUid("")

    @property
    def directory(self) -> str:
        """The name of its directory; empty: without limits, or the name could lead elsewhere."""
        name = f"{self.key.pod_uid}_{self.key.container}"
        has_one = self.decided_by is Decider.SCHEDULER or self.shares
        return name if has_one and DIRECTORY_NAME.fullmatch(name) else ""

    @property
    def gpus(self) -> tuple[GpuUuid, ...]:
        """The GPUs that the container was given."""
        if self.decided_by is Decider.SCHEDULER:
            return tuple(share.uuid for share in self.shares)
        return tuple(pair[0] for text in self.slice_ids if (pair := split_slice_id(text)))

    def is_live(self, table: PodTable) -> bool:
        """Whether its pod is there and has not ended, as far as the table knows.

        A row of the kubelet's has no pod in the table.
        """
        if self.decided_by is Decider.KUBELET or not table.synced:
            return True
        pod = table.pods.get(self.key.pod_uid)
        return pod is not None and not pod.terminal

    def counts(self, pod: PodView | None) -> bool:
        """Whether it takes room while it is live. `pod` is None if it is not in the pod table."""
        return self.role is not Role.INIT or pod is None or not pod.is_past_init

    def takes_room(self, table: PodTable) -> bool:
        """Whether its container has not ended for good, so that its share counts."""
        return self.is_live(table) and self.counts(table.pods.get(self.key.pod_uid))

    def is_booked_by(self, epoch: KubeletEpoch) -> bool:
        """Whether this kubelet instance has booked the answer."""
        return self.confirmed and self.epoch == epoch

    @property
    def has_gpu_mismatch(self) -> bool:
        """Whether the kubelet's ids are of other GPUs than the shares. The shares are right."""
        pairs = (split_slice_id(text) for text in self.slice_ids)
        held = sorted(pair[0] if pair else GpuUuid("") for pair in pairs)
        return held != sorted(share.uuid for share in self.shares)

    @property
    def mismatched(self) -> bool:
        """Whether the kubelet booked other GPUs although the right ones were offered."""
        return self.offered and self.has_gpu_mismatch


def mismatch(row: Row) -> Refusal:
    """The sentence about a mismatched row for the pod's owner, also as the fence's refusal."""
    booked = {pair[0] if (pair := split_slice_id(text)) else text for text in row.slice_ids}
    given = ", ".join(share.uuid for share in row.shares)
    text = (
        f"Container {row.key.container} was given GPU {given}, but the kubelet booked slices of "
        f"{', '.join(sorted(booked))} for it; create the pod again."
    )
    return Refusal(RefusalReason.OTHER_GPU_BOOKED, text)


class Ledger(msgspec.Struct, frozen=True, dict=True):
    """Rows in order of answering, one for each container."""

    rows: tuple[Row, ...] = ()

    def find(self, key: ContainerKey) -> Row | None:
        """The row of one container, or None."""
        return next((row for row in self.rows_of(key.pod_uid) if row.key == key), None)

    def rows_of(self, uid: PodUid) -> tuple[Row, ...]:
        """The rows of one pod."""
        return self._by_pod.get(uid, ())

    @functools.cached_property
    def _by_pod(self) -> Mapping[PodUid, tuple[Row, ...]]:
        # An Allocate asks for the rows of each pod of the node.
        found: defaultdict[PodUid, tuple[Row, ...]] = defaultdict(tuple)
        for row in self.rows:
            found[row.key.pod_uid] += (row,)
        return found

    def rows_on(self, uuid: GpuUuid) -> Collection[Row]:
        """The rows with a limit on that GPU, in order."""
        return {
            row.key: row
            for row in self.rows
            for share in row.live_limits or row.shares
            if share.uuid == uuid
        }.values()

    def answered_under(self, lock: str) -> set[PodUid]:
        """The pods of the rows that note this lock."""
        return {row.key.pod_uid for row in self.rows if row.lock == lock != ""}

    def booked_by(self, epoch: KubeletEpoch) -> set[ContainerKey]:
        """The containers that hold slices by that kubelet instance as far as the rows say.

        Init containers count from their answer: PodResources does not list ordinary ones.
        """
        return {
            row.key
            for row in self.rows
            if row.epoch == epoch and (row.confirmed or row.role is Role.INIT)
        }

    def rows_by(self, decider: Decider) -> tuple[Row, ...]:
        """The rows of one decider. In hami mode, rows of the kubelet keep strangers' ids in use."""
        return tuple([row for row in self.rows if row.decided_by is decider])

    def living(self, table: PodTable) -> "Ledger":
        """Only with the rows whose pod has not ended: what people are told of."""
        return Ledger(tuple(row for row in self.rows if row.is_live(table)))

    def put(self, *rows: Row) -> "Ledger":
        """With each row in place of the row of the same container, or at the end."""
        merged = {old.key: old for old in self.rows} | {row.key: row for row in rows}
        return Ledger(tuple(merged.values()))

    def drop(self, keys: Iterable[ContainerKey]) -> "Ledger":
        """Without the rows of these containers."""
        gone = frozenset(keys)
        return Ledger(tuple(row for row in self.rows if row.key not in gone))

    @functools.cached_property
    def held_ids(self) -> Held:
        """The slice ids in use by GPU. A text that is not a slice id is left out."""
        held: dict[GpuUuid, set[SliceId]] = {}
        for slice_id in (slice_id for row in self.rows for slice_id in row.slice_ids):
            pair = split_slice_id(slice_id)
            if pair is not None:
                held.setdefault(pair[0], set()).add(slice_id)
        return {uuid: tuple(sorted(ids)) for uuid, ids in held.items()}


UNCONFIRMED_AFTER: Final = dt.timedelta(seconds=60)
"""After this time a row that the kubelet has not confirmed counts as unconfirmed."""


def gaps(ledger: Ledger, now: dt.datetime) -> tuple[int, int]:
    """How many rows have drift or cannot be compared; how many should be confirmed by now.

    Drift: the right ids could not be offered, as when the kubelet uses an init container's again.
    """
    late = Counter(
        row.role is Role.INIT
        for row in ledger.rows
        # A time in the future was taken before the clock was set back: its age is not known.
        if not (row.confirmed or dt.timedelta() <= now - row.answered_at < UNCONFIRMED_AFTER)
    )
    drifted = sum(
        row.confirmed and row.has_gpu_mismatch and not row.offered
        for row in ledger.rows_by(Decider.SCHEDULER)
    )
    return drifted + late[True], late[False]


# What happened on this node, for people: changes and refusals.


class JournalEntry(msgspec.Struct, frozen=True):
    """One change or refusal. `reason`: the reason of the Event, or the id of the refusal."""

    at: Annotated[dt.datetime, msgspec.Meta(tz=True)]
    reason: str
    text: str
    warning: bool = True
    namespace: str = ""
    pod: str = ""
    container: str = ""


class SourceFile(msgspec.Struct, frozen=True):
    """A file's bytes, and its name in messages."""

    name: str
    content: bytes


class LastGood(msgspec.Struct, frozen=True):
    """The files as they were last accepted; None: there was none. `labels`: of the Node `node`."""

    written_by: str
    node: str
    labels: Mapping[str, str] | None = None
    device_config: SourceFile | None = None
    own: SourceFile | None = None
    node_config: SourceFile | None = None


# The stored state: ledger and health memory, with the host and boot that they belong to.


class State(msgspec.Struct, frozen=True):
    """One generation, of that host; `boot_id`: the boot in which its health memory was written."""

    generation: int = 0
    boot_id: str = ""
    machine_id: str = ""
    ledger: Ledger = msgspec.field(default_factory=Ledger)
    health: Mapping[GpuUuid, Health] = msgspec.field(default_factory=dict)

"""The GPUs of a node and their slices: what was found and reported, its health, who holds what."""

import datetime as dt
import enum
import functools
import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Final, Literal, NewType

import msgspec

from agent.errors import cap
from agent.setting import Field, boolean, choice, indexes, number, resource_name, texts, whole

# The health of one GPU: its condition, the cause, and what a person should do.


class Condition(enum.StrEnum):
    """The five conditions of a GPU.

    - `WATCH`: served. Something happened; the GPU is ok again after the quiet period.
    - `UNMONITORED`: it does not answer, or its events are not received. The cause says which.
    """

    OK = "ok"
    WATCH = "watch"
    BAD = "bad"
    LOST = "lost"
    UNMONITORED = "unmonitored"


class Cause(enum.StrEnum):
    """Why a GPU has its condition.

    - `MEMORY`: rows or pages wait for a reset, or no spare ones are left.
    - `ADVICE`: the driver reports a recovery action, such as a reset.
    - `REFUSED`: the driver refuses calls for the GPU until the GPU is reset.
    - `FABRIC`: the GPU has not joined the fabric of its NVSwitches.
    - `DRIVER`: the GPU does not answer. It is served until health.driverHang has passed.
    - `MONITOR`: it answers, but the agent does not receive its events. It is served.
    - `RELEASED`: an operator released it for work on it. It is neither served nor probed.
    - `OFF`: the operator switched the health checks off.
    """

    NONE = "none"
    XID = "xid"
    ECC = "ecc"
    MEMORY = "memory"
    ADVICE = "advice"
    REFUSED = "refused"
    FABRIC = "fabric"
    PROBE = "probe"
    LOST = "lost"
    DRIVER = "driver"
    MONITOR = "monitor"
    RELEASED = "released"
    OFF = "off"


class Action(enum.StrEnum):
    """What a person should do about a GPU: wait, look at the kernel's log, and so on."""

    NONE = "none"
    WAIT = "wait"
    INSPECT = "inspect"
    RESET = "reset"
    REBOOT = "reboot"
    REPLACE = "replace"


class Health(msgspec.Struct, frozen=True):
    """The condition of one GPU, since when, and why.

    - `since`: when the condition began, with this cause.
    - `quiet_since`: when the cool-down last began again (a bad report, or the end of the need for a
      reset). None: it began with the condition.
    - `cause` and `action`: text, so that an older agent can read the checkpoint of a newer one.
    - `text`: a sentence for people. It ends with the id `runbook` in brackets.
    - `needs_reset`: cleared by a boot, by lost-then-present, by refused-then-answered, or when the
      driver reports that no action is needed. With `needs_reboot`, only a boot clears it.
    - `passed_probes`: since the last bad report.
    - `before`: of a released GPU that was bad or lost: its health then.
    - `bouts`: consecutive ones, each soon after the end of the one before (`recovered_at`).
    """

    condition: Condition
    since: dt.datetime
    cause: str = Cause.NONE
    text: str = ""
    xid: int | None = None
    needs_reset: bool = False
    serving: bool = True
    passed_probes: int = 0
    action: str = Action.NONE
    runbook: str = ""
    needs_reboot: bool = False
    bouts: int = 0
    recovered_at: dt.datetime | None = None
    quiet_since: dt.datetime | None = None
    before: "Health | None" = None

    @property
    def ill(self) -> bool:
        """True while the GPU is bad or lost."""
        return self.condition in {Condition.BAD, Condition.LOST}

    @property
    def silent(self) -> bool:
        """True while the GPU does not answer."""
        return self.condition is Condition.UNMONITORED and self.cause == Cause.DRIVER


# A GPU as the driver describes it, without its health and without how it is shared.

GpuUuid = NewType("GpuUuid", str)
"""`GPU-…` as NVML prints it: the identity of a GPU. The index is for display and ordering."""
NO_INDEX: Final = -1  # of a GPU that the driver never described


class PciPath(enum.IntEnum):
    """The PCI path between two GPUs; the value is HAMi's points for the pair."""

    CROSS_CPU = 10
    SAME_CPU = 20
    HOST_BRIDGE = 30
    MULTI_SWITCH = 40
    SINGLE_SWITCH = 50
    SAME_BOARD = 60


class Link(msgspec.Struct, frozen=True):
    """The connection to the GPU `peer`; `path` None: not known."""

    peer: GpuUuid
    path: PciPath | None = None
    nvlinks: int = 0


def gpu_title(uuid: str, index: int | None) -> str:
    """A GPU in a sentence: the index and the UUID, as far as they are known. Safe to show."""
    name = cap(uuid, 64)
    return f"GPU {name}" if index in {None, NO_INDEX} else f"GPU {index} ({name})"


class Gpu(msgspec.Struct, frozen=True):
    """One physical GPU. `minor` is the N of /dev/nvidiaN; `memory_mib`: None: not reported."""

    uuid: GpuUuid
    index: int
    name: str
    memory_mib: int | None
    pci: str
    numa: int | None = None
    minor: int | None = None
    mig_enabled: bool = False
    links: tuple[Link, ...] = ()

    @property
    def label(self) -> str:
        """The index, or the UUID if the index is not known."""
        return str(self.uuid) if self.index == NO_INDEX else str(self.index)

    @property
    def title(self) -> str:
        """The GPU in a sentence."""
        return gpu_title(self.uuid, self.index)


class Trouble(enum.StrEnum):
    """Why the driver does not describe a GPU that it lists.

    `RESET`: it refuses calls for the GPU until it is reset. `UNLISTED`: the kernel's driver has the
    GPU, and the library does not list it. It is named by its address.
    """

    LOST = "lost"
    SILENT = "silent"
    RESET = "reset"
    DENIED = "denied"
    RELEASED = "released"
    UNLISTED = "unlisted"
    UNSUPPORTED = "unsupported"
    FAILED = "failed"


_OPEN: Final = "let the agent open its device file (/dev/nvidiaN), through the runtime or as root"
_REMEDIES: Final = {
    # Nobody can reset what the driver does not reach: nvidia-smi says "Reboot the system".
    Trouble.LOST: "if this lasts, reboot the node",
    Trouble.FAILED: "if this lasts, reset it or reboot the node",
    Trouble.RESET: "reset it or reboot the node",
    Trouble.SILENT: "without the persistence daemon it initialises for seconds, then it is shared",
    Trouble.RELEASED: "take it back with hami-agent recheck",
    Trouble.DENIED: _OPEN,
    Trouble.UNLISTED: f"{_OPEN}; restart the agent's pod if the GPU is new",
    Trouble.UNSUPPORTED: "use a driver that supports it, or leave it out (sharing.filterUUIDs)",
}


class GpuFault(msgspec.Struct, frozen=True):
    """A GPU that the driver lists but does not describe: its UUID, or `index N`.

    The inventory leaves it out.
    """

    gpu: str
    text: str
    trouble: Trouble = Trouble.FAILED
    index: int = NO_INDEX

    @property
    def lost(self) -> bool:
        """True when the GPU has fallen off the bus."""
        return self.trouble is Trouble.LOST

    @property
    def remedy(self) -> str:
        """What a person can do, as the end of a sentence that says what is wrong."""
        return _REMEDIES[self.trouble]

    @property
    def title(self) -> str:
        """The GPU in a sentence."""
        return gpu_title(self.gpu, NO_INDEX if self.gpu.startswith(NAMELESS) else self.index)

    @property
    def sentence(self) -> str:
        """Which GPU, and what is wrong with it."""
        return f"{self.title}: {self.text}"


NAMELESS: Final = "index "  # the prefix of GpuFault.gpu if only the index is known


def attributed(faults: Iterable[GpuFault], missing: Collection[GpuUuid]) -> tuple[GpuFault, ...]:
    """The faults. If exactly one has no UUID, it is that of the one `missing` GPU.

    `missing` are known GPUs that no scan describes now. Of several nobody knows which is which.
    """
    faults = tuple(faults)
    nameless = [fault for fault in faults if fault.gpu.startswith(NAMELESS)]
    if len(nameless) != 1 or len(missing) != 1:
        return faults

    (fault,), (uuid,) = nameless, missing
    index = int(fault.gpu.removeprefix(NAMELESS))
    known = msgspec.structs.replace(fault, gpu=uuid, index=index)
    return tuple(known if each is fault else each for each in faults)


class Scan(msgspec.Struct, frozen=True):
    """All GPUs of the node, sorted by index."""

    driver_version: str
    gpus: tuple[Gpu, ...]
    faults: tuple[GpuFault, ...] = ()


class GpuSample(msgspec.Struct, frozen=True):
    """How much a GPU is used at one moment.

    - `gpu_percent`, `memory_percent`: the share of the last sample period in which a kernel ran, or
      the memory was read or written.
    - `used_mib`: by processes; drivers before 510 count what they reserve (`reserved_mib`) too.
    - `ecc_corrected`, `ecc_uncorrected`: in the life of the GPU, until somebody clears them.
    """

    uuid: GpuUuid
    gpu_percent: int | None = None
    memory_percent: int | None = None
    used_mib: int | None = None
    reserved_mib: int = 0
    celsius: int | None = None
    milliwatts: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None


class Share(msgspec.Struct, frozen=True):
    """`memory_mib` MiB and `core_percent` percent of the GPU `uuid`. 0 MiB means all memory."""

    uuid: GpuUuid
    memory_mib: int
    core_percent: int


# Slices: the ids into which a GPU is split, and the memory and compute to register for it.

SliceId = NewType("SliceId", str)
"""`<GPU UUID>-<n>`, n from 0, as in HAMi: a node that switches to the agent keeps its ids."""

Held = Mapping[GpuUuid, tuple[SliceId, ...]]
"""Slices in use, by GPU."""

MIB = 1024 * 1024
MIG_MODE = "mig"
LIST_BYTES = 7 * MIB // 2  # of a list at most. The kubelet ends the stream at 4 MiB
INT32_MAX = 2**31 - 1  # the largest number of MiB or percent in the register annotation
MAX_NUMBER = 9_999_999_999  # the largest number of a slice

_SLICE_ID = re.compile(r"(.+)-(0|[1-9][0-9]{0,9})", re.DOTALL)

MODES = msgspec.structs.replace(
    choice("hami-core", "mps", MIG_MODE, like={"remote": "hami-core"}),
    schema=choice("hami-core", "mps").schema,
)
"""HAMi's operating modes. The agent does not share GPUs in `mig` yet. HAMi's config.json may set it
for nodes that run HAMi's plugin; `remote` is hami-core for a GPU of this node."""


class SharingSettings(msgspec.Struct, frozen=True):
    """How GPUs are shared."""

    # fmt: off
    resource: Annotated[str, Field("sharing.resourceName", resource_name,
        "Resource name that pods request and the kubelet advertises. The agent refuses a change "
        "while a pod holds slices.", flag="--resource-name", live=True,
        profiled=False)] = "nvidia.com/gpu"
    # 3,000 slices of 16 GPUs are a list that the kubelet takes.
    split_count: Annotated[int, Field("sharing.splitCount", whole(1, 3000), "Slices per GPU.",
        flag="--split-count", live=True)] = 10
    memory_scaling: Annotated[float, Field("sharing.memoryScaling", number(0.01, 10),
        "Factor on the registered memory. Above 1 the memory is oversubscribed.",
        flag="--memory-scaling", live=True)] = 1.0
    core_scaling: Annotated[float, Field("sharing.coreScaling", number(0.01, 10),
        "Factor on the registered compute.", flag="--core-scaling", live=True)] = 1.0
    preconfigured_mib: Annotated[int, Field("sharing.preconfiguredMemoryMiB", whole(0, 2**31 - 1),
        "MiB to register for a GPU whose memory the driver does not report; 0 leaves it out.",
        live=True)] = 0
    filter_uuids: Annotated[frozenset[str], Field("sharing.filterUUIDs", texts,
        "GPUs not to share, by UUID.", live=True)] = frozenset()
    filter_indexes: Annotated[frozenset[int], Field("sharing.filterIndexes", indexes,
        "GPUs not to share, by index.", live=True,
        convert=lambda found: frozenset(map(int, found)))] = frozenset()
    mode: Annotated[str, Field("sharing.operatingMode", MODES,
        "HAMi's operating mode of this node's GPUs, for the register annotation. Pods can ask for "
        "it (nvidia.com/vgpu-mode). HAMi-core enforces the limits in hami-core and in mps. For "
        "mps see allocation.mpsRoot.", flag="--operating-mode", live=True)] = "hami-core"
    numa_topology: Annotated[bool, Field("sharing.numaTopology", boolean,
        "Tell the kubelet's topology manager the NUMA node of each GPU. Its policy "
        "single-numa-node then refuses pods whose GPUs and CPUs are on several NUMA nodes.",
        live=True)] = False
    # fmt: on


class SliceGroup(msgspec.Struct, frozen=True):
    """The listed slices of one GPU, in the order of their numbers. All have the same health."""

    uuid: GpuUuid
    ids: tuple[SliceId, ...]
    healthy: bool
    numa: int | None


class SliceList(msgspec.Struct, frozen=True):
    """The content of one ListAndWatch message, in inventory order. `generation` identifies it."""

    generation: int = 0
    groups: tuple[SliceGroup, ...] = ()


def slice_id(uuid: GpuUuid, number: int) -> SliceId:
    """The id of slice `number` of the GPU."""
    return SliceId(f"{uuid}-{number}")


def split_slice_id(text: str) -> tuple[GpuUuid, int] | None:
    """GPU and number of a slice id, or None when `text` is not one."""
    match = _SLICE_ID.fullmatch(text)
    return (GpuUuid(match[1]), int(match[2])) if match else None


@functools.lru_cache(maxsize=256)
def listed_ids(uuid: GpuUuid, split_count: int, held: tuple[SliceId, ...]) -> tuple[SliceId, ...]:
    """The ids to list for a GPU: all held ones, then the lowest free ones up to the split count."""
    numbers = {pair[1] for pair in map(split_slice_id, held) if pair and pair[0] == uuid}
    unused = (number for number in range(split_count) if number not in numbers)
    numbers.update(itertools.islice(unused, max(0, split_count - len(numbers))))
    return tuple(slice_id(uuid, n) for n in sorted(numbers))


def registered_mib(memory_mib: int | None, settings: SharingSettings) -> int | None:
    """MiB to register for a GPU, or None if the GPU must be left out.

    As HAMi's register.go (getAPIDevices); but larger numbers become INT32_MAX, and HAMi's overflow.
    """
    known = memory_mib if memory_mib is not None else settings.preconfigured_mib
    if known <= 0:
        return None

    scaling = 1.0 if settings.mode == MIG_MODE else settings.memory_scaling
    return min(known, INT32_MAX) if scaling == 1 else int(min(known * scaling, INT32_MAX))


def registered_core_percent(settings: SharingSettings) -> int:
    """Percent of compute to register: the scaling times 100, truncated; 100 in mode mig."""
    return 100 if settings.mode == MIG_MODE else int(min(settings.core_scaling * 100, INT32_MAX))


def type_name(name: str) -> str:
    """The GPU's name with the prefix that HAMi's scheduler (2.8 and later) matches."""
    return name if name.startswith("NVIDIA") else f"NVIDIA-{name}"


# Scores how closely two GPUs are connected, in HAMi's points. Source: HAMi v2.10
# pkg/device/nvidia/calculate_score.go.

NVLINK_POINTS: Final = 100
MOST_NVLINKS: Final = 18  # NVLinks beyond this number between two GPUs bring no points

Scores = Mapping[GpuUuid, Mapping[GpuUuid, int]]
"""Points by the two GPUs of a pair."""


def pair_scores(gpus: Iterable[Gpu]) -> Scores:
    """The points of every pair, in the order of the GPUs. A single GPU has an empty entry."""
    known = tuple(gpus)
    return {
        gpu.uuid: {peer.uuid: pair_points(gpu, peer) for peer in known if peer.uuid != gpu.uuid}
        for gpu in known
    }


def pair_points(gpu: Gpu, peer: Gpu) -> int:
    """The points of one pair; 0 if the two GPUs report different kinds of links."""
    link = _link(gpu, peer)
    if link is None or _kinds(link) != _kinds(_link(peer, gpu)):
        return 0
    return (link.path or 0) + NVLINK_POINTS * min(link.nvlinks, MOST_NVLINKS)


def closeness(gpu: Gpu, peer: Gpu) -> int:
    """A rank for choosing GPUs: by points, and for equal points by a common NUMA node."""
    return 2 * pair_points(gpu, peer) + (gpu.numa is not None and gpu.numa == peer.numa)


def _link(gpu: Gpu, peer: Gpu) -> Link | None:
    return next((link for link in gpu.links if link.peer == peer.uuid), None)


def _kinds(link: Link | None) -> int:
    return 0 if link is None else (link.path is not None) + (link.nvlinks > 0)


# The inventory: an immutable snapshot of the shared GPUs, their shares and their health.

WITHHELD: Final = "no slice is on offer: "
"""Stands before the reason, in the agent's check and for each GPU."""


class SharedGpu(msgspec.Struct, frozen=True):
    """One GPU and how it is shared; `registered_mib` and `core_percent` after scaling.

    - `present`: False if the GPU is shown but not offered. It vanished or is no longer shared while
      a container holds a slice of it; or the container runtime would not find it; or it is
      unhealthy and the driver lists it without describing it: then it has no slices.
    - `there`: the driver still lists it.
    - `obstacle`: why it is not present; empty if nothing more is known.
    - `wanted`: False if the settings or MIG mode exclude it.
    """

    gpu: Gpu
    health: Health
    split_count: int
    registered_mib: int
    core_percent: int
    type_name: str
    mode: str
    present: bool = True
    there: bool = True
    obstacle: str = ""
    wanted: bool = True
    numa_hint: bool = True

    @property
    def uuid(self) -> GpuUuid:
        """The UUID of the GPU."""
        return self.gpu.uuid

    @property
    def serving(self) -> bool:
        """True when new containers may be given this GPU."""
        return self.present and self.health.serving

    @property
    def unavailable_reason(self) -> str:
        """Why no new container may get the GPU, as a predicate of its name. Empty: one may."""
        if not self.health.serving:
            return f"is {self.health.condition.value}: {self.health.text or self.health.cause}"
        if self.present:
            return ""
        if self.obstacle:
            return f"is not shared: {self.obstacle}"
        return "is filtered out by the settings" if self.there else "is not on the node any more"


class Inventory(msgspec.Struct, frozen=True):
    """All shared GPUs, sorted by index, then UUID. GPUs without an index come last.

    `generation` rises with every change. `withheld`: why no slice is on offer, whatever the health.
    """

    generation: int = 0
    gpus: tuple[SharedGpu, ...] = ()
    driver_version: str = ""
    withheld: str = ""

    def find(self, uuid: GpuUuid) -> SharedGpu | None:
        """The GPU with that UUID, or None."""
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)

    def offers(self, gpu: SharedGpu) -> bool:
        """True when the list and the register annotation offer this GPU to new containers."""
        return gpu.serving and not self.withheld

    def obstacles(self, gpu: SharedGpu) -> tuple[str, ...]:
        """Reasons other than health for which new containers do not get the GPU."""
        if not gpu.health.serving or self.offers(gpu):
            return ()
        return (WITHHELD + self.withheld if gpu.present else f"it {gpu.unavailable_reason}",)


# What the driver and probes report about a GPU, before any verdict.


class RecoveryAction(enum.StrEnum):
    """The action that the GPU needs (nvmlDeviceGpuRecoveryAction_t, from driver 570 on).

    In the order of NVML's numbers, from 0. `OTHER`: one that the agent does not know.
    """

    NONE = "none"
    GPU_RESET = "gpu-reset"
    NODE_REBOOT = "node-reboot"
    DRAIN_P2P = "drain-p2p"
    DRAIN_AND_RESET = "drain-and-reset"
    RECOVER_IMEX_DOMAIN = "recover-imex-domain"
    BUS_RESET = "bus-reset"
    SYSTEM_REBOOT = "system-reboot"
    OTHER = "other"


class FabricState(enum.StrEnum):
    """Whether a GPU has joined the fabric of its NVSwitches (nvmlGpuFabricState_t)."""

    NOT_STARTED = "not-started"
    IN_PROGRESS = "in-progress"
    COMPLETED = "completed"
    FAILED = "failed"


class GpuSigns(msgspec.Struct, frozen=True):
    """The state of one GPU's memory, its recovery action and its fabric.

    None means that this GPU or driver does not report the value. It never means that all is well.

    - `rows_pending`, `pages_pending`: rows, or pages before Ampere, wait for a reset.
    - `rows_failed`: a row could not be remapped, because no spare row is left.
    """

    rows_pending: bool | None = None
    rows_failed: bool | None = None
    pages_pending: bool | None = None
    recovery: RecoveryAction | None = None
    fabric: FabricState | None = None


class EventKind(enum.StrEnum):
    """Kinds of driver reports. `CHANGED`: GPUs came, went or changed their order: scan again."""

    XID = "xid"
    ECC_DOUBLE = "ecc-double"
    CHANGED = "changed"


class DriverEvent(msgspec.Struct, frozen=True):
    """One report of the driver. `uuid` None: about all GPUs, or about one that is not known."""

    kind: EventKind
    uuid: GpuUuid | None = None
    xid: int | None = None


class ProbeOutcome(enum.StrEnum):
    """The outcome of a probe of a GPU. `REFUSED`: NVML_ERROR_RESET_REQUIRED."""

    PASSED = "passed"
    FAILED = "failed"
    REFUSED = "refused"
    LOST = "lost"
    SILENT = "silent"


class Probe(msgspec.Struct, frozen=True):
    """The result of probing the GPU `uuid`. `text` is the driver's error text.

    `unmonitored`: why the agent does not receive this GPU's events, if it should.
    """

    uuid: GpuUuid
    outcome: ProbeOutcome
    text: str = ""
    signs: GpuSigns = GpuSigns()
    unmonitored: str = ""


# Settings of the web pages.

ReaderPolicy = Literal["local", "all"]
"""Whose requests for what names pods are answered over TCP."""
HamiNames = Literal["none", "current", "legacy", "both"]
"""By which names the metrics also have the series of HAMi's vGPUmonitor: of HAMi 2.9 and later; of
HAMi up to and including 2.8, which later ones serve with `--legacy-metrics`."""

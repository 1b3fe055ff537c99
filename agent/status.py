"""The document of a node's status, as the agent serves it and as its objects show it."""

import datetime as dt
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec

from agent.allocate.candidates import pair_groups
from agent.allocate.room import RoomClaim, gpu_use, is_past_init
from agent.cluster import CORDON, MUTEX_LOCK, REGISTER, NodeView, PodView, Role
from agent.errors import MalformedText, Refusal, cap
from agent.hami.pod import decode_node_lock
from agent.hami.register import RegisteredGpu, decode_either
from agent.model import Condition, Gpu, Health, Share, SharedGpu
from agent.node.devices import read_cordon

# The documents of `/api/v1` as JSON, for the agent that writes them and the commands that read.
#
# Keys are in camelCase. A reader ignores unknown keys and fills in missing ones, so that an agent
# and a command of neighbouring versions understand each other.

API_VERSION: Final = "hami-agent/v1"
FIRST_YEAR: Final = 1970

Moment: TypeAlias = Annotated[dt.datetime, msgspec.Meta(tz=True)]
"""A time with its offset: one without cannot be compared with others."""
Mib: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
"""MiB; a larger number in a document of others overflows where a reader makes GiB of it."""


class Document(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """The base of all documents."""


class CheckStatus(Document, frozen=True):
    """One readiness check. `text`: what is wrong and what to do; empty while it holds."""

    name: str
    ok: bool
    required: bool = True
    text: str = ""


class LockStatus(Document, frozen=True):
    """HAMi's lock on the Node. `holder`: `namespace/pod`, empty if the lock names none.

    `since`: None if the lock cannot be read; `holder` is its text then.
    """

    since: Moment | None
    holder: str = ""


class NodeStatus(Document, frozen=True):
    """The node and its agent. `version` and `started_at` are absent where no agent answered.

    - `scheduler`: `hami`, or `none` if the kubelet decides alone.
    - `checks`: all readiness checks; `ready`: no required one fails.
    - `kubelet`: the state of the registration as a phrase.
    """

    name: str
    version: str = ""
    started_at: Moment | None = None
    ready: bool | None = None
    scheduler: str = "hami"
    resource: str = ""
    driver: str = ""
    kubelet: str = ""
    observe: bool = False
    profiles: tuple[str, ...] = ()
    split_count: int | None = None
    memory_scaling: float | None = None
    core_scaling: float | None = None
    lock: LockStatus | None = None
    checks: tuple[CheckStatus, ...] = ()


class UseHistory(Document, frozen=True):
    """Means of equal periods, the oldest first. None: nothing was sampled in that period."""

    period_seconds: int
    until: Moment
    gpu_percent: tuple[int | None, ...] = ()
    used_mib: tuple[int | None, ...] = ()


class GpuStatus(Document, frozen=True):
    """One GPU.

    - `index`: None if it is not known. `condition`: ok, watch, bad, lost or unmonitored.
    - `serving`: new containers may get it. `obstacles`: why not, besides its health.
    - `memory_mib`: physical; `sellable_mib`: after scaling; `promised_mib`: to pods.
    - `used_mib`, `gpu_percent`: measured now; None if the driver does not say.
    """

    uuid: str
    index: int | None = None
    model: str = ""
    pci: str = ""
    numa: int | None = None
    mode: str = ""
    condition: str = ""
    serving: bool = True
    cordoned: bool = False
    since: Moment | None = None
    cause: str = ""
    action: str = ""
    runbook: str = ""
    text: str = ""
    obstacles: tuple[str, ...] = ()
    slices: int = 0
    slices_held: int = 0
    memory_mib: Mib | None = None
    sellable_mib: Mib = 0
    promised_mib: Mib = 0
    sellable_cores: int = 0
    promised_cores: int = 0
    used_mib: Mib | None = None
    gpu_percent: int | None = None
    history: UseHistory | None = None


class ShareStatus(Document, frozen=True):
    """A part of one GPU. `memory_mib` 0: all of its memory; None: not limited.

    `used_mib`: memory that the container uses of it. `gpu_percent`: the share of the whole GPU's
    time in which its kernels ran; the sum over processes may exceed 100. None: not known.
    """

    gpu: str
    uuid: str
    memory_mib: Mib | None = None
    cores: int | None = None
    used_mib: Mib | None = None
    gpu_percent: int | None = None


class AllocationStatus(Document, frozen=True):
    """What one container holds.

    - `pod` and `namespace` are empty while the holder is not known.
    - `confirmed`: the kubelet has recorded the answer; None: not known.
    - `mismatched`: the kubelet recorded slices of other GPUs.
    - `ended`: it runs no more, and its share counts no more in what is promised.
    - `last_kernel`: when a process or a kernel of the container last started on a GPU.
    - `processes`: how many of its processes use a GPU. `last_kernel` and `processes` are None if
      they are not known; `unread`: why, if a person should know.
    - `unkept`: why nothing keeps its limits; empty: HAMi-core does, or its pod is not known.
    """

    namespace: str
    pod: str
    container: str
    shares: tuple[ShareStatus, ...]
    slices: tuple[str, ...] = ()
    since: Moment | None = None
    confirmed: bool | None = None
    mismatched: bool = False
    ended: bool = False
    decided_by: str = "scheduler"
    last_kernel: Moment | None = None
    processes: int | None = None
    unread: str = ""
    unkept: str = ""


class ContainerHistory(Document, frozen=True):
    """What a container used of one of its GPUs lately; `used_mib` and `gpu_percent` as its own."""

    namespace: str
    pod: str
    container: str
    gpu: str
    uuid: str
    history: UseHistory


class Entry(Document, frozen=True):
    """A change or a refusal. `reason`: of the Event, or the refusal's id of the runbook."""

    at: Moment
    reason: str
    text: str
    warning: bool = True
    namespace: str = ""
    pod: str = ""
    container: str = ""


class SettingStatus(Document, frozen=True):
    """A setting in force. `pending`: it takes effect only at the next start."""

    key: str
    value: object
    origin: str
    pending: bool = False


class StatusDocument(Document, frozen=True):
    """All of a node. `journal_since`: refusals and changes before that time are not known.

    None instead of `allocations`, `refusals` or `changes`: the source does not know them.
    """

    node: NodeStatus
    gpus: tuple[GpuStatus, ...]
    allocations: tuple[AllocationStatus, ...] | None = None
    refusals: tuple[Entry, ...] | None = None
    changes: tuple[Entry, ...] | None = None
    journal_since: Moment | None = None


class Envelope(Document, frozen=True):
    """An answer. `generated_at`: the time of the values in it."""

    api_version: str
    kind: str
    generated_at: Moment
    data: msgspec.Raw


D = TypeVar("D")


def names_of(gpu: GpuStatus) -> frozenset[str]:
    """The words that name a GPU: its UUID, and its index if that is known."""
    return frozenset({gpu.uuid} if gpu.index is None else {gpu.uuid, str(gpu.index)})


def encode(data: object) -> bytes:
    """The data of a document as JSON."""
    return msgspec.json.encode(data)


def envelope(kind: str, data: bytes, at: dt.datetime) -> bytes:
    """Wrap encoded data."""
    return msgspec.json.encode(
        Envelope(
            api_version=API_VERSION,
            kind=kind,
            generated_at=at,
            data=msgspec.Raw(data),
        )
    )


def open_envelope(content: bytes, kind: str, form: type[D]) -> tuple[D, dt.datetime]:
    """The data of an answer of that kind, and when it was made. Raises MalformedText."""
    try:
        found = msgspec.json.decode(content, type=Envelope)
        if found.api_version != API_VERSION or found.kind != kind:
            raise MalformedText(
                f"the answer is a {found.kind} of {found.api_version}; "
                f"expected a {kind} of {API_VERSION}"
            )
        if found.generated_at.year < FIRST_YEAR:
            raise MalformedText(f"the answer is of the year {found.generated_at.year}")
        return msgspec.json.decode(found.data, type=form), found.generated_at.astimezone(dt.UTC)
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise MalformedText(f"the answer is no {kind} of {API_VERSION}: {error}") from error


# The status of a node as its objects at the API server show it, where no agent answers.

REPORTED: Final = "the Node's register annotation says that it is unhealthy; its agent knows why"


def observed_status(
    node: NodeView, pods: Iterable[PodView], resource: str, now: dt.datetime
) -> StatusDocument:
    """The node by its annotations, and its pods by theirs. What is used is not known.

    Raises:
        MalformedText: the register annotation cannot be read.
    """
    held = [pod for pod in pods if pod.groups and not pod.terminal]
    text = node.annotations.get(REGISTER)
    registered = () if not text else decode_either(text)
    labels = {str(gpu.uuid): str(gpu.index) for gpu in registered}
    parts = [part for pod in held for part in _parts(pod, labels)]
    claims = [claim for claim, row in parts if not row.ended]
    closed = read_cordon(node.annotations.get(CORDON))
    gpus = tuple(_gpu(gpu, claims, closed, now) for gpu in registered)
    rows = sorted(
        (row for _, row in parts), key=lambda row: (row.namespace, row.pod, row.container)
    )
    about = NodeStatus(name=node.name, resource=resource, lock=lock_status(node.annotations))
    return StatusDocument(node=about, gpus=gpus, allocations=tuple(rows))


def lock_status(annotations: Mapping[str, str]) -> LockStatus | None:
    """HAMi's lock on the Node; None if it is free."""
    text = annotations.get(MUTEX_LOCK)
    if text is None:
        return None
    try:
        lock = decode_node_lock(text)
    except MalformedText:
        return LockStatus(since=None, holder=cap(text))
    return LockStatus(since=lock.stamp, holder="/".join(lock.owner) if lock.owner else "")


def _gpu(
    gpu: RegisteredGpu, claims: list[RoomClaim], closed: Collection[str], now: dt.datetime
) -> GpuStatus:
    shared = SharedGpu(
        Gpu(gpu.uuid, gpu.index, gpu.type_name, None, ""),
        Health(Condition.OK, now),
        gpu.split_count,
        gpu.registered_mib,
        gpu.core_percent,
        gpu.type_name,
        gpu.mode,
    )
    use = gpu_use(claims, shared)
    shares = [share for claim in claims for share in claim.shares if share.uuid == gpu.uuid]
    return GpuStatus(
        uuid=gpu.uuid,
        index=gpu.index,
        model=gpu.type_name.removeprefix("NVIDIA-"),
        numa=gpu.numa,
        mode=gpu.mode,
        condition=Condition.OK if gpu.healthy else Condition.BAD,
        serving=gpu.healthy,
        cordoned=gpu.uuid in closed,
        text="" if gpu.healthy else REPORTED,
        slices=gpu.split_count,
        slices_held=len(shares),
        sellable_mib=gpu.registered_mib,
        promised_mib=use.memory_mib,
        sellable_cores=gpu.core_percent,
        promised_cores=use.core_percent,
    )


def _parts(pod: PodView, labels: Mapping[str, str]) -> Iterator[tuple[RoomClaim, AllocationStatus]]:
    """What each container takes, and how it is shown."""
    roles = {container.name: container.role for container in pod.containers}
    for place, (name, shares) in enumerate(_groups(pod)):
        role = roles.get(name, Role.APP)
        shown = AllocationStatus(
            namespace=pod.namespace,
            pod=pod.name,
            container=name,
            ended=role is Role.INIT and is_past_init(pod),
            shares=tuple(
                ShareStatus(
                    gpu=labels.get(share.uuid, share.uuid),
                    uuid=share.uuid,
                    memory_mib=share.memory_mib,
                    cores=share.core_percent,
                )
                for share in shares
            ),
        )
        yield RoomClaim(pod.uid, role, shares, place), shown


def _groups(pod: PodView) -> Iterator[tuple[str, tuple[Share, ...]]]:
    """The containers with their shares; without names where the two do not fit together."""
    groups = pod.groups or ()
    try:
        yield from ((one.container, one.shares) for one in pair_groups(groups, pod.containers))
    except Refusal:
        yield from (("", group) for group in groups if group)

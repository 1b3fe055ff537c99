"""HAMi's annotations: a Node's offer, the scheduler's lock there, and what it gives to a pod."""

import collections
import datetime as dt
import enum
import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated

import msgspec

from agent.cluster import MUTEX_LOCK, REGISTER, SCORE, TEXT_LIMIT, NodeLock, NodeView
from agent.errors import MalformedText, cap
from agent.model import GpuUuid, Inventory, Scores, Share, SharedGpu, pair_scores
from agent.setting import FALSE, TRUE, Field, boolean, choice

# Numbers as Go's strconv reads them.

INT32 = (-(2**31), 2**31 - 1)
INT64 = (-(2**63), 2**63 - 1)

_DECIMAL = re.compile(r"([+-]?)0*([0-9]{1,19})")  # as Go's ParseInt reads

# The register annotation of the Node's GPUs in the form for schedulers from 2.8 on: a JSON array of
# GPUs, fixed key order, zero values absent. Source: HAMi v2.10 pkg/device/devices.go,
# MarshalNodeDevices and UnMarshalNodeDevices.

WHAT = "register annotation"
NO_GPU = GpuUuid("")
Int32 = Annotated[int, msgspec.Meta(ge=INT32[0], le=INT32[1])]
Int64 = Annotated[int, msgspec.Meta(ge=INT64[0], le=INT64[1])]
_HTML = re.compile("[<>&\u2028\u2029]")


class RegisteredGpu(msgspec.Struct, frozen=True, omit_defaults=True):
    """One element of the annotation, its fields in the order in which HAMi writes them."""

    uuid: GpuUuid = msgspec.field(name="id", default=NO_GPU)
    index: Annotated[int, msgspec.Meta(ge=0)] = 0
    split_count: Int32 = msgspec.field(name="count", default=0)
    registered_mib: Int32 = msgspec.field(name="devmem", default=0)
    core_percent: Int32 = msgspec.field(name="devcore", default=0)
    type_name: str = msgspec.field(name="type", default="")
    numa: Int64 = 0
    mode: str = ""
    healthy: bool = msgspec.field(name="health", default=False)


def told(inventory: Inventory) -> tuple[SharedGpu, ...]:
    """The GPUs that are reported, by index; without those never described since the start."""
    known = (shared for shared in inventory.gpus if shared.gpu.name)
    return tuple(sorted(known, key=lambda shared: (shared.gpu.index, shared.uuid)))


def registered(inventory: Inventory, *, colon: bool = False) -> tuple[RegisteredGpu, ...]:
    """The elements for the inventory, sorted by index. `colon`: in the names of that form.

    A GPU that serves no new container, also an absent one, stays, not healthy: a scheduler would
    keep a GPU that vanishes from the text. An unknown NUMA node is 0, as in HAMi.
    """
    return tuple(
        RegisteredGpu(
            uuid=shared.uuid,
            index=shared.gpu.index,
            split_count=shared.split_count,
            registered_mib=shared.registered_mib,
            core_percent=shared.core_percent,
            # Schedulers up to 2.7.1 expect `NVIDIA-` before every name. Source: HAMi v2.7.1
            # pkg/device-plugin/nvidiadevice/nvinternal/plugin/register.go.
            type_name=f"NVIDIA-{shared.gpu.name}" if colon else shared.type_name,
            numa=shared.gpu.numa or 0,
            mode=shared.mode,
            healthy=inventory.offers(shared),
        )
        for shared in told(inventory)
    )


def encode_json(value: object) -> str:
    """JSON, byte for byte as HAMi's: Go escapes what is special in HTML, here only in strings."""
    text = msgspec.json.encode(value).decode()
    return _HTML.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def decode_register(text: str) -> tuple[RegisteredGpu, ...]:
    """Decode the GPUs in the text's order; keys that are not ours are ignored.

    HAMi's scheduler also refuses wrong types of those. Raises MalformedText.
    """
    if len(text) > TEXT_LIMIT:
        raise MalformedText(f"{WHAT} is over {TEXT_LIMIT} characters")
    try:
        gpus = msgspec.json.decode(text, type=tuple[RegisteredGpu, ...])
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
        raise MalformedText(f"{WHAT} cannot be read: {cap(str(error))}") from error
    if not gpus:
        raise MalformedText(f"{WHAT} names no GPU")
    return gpus


# The register annotation in the form for schedulers up to and including 2.7.1: records, no JSON.
#
#     text = { record ":" }    record = UUID "," slices "," MiB "," percent "," type "," NUMA ","
#                                       health [ "," index "," mode ]
#
# Source: HAMi v2.10 pkg/device/devices.go, DecodeNodeDevices (7 fields were HAMi v2.4's).

_SEPARATORS = re.compile("[,:]")


def is_json_form(text: str) -> bool:
    """Whether a register annotation has the JSON form, and not that of records."""
    return text.lstrip().startswith("[") or text == "null"


def decode_either(text: str) -> tuple[RegisteredGpu, ...]:
    """Decode a register annotation of either form. Raises MalformedText."""
    return decode_register(text) if is_json_form(text) else decode_register_colon(text)


def encode_register_colon(gpus: Iterable[RegisteredGpu]) -> str:
    """Encode the GPUs in the given order, in records of 9 fields.

    A separator inside a name becomes a space. Source: as above, EncodeNodeDevices.
    """
    text = ""
    for gpu in gpus:
        uuid, index, *facts, mode, healthy = msgspec.structs.astuple(gpu)
        values = (uuid, *facts, "true" if healthy else "false", index, mode)
        text += ",".join(_SEPARATORS.sub(" ", str(value)) for value in values) + ":"
    return text


def decode_register_colon(text: str) -> tuple[RegisteredGpu, ...]:
    """Decode the GPUs in the text's order; empty records are skipped. Raises MalformedText."""
    if len(text) > TEXT_LIMIT:
        raise MalformedText(f"{WHAT} is over {TEXT_LIMIT} characters")
    records = [record for record in text.split(":") if record]
    if not records or ":" not in text:
        raise MalformedText(f"{WHAT} names no GPU, or has no `:`, which ends each")
    return tuple(_gpu(record, f"{WHAT}, GPU {place}") for place, record in enumerate(records))


def _gpu(record: str, where: str) -> RegisteredGpu:
    fields = record.split(",")
    if len(fields) not in (7, 9):  # only HAMi v2.4 wrote and read 7
        raise MalformedText(f"{where}: {cap(record)!r} has {len(fields)} fields; expected 7 or 9")
    uuid, count, memory, cores, type_name, numa, health = fields[:7]
    index, mode = fields[7:] or ("0", "hami-core")
    if health not in TRUE | FALSE:
        raise MalformedText(f"{where}, health is {cap(health)!r}, neither true nor false")
    return RegisteredGpu(
        uuid=GpuUuid(uuid),
        index=_number(index, (0, INT64[1]), f"{where}, index"),
        split_count=_number(count, INT32, f"{where}, count"),
        registered_mib=_number(memory, INT32, f"{where}, memory"),
        core_percent=_number(cores, INT32, f"{where}, cores"),
        type_name=type_name,
        numa=_number(numa, INT64, f"{where}, NUMA node"),
        mode=mode,
        healthy=health in TRUE,
    )


def _number(text: str, bounds: tuple[int, int], where: str) -> int:
    match, (low, high) = _DECIMAL.fullmatch(text), bounds
    if not match or not low <= int(match[1] + match[2]) <= high:
        raise MalformedText(f"{where} is {cap(text)!r}, not an integer from {low} to {high}")
    return int(match[1] + match[2])


def encode_reported(now: dt.datetime) -> str:
    """Encode the handshake that schedulers up to and including 2.7.1 wait for; `now` is aware."""
    return f"Reported {now.astimezone(dt.UTC):%Y-%m-%d %H:%M:%S.%f} +0000 UTC"


# The score annotation: how well each pair of GPUs is linked, for schedulers from 2.7 on. A JSON
# array of `{"uuid": ..., "score": {"other uuid": points}}`, others sorted by UUID. Source: HAMi
# v2.10 pkg/device/nvidia/calculate_score.go, pkg/device/devices.go DecodePairScores.


def encode_scores(scores: Scores) -> str:
    """Encode the scores in the given order, byte for byte as HAMi."""
    pairs = [{"uuid": uuid, "score": dict(sorted(of.items()))} for uuid, of in scores.items()]
    return encode_json(pairs)


class ReportProfile(enum.StrEnum):
    """The form of the register annotation. It depends on the scheduler's version."""

    JSON = "json"  # HAMi 2.8 and later
    COLON = "colon"
    """HAMi 2.5 up to and including 2.7.1, with a stamp in the handshake every 30 s: this scheduler
    drops a node whose handshake is older than 60 s."""


class ReportSettings(msgspec.Struct, frozen=True):
    """`topology_score`: write the score annotation; otherwise the reporter removes it."""

    # fmt: off
    profile: Annotated[ReportProfile, Field("report.profile", choice(*ReportProfile),
        "Form of the register annotation, by the version of HAMi's scheduler. json: 2.8 and "
        "later. colon: 2.5 up to and including 2.7.1.", flag="--report-profile",
        live=True)] = ReportProfile.JSON
    topology_score: Annotated[bool, Field("report.topologyScore", boolean,
        "Also write the annotation with the links between the GPUs.",
        env=("ENABLE_TOPOLOGY_SCORE",), live=True)] = False
    # fmt: on


# Computes the register and score annotations, and compares them with the present ones. The order of
# GPUs does not count: HAMi's plugin, which may run beside the agent, has another at each scan.


class NodeReport(msgspec.Struct, frozen=True):
    """The wanted texts; `score` None: there must be none.

    - `changes`: what to write, None: remove. Empty when the Node's annotations mean the same, else
      always the register annotation: a scheduler reads a new score only together with it.
    - `changes_health`: the health of a GPU in the present annotation differs.
    """

    register: str
    score: str | None
    changes: Mapping[str, str | None]
    changes_health: bool


def report_of(
    inventory: Inventory, annotations: Mapping[str, str], settings: ReportSettings
) -> NodeReport | None:
    """Compute the report of the inventory; None before the first scan and without any GPU.

    If the inventory has no GPU, those of the present annotation stay, unhealthy, with their scores:
    a scheduler keeps what it had instead of an empty list (HAMi UnMarshalNodeDevices).
    """
    if inventory.generation == 0:
        return None
    text, score = annotations.get(REGISTER), annotations.get(SCORE)
    held, is_json = read_register(text), settings.profile is ReportProfile.JSON

    gpus, wanted = registered(inventory, colon=not is_json), score
    if not gpus:
        gpus = tuple(msgspec.structs.replace(gpu, healthy=False) for gpu in held)
    elif settings.topology_score:
        wanted = encode_scores(pair_scores(shared.gpu for shared in told(inventory)))
    else:
        wanted = None
    if not gpus:
        return None

    register = encode_json(gpus) if is_json else encode_register_colon(gpus)
    is_same_form = is_json_form(text or "") == is_json
    is_same = is_same_form and collections.Counter(gpus) == collections.Counter(held)
    changes: dict[str, str | None] = {} if register == text or is_same else {REGISTER: register}
    if wanted != score:
        changes = {REGISTER: register, SCORE: wanted}
    before = {gpu.uuid: gpu.healthy for gpu in held}
    changes_health = any(before.get(gpu.uuid, gpu.healthy) != gpu.healthy for gpu in gpus)
    return NodeReport(register, wanted, changes, changes_health)


def read_register(text: str | None) -> tuple[RegisteredGpu, ...]:
    """Decode the register annotation in either form; empty if it is absent or unreadable."""
    try:
        return () if text is None else decode_either(text)
    except MalformedText:
        return ()


# The node lock annotation of HAMi's scheduler: `<RFC 3339>,<namespace>,<pod>`. Source: HAMi v2.10
# pkg/util/nodelock/nodelock.go, ParseNodeLock and SetNodeLock.

_RFC_3339 = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?"
    r"(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
"""The form alone: Python reads more forms than this one."""


def decode_node_lock(text: str) -> NodeLock:
    """Decode a lock; its `value` is `text` itself.

    The legacy form, a stamp alone or with `,,` after it, names no owner. Raises MalformedText.
    """
    parts = text.split(",")
    if len(parts) not in {1, 3}:
        raise MalformedText(
            f"node lock {cap(text)!r} has {len(parts)} parts; "
            "expected a time, or a time, a namespace and a pod"
        )
    stamp, namespace, name = parts if len(parts) == 3 else (text, "", "")
    return NodeLock(value=text, stamp=decode_stamp(stamp), namespace=namespace, name=name)


def encode_stamp(stamp: dt.datetime) -> str:
    """Format an aware time as RFC 3339, in whole seconds of UTC."""
    utc = stamp.astimezone(dt.UTC).replace(microsecond=0, tzinfo=None)
    return f"{utc.isoformat()}Z"


def decode_stamp(text: str) -> dt.datetime:
    """Parse an RFC 3339 time into an aware one in UTC, to 1 µs. Raises MalformedText."""
    try:
        if _RFC_3339.fullmatch(text):
            return dt.datetime.fromisoformat(text).astimezone(dt.UTC)
    except (ValueError, OverflowError) as error:
        raise MalformedText(f"{cap(text)!r} is not an RFC 3339 time: {error}") from error
    raise MalformedText(f"{cap(text)!r} is not an RFC 3339 time such as 2026-08-21T10:00:00Z")


def held_lock(node: NodeView | None) -> NodeLock | None:
    """The lock on the Node."""
    return read_lock(node.annotations.get(MUTEX_LOCK)) if node else None


def former_locks(node: NodeView | None, elapsed: float) -> tuple[NodeLock, ...]:
    """The former locks that still prove a right, the last first. `elapsed` is the loop time."""
    texts = (text for text, until in (node.former_locks if node else ()) if until > elapsed)
    return tuple(lock for text in texts if (lock := read_lock(text)) is not None)


@functools.lru_cache(256)  # each call of the kubelet reads the former locks
def read_lock(text: str | None) -> NodeLock | None:
    """The lock of this text; None when it is absent or unreadable, so that it proves no right."""
    try:
        return decode_node_lock(text) if text is not None else None
    except MalformedText:
        return None


# The devices annotation of a pod: groups of shares, one group for each container.
#
#     pod = { group ";" }  group = { device ":" }  device = UUID "," type "," MiB "," percent
#
# Source: HAMi v2.10 pkg/device/devices.go, DecodePodDevices and EncodePodSingleDevice.

TYPE_WORD = "NVIDIA"
LENGTH_LIMIT = 64 * 1024  # characters: 1,000 shares; each change of the pod decodes them again
GROUP_LIMIT = 256  # groups: the kubelet allocates them one by one and admits no other pod meanwhile

Groups = tuple[tuple[Share, ...], ...]

_PLACEHOLDER = ["", "", "0", "0"]


def decode_pod_devices(text: str, *, is_served: bool = False) -> Groups:
    """Decode groups of shares in the order of the text; an empty group: a container without GPUs.

    A text that ends in `;`, as HAMi writes it, has an empty last group. The placeholder `,,0,0`,
    which schedulers 2.4 and 2.5 write for a container without GPUs, is skipped; other devices
    without a UUID stay. HAMi accepts any type and negative numbers. `is_served`: the pod gets its
    GPUs from this agent, and both are refused. Raises MalformedText.
    """
    if len(text) > LENGTH_LIMIT or text.count(";") > GROUP_LIMIT:
        raise MalformedText(
            f"devices text has {len(text)} characters and {text.count(';')} groups; "
            f"at most {LENGTH_LIMIT} and {GROUP_LIMIT} are read"
        )
    return tuple(
        tuple(_decode_share(piece, place, is_served=is_served) for piece in _pieces(part))
        for place, part in enumerate(text.split(";"))
    )


def vendor_words(text: str) -> tuple[tuple[str, ...], ...]:
    """The type of each share of a text that `decode_pod_devices` accepts, in the same shape."""
    return tuple(tuple(piece.split(",")[1] for piece in _pieces(part)) for part in text.split(";"))


def consume(text: str, groups: Collection[int]) -> str:
    """Empty the groups at those positions of `text`; the rest, with all separators, stays.

    Repeating it changes nothing more, and neither does a position beyond the text.
    """
    return ";".join("" if place in groups else part for place, part in enumerate(text.split(";")))


def _pieces(text: str) -> Iterator[str]:
    """The devices of a group; as in HAMi, pieces without a comma are skipped."""
    pieces = (piece for piece in text.split(":") if "," in piece)
    return (piece for piece in pieces if piece.split(",")[:4] != _PLACEHOLDER)


def _decode_share(text: str, place: int, *, is_served: bool) -> Share:
    """Decode one device; fields after the fourth are ignored."""
    where, fields = f"devices text, group {place}", text.split(",")
    if len(fields) < 4:
        raise MalformedText(
            f"{where}: {cap(text)!r} has {len(fields)} of 4 fields (UUID, type, MiB, percent)"
        )
    uuid, kind, memory, cores = fields[:4]
    mib = _number(memory, INT32, f"{where}: memory")
    percent = _number(cores, INT32, f"{where}: cores")
    if is_served and (kind != TYPE_WORD or min(mib, percent) < 0):
        raise MalformedText(
            f"{where}: {cap(uuid, 64)} is of type {cap(kind, 64)!r} with {mib} MiB and {percent} "
            f"percent; only type {TYPE_WORD} with numbers from 0 on is served here"
        )
    return Share(uuid=GpuUuid(uuid), memory_mib=mib, core_percent=percent)

"""The annotations with which a Node offers its GPUs to HAMi's scheduler."""

import collections
import contextlib
import datetime as dt
import enum
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated

import msgspec

from agent.cluster import REGISTER, SCORE, TEXT_LIMIT
from agent.errors import MalformedText, cap
from agent.model import Gpu, GpuUuid, Inventory, Scores, SharedGpu, lopsided, pair_scores
from agent.setting import FALSE, TRUE, Field, boolean, choice

# Numbers as Go's strconv reads them.

INT32 = (-(2**31), 2**31 - 1)
INT64 = (-(2**63), 2**63 - 1)
UINT32 = (0, 2**32 - 1)
UINT64 = (0, 2**64 - 1)

_DECIMAL = re.compile(r"([+-]?)0*([0-9]{1,19})")
"""A sign and digits, no space, no underscore; leading zeros apart."""


def parse_int(text: str, bounds: tuple[int, int]) -> int | None:
    """Parse a decimal as Go's ParseInt does; None: it is none, or outside the inclusive bounds."""
    match = _DECIMAL.fullmatch(text)
    value = int(match[1] + match[2]) if match else None
    return value if value is not None and bounds[0] <= value <= bounds[1] else None


# The register annotation of the Node's GPUs in the form for schedulers from 2.8 on.
#
# A JSON array of GPUs: fixed key order, zero values absent. Source: HAMi v2.10
# pkg/device/devices.go, MarshalNodeDevices and UnMarshalNodeDevices.

WHAT = "register annotation"
NO_GPU = GpuUuid("")
Int32 = Annotated[int, msgspec.Meta(ge=INT32[0], le=INT32[1])]
Int64 = Annotated[int, msgspec.Meta(ge=INT64[0], le=INT64[1])]
Uint32 = Annotated[int, msgspec.Meta(ge=0, le=UINT32[1])]
_HTML = re.compile("[<>&\u2028\u2029]")


class Placement(msgspec.Struct, frozen=True):
    """Where a MIG instance may be placed: its first memory slice and their number."""

    start: Uint32 = 0
    size: Uint32 = 0


class MigProfile(msgspec.Struct, frozen=True):
    """A MIG profile of the GPU, which HAMi's plugin reports."""

    name: str = ""
    memory_mib: Int32 = msgspec.field(name="memoryMB", default=0)
    core_percent: Int32 = msgspec.field(name="core", default=0)
    slice_count: Uint32 = msgspec.field(name="sliceCount", default=0)
    placements: tuple[Placement, ...] = ()


class RegisteredGpu(msgspec.Struct, frozen=True, omit_defaults=True):
    """One element of the annotation, its fields in the order in which HAMi writes them.

    A field that is absent in the text has its default; one that has its default is not written.
    """

    uuid: GpuUuid = msgspec.field(name="id", default=NO_GPU)
    index: Annotated[int, msgspec.Meta(ge=0)] = 0
    split_count: Int32 = msgspec.field(name="count", default=0)
    registered_mib: Int32 = msgspec.field(name="devmem", default=0)
    core_percent: Int32 = msgspec.field(name="devcore", default=0)
    type_name: str = msgspec.field(name="type", default="")
    numa: Int64 = 0
    mode: str = ""
    mig_profiles: tuple[MigProfile, ...] = msgspec.field(name="migProfiles", default=())
    healthy: bool = msgspec.field(name="health", default=False)


def told(inventory: Inventory) -> tuple[SharedGpu, ...]:
    """The GPUs that are reported to schedulers, sorted by index.

    A GPU that was not described since the agent started is omitted: its properties are unknown.
    """
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


def encode_register(gpus: Iterable[RegisteredGpu]) -> str:
    """Encode the GPUs in the given order, byte for byte as HAMi v2.10."""
    return _encode(tuple(gpus))


def _encode(value: object) -> str:
    """JSON as Go writes it: what is special in HTML is escaped, here only ever inside a string."""
    text = msgspec.json.encode(value).decode()
    return _HTML.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def decode_register(text: str) -> tuple[RegisteredGpu, ...]:
    """Decode the GPUs in the text's order; keys that are not ours are ignored.

    A scheduler refuses more: see agent/sandbox/scheduler/registry.py.

    Raises:
        MalformedText: not a JSON array of objects, a value of another type or range, or no GPU.
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

LENGTHS = (7, 9)
"""Fields of a record. Only HAMi v2.4 wrote and read 7."""
DEFAULT_MODE = "hami-core"
"""The mode of a record with 7 fields."""

_SEPARATORS = re.compile("[,:]")


def is_json_form(text: str) -> bool:
    """Whether a register annotation has the JSON form, and not that of records."""
    return text.lstrip().startswith("[") or text == "null"


def decode_either(text: str) -> tuple[RegisteredGpu, ...]:
    """Decode a register annotation of either form. Raises MalformedText."""
    return decode_register(text) if is_json_form(text) else decode_register_colon(text)


def encode_register_colon(gpus: Iterable[RegisteredGpu]) -> str:
    """Encode the GPUs in the given order, in records of 9 fields.

    A separator inside a name, which would break the text, becomes a space.
    Source: HAMi v2.10 pkg/device/devices.go, EncodeNodeDevices.
    """
    text = ""
    for gpu in gpus:
        values = (
            gpu.uuid,
            gpu.split_count,
            gpu.registered_mib,
            gpu.core_percent,
            gpu.type_name,
            gpu.numa,
            "true" if gpu.healthy else "false",
            gpu.index,
            gpu.mode,
        )
        text += ",".join(_SEPARATORS.sub(" ", str(value)) for value in values) + ":"
    return text


def decode_register_colon(text: str) -> tuple[RegisteredGpu, ...]:
    """Decode the GPUs in the text's order; empty records are skipped.

    Raises:
        MalformedText: no `:`, a record without 7 or 9 fields, a number or boolean that Go does not
            read, a negative index, or no GPU.
    """
    if len(text) > TEXT_LIMIT:
        raise MalformedText(f"{WHAT} is over {TEXT_LIMIT} characters")
    if ":" not in text:
        raise MalformedText(f"{WHAT} has no `:`, which ends each record")
    records = [record for record in text.split(":") if record]
    if not records:
        raise MalformedText(f"{WHAT} names no GPU")
    return tuple(_gpu(record, f"{WHAT}, GPU {place}") for place, record in enumerate(records))


def _gpu(record: str, where: str) -> RegisteredGpu:
    fields = record.split(",")
    if len(fields) not in LENGTHS:
        raise MalformedText(f"{where}: {cap(record)!r} has {len(fields)} fields; expected 7 or 9")
    uuid, count, memory, cores, type_name, numa, health = fields[:7]
    index, mode = fields[7:] or ("0", DEFAULT_MODE)
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
    value = parse_int(text, bounds)
    if value is None:
        low, high = bounds
        raise MalformedText(f"{where} is {cap(text)!r}, not an integer from {low} to {high}")
    return value


# The handshake annotation: a word and the time when it was written.
#
# Source: HAMi v2.10 pkg/scheduler/scheduler.go, register. The times of v2.4 have dots in the date.
# A scheduler writes its local time without its zone.


class HandshakeWord(enum.Enum):
    """The word of a handshake; it tells who wrote it and why."""

    REPORTED = "Reported"
    """Written by the node's agent: the register annotation is new."""
    REQUESTING = "Requesting"
    """Written by the scheduler: it read the register annotation and waits for the agent."""
    DELETED = "Deleted"
    """Written by the scheduler: the agent did not answer; the node's GPUs are dropped."""


class Handshake(msgspec.Struct, frozen=True):
    """A decoded handshake. `stamp` is naive if the text names no zone, None if it has no time."""

    word: HandshakeWord
    stamp: dt.datetime | None


_STAMP = re.compile(
    r"[ _](?P<date>[0-9]{4}[-.][0-9]{2}[-.][0-9]{2})"
    r" (?P<time>[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,9})?)"
    r"(?: (?P<offset>[+-][0-9]{4}) \S{1,16})?(?: m=[+-][0-9.]{1,32})?"
)


def decode_handshake(text: str) -> Handshake:
    """Decode the word at the beginning of the text, and the time after it.

    Schedulers act on the word even without a valid time, so such a text is not malformed.

    Raises:
        MalformedText: the text begins with none of the words.
    """
    for word in HandshakeWord:
        if text.startswith(word.value):
            stamp = None
            if match := _STAMP.fullmatch(text.removeprefix(word.value)):
                date = match["date"].replace(".", "-")
                with contextlib.suppress(ValueError):
                    stamp = dt.datetime.fromisoformat(
                        f"{date}T{match['time']}{match['offset'] or ''}"
                    )
            return Handshake(word, stamp)
    raise MalformedText(
        f"handshake {cap(text)!r} begins with none of "
        f"{', '.join(word.value for word in HandshakeWord)}"
    )


def encode_reported(now: dt.datetime) -> str:
    """Encode the agent's stamp, for schedulers up to and including 2.7.1; `now` is aware.

    They act on the word; the time has Go's form, as HAMi's plugin wrote it.
    """
    return f"{HandshakeWord.REPORTED.value} {now.astimezone(dt.UTC):%Y-%m-%d %H:%M:%S.%f} +0000 UTC"


# The score annotation: how well each pair of GPUs is linked, for schedulers from 2.7 on.
#
# A JSON array of `{"uuid": ..., "score": {"other uuid": points}}`, others sorted by UUID. Source:
# HAMi v2.10 pkg/device/nvidia/calculate_score.go, pkg/device/devices.go DecodePairScores.


def encode_scores(scores: Scores) -> str:
    """Encode the scores in the given order, byte for byte as HAMi."""
    return _encode(
        [{"uuid": uuid, "score": dict(sorted(pairs.items()))} for uuid, pairs in scores.items()]
    )


class _PairScores(msgspec.Struct, frozen=True):
    uuid: GpuUuid
    score: dict[GpuUuid, int]


def read_scores(text: str | None) -> Scores | None:
    """Decode the score annotation; None if it is absent or unreadable."""
    try:
        pairs = msgspec.json.decode(text or "", type=tuple[_PairScores, ...])
    except (msgspec.MsgspecError, RecursionError):
        return None
    return {pair.uuid: pair.score for pair in pairs}


# Settings of the report to the scheduler.


class ReportProfile(enum.StrEnum):
    """The form of the register annotation. It depends on the scheduler's version."""

    JSON = "json"
    """HAMi 2.8 and later."""
    COLON = "colon"
    """HAMi 2.5 up to and including 2.7.1, with a stamp in the handshake every 30 s."""

    @property
    def stamps(self) -> bool:
        """True if the scheduler drops a node whose handshake is older than 60 s."""
        return self is not ReportProfile.JSON


class ReportSettings(msgspec.Struct, frozen=True):
    """`topology_score`: write the score annotation; otherwise the reporter removes it."""

    profile: Annotated[
        ReportProfile,
        Field(
            "report.profile",
            choice(*ReportProfile),
            "Form of the register annotation, by the version of HAMi's scheduler. json: 2.8 and "
            "later. colon: 2.5 up to and including 2.7.1.",
            flag="--report-profile",
            live=True,
        ),
    ] = ReportProfile.JSON
    topology_score: Annotated[
        bool,
        Field(
            "report.topologyScore",
            boolean,
            "Also write the annotation with the links between the GPUs.",
            env=("ENABLE_TOPOLOGY_SCORE",),
            live=True,
        ),
    ] = False


# Computes the register and score annotations of the Node, and compares them with the present ones.
#
# The register annotation's form depends on the scheduler's version. The order of GPUs does not
# count: HAMi's plugin, which may run beside the agent for a while, has another at each scan.

Annotations = Mapping[str, str]


class NodeReport(msgspec.Struct, frozen=True):
    """The wanted texts; `score` None: there must be none.

    - `changes`: what to write, None: remove. Empty when the Node's annotations mean the same, else
      always the register annotation: a scheduler reads a new score only together with it.
    - `held`: the GPUs in the present register annotation, none when it is absent or unreadable.
    - `lopsided`: the pairs of GPUs that report different links to each other.
    """

    gpus: tuple[RegisteredGpu, ...]
    held: tuple[RegisteredGpu, ...]
    register: str
    score: str | None
    register_differs: bool
    changes: Mapping[str, str | None]
    lopsided: tuple[tuple[GpuUuid, GpuUuid], ...] = ()

    @property
    def is_said(self) -> bool:
        """True when the Node's annotations mean the same."""
        return not self.changes

    @property
    def changes_health(self) -> bool:
        """True when the health of a GPU in the present annotation differs."""
        before = {gpu.uuid: gpu.healthy for gpu in self.held}
        return any(before.get(gpu.uuid, gpu.healthy) != gpu.healthy for gpu in self.gpus)


def report_of(
    inventory: Inventory, annotations: Annotations, settings: ReportSettings
) -> NodeReport | None:
    """Compute the report of the inventory; None before the first scan and without any GPU.

    If the inventory has no GPU, the GPUs of the present annotation stay, unhealthy, with their
    scores: a scheduler treats an empty list as an error and keeps what it had (HAMi
    pkg/device/devices.go, UnMarshalNodeDevices).
    """
    if inventory.generation == 0:
        return None
    text, score = annotations.get(REGISTER), annotations.get(SCORE)
    held, is_json = read_register(text), settings.profile is ReportProfile.JSON

    gpus, wanted, linked = registered(inventory, colon=not is_json), score, list[Gpu]()
    if not gpus:
        gpus = tuple(msgspec.structs.replace(gpu, healthy=False) for gpu in held)
    else:
        linked = [shared.gpu for shared in told(inventory)] if settings.topology_score else []
        wanted = encode_scores(pair_scores(linked)) if linked else None
    if not gpus:
        return None

    register = encode_register(gpus) if is_json else encode_register_colon(gpus)
    is_same_form = is_json_form(text or "") == is_json
    is_same = is_same_form and collections.Counter(gpus) == collections.Counter(held)
    register_differs = register != text and not is_same
    changes: dict[str, str | None] = {REGISTER: register} if register_differs else {}
    if wanted != score and (wanted is None or read_scores(wanted) != read_scores(score)):
        changes = {REGISTER: register, SCORE: wanted}
    return NodeReport(gpus, held, register, wanted, register_differs, changes, lopsided(linked))


def read_register(text: str | None) -> tuple[RegisteredGpu, ...]:
    """Decode the register annotation in either form; empty if it is absent or unreadable."""
    try:
        return () if text is None else decode_either(text)
    except MalformedText:
        return ()


def register_differences(
    report: NodeReport, text: str, faulty: Collection[str] = ()
) -> tuple[str, ...]:
    """Describe how the present register annotation (`text`) differs, for people.

    It names an unreadable text or another form, else the first difference of each GPU. Health is
    not compared: only a serving agent knows it. `faulty`: UUIDs of GPUs that may be named in vain.
    """
    if not report.register_differs:
        return ()
    if not report.held:
        return ("cannot be read",)
    is_old, was_old = (not is_json_form(one) for one in (report.register, text))
    if is_old != was_old:
        return (f"is written {_READERS[was_old]}, and the agent would write {_READERS[is_old]}",)
    wanted = {gpu.uuid: gpu for gpu in report.gpus}
    held = {gpu.uuid: gpu for gpu in report.held if gpu.uuid in wanted or gpu.uuid not in faulty}

    texts = list[str]()
    for uuid in sorted(held | wanted):
        before, after = held.get(uuid), wanted.get(uuid)
        if before is None or after is None:
            is_named = "not named" if before is None else "named"
            texts.append(f"GPU {uuid} is {is_named}, unlike what the agent would say")
            continue
        for field, word in _WORDS.items():
            was, said = getattr(before, field), getattr(after, field)
            if was != said:
                texts.append(f"GPU {uuid}: {word} {was}, and the agent would say {said}")
                break
    if not texts and len({gpu.uuid for gpu in report.held}) < len(report.held):
        texts.append("names a GPU more than once")
    return tuple(texts)


_READERS = {False: "for schedulers from 2.8 on", True: "for schedulers up to 2.7.1"}
_WORDS = {
    "split_count": "slices",
    "registered_mib": "MiB",
    "core_percent": "percent of the cores",
    "type_name": "type",
    "mode": "mode",
    "index": "index",
    "numa": "NUMA node",
}

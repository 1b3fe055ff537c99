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
from agent.hami import gojson
from agent.hami.gojson import INT32, INT64, same
from agent.model import Gpu, GpuUuid, Inventory, Scores, SharedGpu, lopsided, pair_scores
from agent.setting import Field, boolean, choice

# The register annotation of the Node's GPUs in the form for schedulers from 2.8 on.
#
# A JSON array of GPUs: fixed key order, zero values absent. Source: HAMi v2.10
# pkg/device/devices.go, MarshalNodeDevices and UnMarshalNodeDevices.

NO_GPU = GpuUuid("")


class Placement(msgspec.Struct, frozen=True):
    """Where a MIG instance may be placed: its first memory slice and their number."""

    start: int = 0
    size: int = 0


class MigProfile(msgspec.Struct, frozen=True):
    """A MIG profile of the GPU."""

    name: str = ""
    memory_mib: int = 0
    core_percent: int = 0
    slice_count: int = 0
    placements: tuple[Placement, ...] = ()


class RegisteredGpu(msgspec.Struct, frozen=True):
    """One element of the annotation. Fields absent in the text have their default."""

    uuid: GpuUuid = NO_GPU
    index: int = 0
    split_count: int = 0
    registered_mib: int = 0
    core_percent: int = 0
    type_name: str = ""
    numa: int = 0
    mode: str = ""
    mig_profiles: tuple[MigProfile, ...] = ()
    healthy: bool = False


def told(inventory: Inventory) -> tuple[SharedGpu, ...]:
    """The GPUs that are reported to schedulers, sorted by index.

    A GPU that was not described since the agent started is omitted: its properties are unknown.
    """
    known = (shared for shared in inventory.gpus if shared.gpu.name)
    return tuple(sorted(known, key=lambda shared: (shared.gpu.index, shared.uuid)))


def registered(inventory: Inventory) -> tuple[RegisteredGpu, ...]:
    """The elements for the inventory, sorted by index.

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
            type_name=shared.type_name,
            numa=shared.gpu.numa or 0,
            mode=shared.mode,
            healthy=inventory.offers(shared),
        )
        for shared in told(inventory)
    )


def encode_register(gpus: Iterable[RegisteredGpu]) -> str:
    """Encode the GPUs in the given order, byte for byte as HAMi v2.10."""
    return gojson.encode(
        [{key: value for key, value in _wire_fields(gpu).items() if value} for gpu in gpus]
    )


def _wire_fields(gpu: RegisteredGpu) -> dict[str, object]:
    return {
        "id": gpu.uuid,
        "index": gpu.index,
        "count": gpu.split_count,
        "devmem": gpu.registered_mib,
        "devcore": gpu.core_percent,
        "type": gpu.type_name,
        "numa": gpu.numa,
        "mode": gpu.mode,
        "migProfiles": [
            {
                "name": profile.name,
                "memoryMB": profile.memory_mib,
                "core": profile.core_percent,
                "sliceCount": profile.slice_count,
                "placements": [msgspec.structs.asdict(place) for place in profile.placements],
            }
            for profile in gpu.mig_profiles
        ],
        "health": gpu.healthy,
    }


def decode_register(text: str) -> tuple[RegisteredGpu, ...]:
    """Decode the GPUs in the text's order; keys that no version of HAMi has are ignored.

    Fields that a scheduler's decoder checks but does not use are checked too: one wrong type loses
    the whole node. Unlike HAMi, an error returns no GPU at all.

    Raises:
        MalformedText: not a JSON array of objects, a value of another type or range, or no GPU.
    """
    if len(text) > TEXT_LIMIT:
        raise MalformedText(f"register annotation is over {TEXT_LIMIT} characters")
    value = gojson.decode(text, "register annotation")
    if not isinstance(value, list) and value is not None:
        raise MalformedText("register annotation is JSON, but not an array")
    if not value:
        raise MalformedText("register annotation names no GPU")
    gpus = list[RegisteredGpu]()
    for place, element in enumerate(value):
        where = f"register annotation, GPU {place}"
        gojson.fields(element, _UNREAD, where)
        gpus.append(RegisteredGpu(**gojson.fields(element, _GPU, where)))
    return tuple(gpus)


def same_meaning(one: str | None, other: str | None) -> bool:
    """True when a scheduler reads the same GPUs from both texts; see agent.hami.gojson.same."""
    return same(one, other, lambda text: collections.Counter(decode_register(text)))


_PLACEMENT: gojson.Table = {
    "start": ("start", gojson.integer(gojson.UINT32)),
    "size": ("size", gojson.integer(gojson.UINT32)),
}
_PROFILE: gojson.Table = {
    "name": ("name", gojson.text),
    "memorymb": ("memory_mib", gojson.integer(gojson.INT32)),
    "core": ("core_percent", gojson.integer(gojson.INT32)),
    "slicecount": ("slice_count", gojson.integer(gojson.UINT32)),
    "placements": ("placements", gojson.array(gojson.record(Placement, _PLACEMENT))),
}
_GPU: gojson.Table = {
    "id": ("uuid", gojson.text),
    "index": ("index", gojson.integer(gojson.UINT64)),
    "count": ("split_count", gojson.integer(gojson.INT32)),
    "devmem": ("registered_mib", gojson.integer(gojson.INT32)),
    "devcore": ("core_percent", gojson.integer(gojson.INT32)),
    "type": ("type_name", gojson.text),
    "numa": ("numa", gojson.integer(gojson.INT64)),
    "mode": ("mode", gojson.text),
    "migprofiles": ("mig_profiles", gojson.array(gojson.record(MigProfile, _PROFILE))),
    "health": ("healthy", gojson.flag),
}
_TEMPLATE: gojson.Table = {
    "name": ("name", gojson.text),
    "core": ("core", gojson.integer(gojson.INT32)),
    "memory": ("memory", gojson.integer(gojson.INT32)),
    "count": ("count", gojson.integer(gojson.INT32)),
}
_PAIRS: gojson.Table = {
    "uuid": ("uuid", gojson.text),
    "score": ("score", gojson.mapping(gojson.integer(gojson.INT64))),
}
_UNREAD: gojson.Table = {
    "migtemplate": (
        "migtemplate",
        gojson.array(gojson.nullable(gojson.array(gojson.record(dict, _TEMPLATE)))),
    ),
    "devicevendor": ("devicevendor", gojson.text),
    "custominfo": ("custominfo", gojson.mapping(gojson.anything)),
    "devicepairscore": ("devicepairscore", gojson.record(dict, _PAIRS)),
}
"""Fields of HAMi's struct that the agent does not use; 2.10 does not decode the last one."""


# The register annotation in the form for schedulers up to and including 2.7.1: records, no JSON.
#
#     text = { record ":" }    record = UUID "," slices "," MiB "," percent "," type "," NUMA ","
#                                       health [ "," index "," mode ]
#
# Source: HAMi v2.10 pkg/device/devices.go, DecodeNodeDevices (7 fields were HAMi v2.4's).

WHAT = "register annotation"
SHORT = 7
LENGTHS = (SHORT, 9)
"""Fields of a record. Only HAMi v2.4 wrote and read 7."""
DEFAULT_MODE = "hami-core"
"""The mode of a record with 7 fields."""

_TRUE = frozenset({"1", "t", "T", "TRUE", "true", "True"})
_FALSE = frozenset({"0", "f", "F", "FALSE", "false", "False"})

_SEPARATORS = re.compile("[,:]")


def is_json_form(text: str) -> bool:
    """Whether a register annotation has the JSON form, and not that of records."""
    return text.lstrip().startswith("[") or text == "null"


def decode_either(text: str) -> tuple[RegisteredGpu, ...]:
    """Decode a register annotation of either form. Raises MalformedText."""
    return decode_register(text) if is_json_form(text) else decode_register_colon(text)


def registered_colon(inventory: Inventory) -> tuple[RegisteredGpu, ...]:
    """The elements for the inventory; these schedulers expect `NVIDIA-` before every name.

    Source: HAMi v2.7.1 pkg/device-plugin/nvidiadevice/nvinternal/plugin/register.go.
    """
    return tuple(
        msgspec.structs.replace(gpu, type_name=f"NVIDIA-{shared.gpu.name}")
        for gpu, shared in zip(registered(inventory), told(inventory), strict=True)
    )


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


def same_meaning_colon(one: str | None, other: str | None) -> bool:
    """True when such a scheduler reads the same GPUs from both; see agent.hami.gojson.same.

    Records of 7 and of 9 fields differ: v2.4 reads only 7.
    """
    return same(one, other, _meaning)


def _meaning(text: str) -> tuple[collections.Counter[int], collections.Counter[RegisteredGpu]]:
    lengths = collections.Counter(record.count(",") for record in text.split(":") if record)
    return lengths, collections.Counter(decode_register_colon(text))


def _gpu(record: str, where: str) -> RegisteredGpu:
    fields = record.split(",")
    if len(fields) not in LENGTHS:
        raise MalformedText(f"{where}: {cap(record)!r} has {len(fields)} fields; expected 7 or 9")
    uuid, count, memory, cores, type_name, numa, health = fields[:7]
    index, mode = fields[7:] or ("0", DEFAULT_MODE)
    if health not in _TRUE | _FALSE:
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
        healthy=health in _TRUE,
    )


def _number(text: str, bounds: tuple[int, int], where: str) -> int:
    value = gojson.parse_int(text, bounds)
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
    r"[ _](?P<year>[0-9]{4})[-.](?P<month>[0-9]{2})[-.](?P<day>[0-9]{2})"
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
                date = f"{match['year']}-{match['month']}-{match['day']}"
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

SCORE_TEXT = "score annotation"


def encode_scores(scores: Scores) -> str:
    """Encode the scores in the given order, byte for byte as HAMi."""
    return gojson.encode(
        [{"uuid": uuid, "score": dict(sorted(pairs.items()))} for uuid, pairs in scores.items()]
    )


def decode_scores(text: str) -> Scores:
    """Decode the scores; unknown keys are ignored.

    Raises:
        MalformedText: not a JSON array of GPUs with whole points. A scheduler then rejects the
            whole node.
    """
    if len(text) > TEXT_LIMIT:
        raise MalformedText(f"{SCORE_TEXT} is over {TEXT_LIMIT} characters")
    value = gojson.decode(text, SCORE_TEXT)
    if not isinstance(value, list):
        raise MalformedText(f"{SCORE_TEXT} is JSON, but not an array")
    scores = dict[GpuUuid, Mapping[GpuUuid, int]]()
    for place, element in enumerate(value):
        values = gojson.fields(element, _SCORED_GPU, f"{SCORE_TEXT}, GPU {place}")
        scores[GpuUuid(values.get("uuid", ""))] = values.get("points", {})
    return scores


def same_scores(one: str | None, other: str | None) -> bool:
    """True when a scheduler reads the same scores from both texts; see agent.hami.gojson.same."""
    return same(one, other, decode_scores)


_SCORED_GPU: gojson.Table = {
    "uuid": ("uuid", gojson.text),
    "score": ("points", gojson.mapping(gojson.integer(gojson.INT64))),
}


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
# The register annotation's form depends on the scheduler's version. Annotations are compared by
# their meaning: order, spaces and keys that no scheduler reads do not count.

Annotations = Mapping[str, str]


class NodeReport(msgspec.Struct, frozen=True):
    """The wanted texts, and whether the Node's differ; `score` None: there must be none.

    `held` are the GPUs in the present register annotation, empty when it is absent or unreadable;
    `lopsided` are the pairs of GPUs that report different links to each other.
    """

    gpus: tuple[RegisteredGpu, ...]
    held: tuple[RegisteredGpu, ...]
    register: str
    score: str | None
    register_differs: bool
    score_differs: bool
    lopsided: tuple[tuple[GpuUuid, GpuUuid], ...] = ()

    @property
    def is_said(self) -> bool:
        """True when the Node's annotations mean the same."""
        return not (self.register_differs or self.score_differs)

    @property
    def changes(self) -> dict[str, str | None]:
        """What to write (None: remove): always the register annotation, the score if it differs.

        A scheduler reads a new score only together with a register annotation.
        """
        changes: dict[str, str | None] = {REGISTER: self.register}
        if self.score_differs:
            changes[SCORE] = self.score
        return changes

    @property
    def is_health_alone(self) -> bool:
        """True when only the health of GPUs differs."""
        return _as_healthy(self.gpus) == _as_healthy(self.held)

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
    held, profile = read_register(text), settings.profile
    linked: list[Gpu] = []
    gpus = registered(inventory) if profile is ReportProfile.JSON else registered_colon(inventory)
    if not gpus:
        gpus = tuple(msgspec.structs.replace(gpu, healthy=False) for gpu in held)
        wanted = score
    else:
        linked = [shared.gpu for shared in told(inventory)] if settings.topology_score else []
        wanted = encode_scores(pair_scores(linked)) if linked else None
    if not gpus:
        return None
    is_json = profile is ReportProfile.JSON
    encode, same = (
        (encode_register, same_meaning) if is_json else (encode_register_colon, same_meaning_colon)
    )
    register = encode(gpus)
    return NodeReport(
        gpus=gpus,
        held=held,
        register=register,
        score=wanted,
        register_differs=not same(register, text),
        score_differs=not same_scores(wanted, score),
        lopsided=lopsided(linked),
    )


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


def _as_healthy(gpus: tuple[RegisteredGpu, ...]) -> frozenset[RegisteredGpu]:
    return frozenset(msgspec.structs.replace(gpu, healthy=True) for gpu in gpus)

"""What the Node's annotations must say of the inventory, and whether they do.

One place for all forms: the register annotation by the scheduler's version, and the score
annotation beside it. An annotation that means the same is the same: order, spaces and keys that
nobody reads are free.
"""

import dataclasses
from collections.abc import Mapping

from agent.codec.register import (
    RegisteredGpu,
    decode_register,
    encode_register,
    registered,
    same_meaning,
    told,
)
from agent.codec.register_colon import (
    LONG,
    SHORT,
    decode_register_colon,
    encode_register_colon,
    registered_colon,
    same_meaning_colon,
)
from agent.codec.score import encode_scores, same_scores
from agent.core.cluster.annotations import REGISTER, SCORE
from agent.core.errors import MalformedText
from agent.core.inventory.gpu import Gpu, GpuUuid
from agent.core.inventory.inventory import Inventory
from agent.core.inventory.topology import lopsided, pair_scores
from agent.core.report_settings import ReportProfile, ReportSettings

Annotations = Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class NodeReport:
    """The texts as they must be, and whether the Node's say otherwise; `score` None: none may be.

    `held` is what the register annotation says now, empty when it is absent or cannot be read;
    `lopsided` are the pairs of GPUs that tell of different links to each other.
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
        """True when the Node's annotations say all of it."""
        return not (self.register_differs or self.score_differs)

    @property
    def changes(self) -> dict[str, str | None]:
        """What to write, None to remove: the register annotation always, the score if it differs.

        A scheduler takes a new score only with a text that makes it read again.
        """
        found: dict[str, str | None] = {REGISTER: self.register}
        if self.score_differs:
            found[SCORE] = self.score
        return found

    @property
    def is_health_alone(self) -> bool:
        """True when all that differs is how GPUs are."""
        return _well(self.gpus) == _well(self.held)

    @property
    def changes_health(self) -> bool:
        """True when a GPU that the annotation names is healthy in one and not in the other."""
        before = {gpu.uuid: gpu.healthy for gpu in self.held}
        return any(before.get(gpu.uuid, gpu.healthy) != gpu.healthy for gpu in self.gpus)


def report_of(
    inventory: Inventory, annotations: Annotations, settings: ReportSettings
) -> NodeReport | None:
    """What the annotations must say; None while there is nothing to say.

    Nothing is said before the first scan. Without any GPU the ones that are known there stay,
    unhealthy, and so do their scores: a scheduler takes an empty list for an error and keeps what
    it had (HAMi pkg/device/devices.go, UnMarshalNodeDevices).
    """
    if inventory.generation == 0:
        return None
    text, score = annotations.get(REGISTER), annotations.get(SCORE)
    held, profile = read_register(text), settings.profile
    linked: list[Gpu] = []
    gpus = registered(inventory) if profile is ReportProfile.JSON else registered_colon(inventory)
    if not gpus:
        gpus = tuple(dataclasses.replace(gpu, healthy=False) for gpu in held)
        wanted = score
    else:
        linked = [shared.gpu for shared in told(inventory)] if settings.topology_score else []
        wanted = encode_scores(pair_scores(linked)) if linked else None
    if not gpus:
        return None
    register = _encode(gpus, profile)
    same = same_meaning if profile is ReportProfile.JSON else same_meaning_colon
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
    """The GPUs of the annotation in either form; none when it is absent or in none of them."""
    if text is None:
        return ()
    for decode in (decode_register, decode_register_colon):
        try:
            return decode(text)
        except MalformedText:
            continue
    return ()


def register_differences(report: NodeReport, text: str) -> tuple[str, ...]:
    """Where the register annotation, which is `text`, says something else: for people.

    Its form, or that it cannot be read; else GPU by GPU the first thing that differs. How a GPU is
    only the agent that serves knows: who looks before a start has judged none.
    """
    if not report.register_differs:
        return ()
    if not report.held:
        return ("cannot be read",)
    is_old, was_old = (not one.lstrip().startswith("[") for one in (report.register, text))
    if is_old != was_old:
        return (f"is written {_READERS[was_old]}, and the agent would write {_READERS[is_old]}",)
    held = {gpu.uuid: gpu for gpu in report.held}
    wanted = {gpu.uuid: gpu for gpu in report.gpus}
    found = (_difference(uuid, held.get(uuid), wanted.get(uuid)) for uuid in sorted(held | wanted))
    twice = ("names a GPU more than once",) if len(held) < len(report.held) else ()
    return tuple(one for one in found if one) or twice


_READERS = {False: "for schedulers from 2.8 on", True: "for schedulers up to 2.7.1"}
_SAID = {
    "split_count": "slices",
    "registered_mib": "MiB",
    "core_percent": "percent of the cores",
    "type_name": "type",
    "mode": "mode",
    "index": "index",
    "numa": "NUMA node",
}


def _difference(uuid: GpuUuid, held: RegisteredGpu | None, wanted: RegisteredGpu | None) -> str:
    if held is None or wanted is None:
        return (
            f"GPU {uuid} is {'not ' if held is None else ''}named, unlike what the agent would say"
        )
    for field, word in _SAID.items():
        before, after = getattr(held, field), getattr(wanted, field)
        if before != after:
            return f"GPU {uuid}: {word} {before}, and the agent would say {after}"
    return ""


def _encode(gpus: tuple[RegisteredGpu, ...], profile: ReportProfile) -> str:
    if profile is ReportProfile.JSON:
        return encode_register(gpus)
    return encode_register_colon(gpus, SHORT if profile is ReportProfile.COLON_7 else LONG)


def _well(gpus: tuple[RegisteredGpu, ...]) -> frozenset[RegisteredGpu]:
    return frozenset(dataclasses.replace(gpu, healthy=True) for gpu in gpus)

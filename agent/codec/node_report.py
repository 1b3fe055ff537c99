"""Computes the register and score annotations of the Node, and compares them with the present ones.

The register annotation's form depends on the scheduler's version. Annotations are compared by their
meaning: order, spaces and keys that no scheduler reads do not count.
"""

from collections.abc import Collection, Mapping

import msgspec

from agent.codec.register import (
    RegisteredGpu,
    encode_register,
    registered,
    same_meaning,
    told,
)
from agent.codec.register_colon import (
    decode_either,
    encode_register_colon,
    is_json_form,
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
    texts = (_difference(uuid, held.get(uuid), wanted.get(uuid)) for uuid in sorted(held | wanted))
    is_twice = len({gpu.uuid for gpu in report.held}) < len(report.held)
    twice = ("names a GPU more than once",) if is_twice else ()
    return tuple(text for text in texts if text) or twice


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


def _difference(uuid: GpuUuid, held: RegisteredGpu | None, wanted: RegisteredGpu | None) -> str:
    if held is None or wanted is None:
        return (
            f"GPU {uuid} is {'not ' if held is None else ''}named, unlike what the agent would say"
        )
    for field, word in _WORDS.items():
        before, after = getattr(held, field), getattr(wanted, field)
        if before != after:
            return f"GPU {uuid}: {word} {before}, and the agent would say {after}"
    return ""


def _encode(gpus: tuple[RegisteredGpu, ...], profile: ReportProfile) -> str:
    is_json = profile is ReportProfile.JSON
    return encode_register(gpus) if is_json else encode_register_colon(gpus)


def _as_healthy(gpus: tuple[RegisteredGpu, ...]) -> frozenset[RegisteredGpu]:
    return frozenset(msgspec.structs.replace(gpu, healthy=True) for gpu in gpus)

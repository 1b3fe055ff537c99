"""The score annotation: how well each pair of GPUs is joined, for schedulers from 2.7 on.

A JSON array of `{"uuid": ..., "score": {"other uuid": points}}`, others sorted by UUID.
Source: HAMi v2.10 pkg/device/nvidia/calculate_score.go, pkg/device/devices.go DecodePairScores.
"""

import json

from agent.codec import gojson
from agent.codec.meaning import same
from agent.core.annotations import TEXT_LIMIT
from agent.core.errors import MalformedText, cap
from agent.core.gpu import GpuUuid
from agent.core.topology import Scores

WHAT = "score annotation"


def encode_scores(scores: Scores) -> str:
    """The text, GPUs in the given order, byte for byte what HAMi would write."""
    return gojson.encode(
        [{"uuid": uuid, "score": dict(sorted(pairs.items()))} for uuid, pairs in scores.items()]
    )


def decode_scores(text: str) -> Scores:
    """The points that the text says; unknown keys are ignored.

    Raises:
        MalformedText: it is no JSON array of GPUs with whole points. A scheduler then rejects the
            whole node.
    """
    if len(text) > TEXT_LIMIT:
        raise MalformedText(f"{WHAT} is over {TEXT_LIMIT} characters")
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedText(f"{WHAT} is no JSON: {cap(str(error))}") from error
    if not isinstance(value, list):
        raise MalformedText(f"{WHAT} is JSON, but no array")
    return dict(_gpu(element, f"{WHAT}, GPU {place}") for place, element in enumerate(value))


def same_scores(one: str | None, other: str | None) -> bool:
    """True when a scheduler reads the same points from both, or both are absent.

    A text that cannot be decoded means the same as itself only.
    """
    return same(one, other, decode_scores)


_POINTS = gojson.integer(gojson.INT64)


def _gpu(element: object, where: str) -> tuple[GpuUuid, dict[GpuUuid, int]]:
    if not isinstance(element, dict):
        raise MalformedText(f"{where} is no object")
    uuid, pairs = element.get("uuid", ""), element.get("score", {})
    if not isinstance(uuid, str) or not isinstance(pairs, dict):
        raise MalformedText(f"{where} has no text `uuid` or no object `score`")
    points = {GpuUuid(other): value for other, value in pairs.items()}
    for other, value in points.items():
        _POINTS(value, f"{where}, score of {cap(other)}")
    return GpuUuid(uuid), points

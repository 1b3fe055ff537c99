"""The score annotation: how well each pair of GPUs is linked, for schedulers from 2.7 on.

A JSON array of `{"uuid": ..., "score": {"other uuid": points}}`, others sorted by UUID.
Source: HAMi v2.10 pkg/device/nvidia/calculate_score.go, pkg/device/devices.go DecodePairScores.
"""

from agent.codec import gojson
from agent.codec.meaning import same
from agent.core.cluster.annotations import TEXT_LIMIT
from agent.core.errors import MalformedText
from agent.core.inventory.gpu import GpuUuid
from agent.core.inventory.topology import Scores

WHAT = "score annotation"


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
        raise MalformedText(f"{WHAT} is over {TEXT_LIMIT} characters")
    value = gojson.decode(text, WHAT)
    if not isinstance(value, list):
        raise MalformedText(f"{WHAT} is JSON, but not an array")
    return dict(_gpu(element, f"{WHAT}, GPU {place}") for place, element in enumerate(value))


def same_scores(one: str | None, other: str | None) -> bool:
    """True when a scheduler reads the same scores from both texts; see agent.codec.meaning.same."""
    return same(one, other, decode_scores)


_GPU: gojson.Table = {
    "uuid": ("uuid", gojson.text),
    "score": ("points", gojson.mapping(gojson.integer(gojson.INT64))),
}


def _gpu(element: object, where: str) -> tuple[GpuUuid, dict[GpuUuid, int]]:
    values = gojson.fields(element, _GPU, where)
    return GpuUuid(values.get("uuid", "")), values.get("points", {})

"""What HAMi 2.4 to 2.9 wrote is read here; where their code read more or less, it is named."""

import datetime as dt
from collections.abc import Callable
from typing import Any

import pytest

from agent.errors import MalformedText
from agent.hami.annotations import decode_pod_devices, decode_register, decode_register_colon
from agent.model import type_name
from agent.sandbox.scheduler.registry import decode_handshake
from tests.hami_vectors import Vector, vectors
from tests.unit.codec.test_pod import groups_of
from tests.unit.codec.test_register import gpu_of

TOLERANT = "colon decoder tolerance"
PODS = "pod annotation decode (empty groups, bad numbers)"
REFUSED = {
    **dict.fromkeys(("209", "219", "229"), "a number that is none is not read as 0"),
    **dict.fromkeys(("210", "220", "230"), "a device of three fields is not dropped with all"),
}
"""Texts of pods that they guessed at."""


def both_stamps(vector: Vector) -> tuple[object, object]:
    word, stamp = decode_handshake(vector.expected)
    assert stamp is not None
    written = dt.datetime.fromisoformat(vector.given[:26] + "+00:00")
    return ("Reported", 0), (word, round((written - stamp).total_seconds(), 5))


def both_pods(vector: Vector) -> tuple[object, object]:
    """Up to 2.8 empty groups were dropped, so that the rest lost its place."""
    theirs = [[one for one in group if one["UUID"]] for group in vector.expected["map"]["NVIDIA"]]
    ours = decode_pod_devices(vector.given)
    assert len(vector.given.split(";")) == len(ours)
    return groups_of([group for group in theirs if group]), tuple(filter(None, ours))


def both_colon(vector: Vector) -> tuple[object, object]:
    given: list[dict[str, Any]] = [{"mode": "hami-core", **device} for device in vector.given]
    return tuple(map(gpu_of, given)), decode_register_colon(vector.expected)


BOTH: dict[str, Callable[[Vector], tuple[object, object]]] = {
    "register JSON of two GPUs": lambda one: (
        tuple(map(gpu_of, one.given)),
        decode_register(one.expected),
    ),
    "register colon text of two GPUs": both_colon,
    "v2.4.0 register text, 7 fields": both_colon,
    PODS: both_pods,
    # Up to 2.7.1 it was `NVIDIA-NVIDIA …`; schedulers of that age are not served.
    "type string by version": lambda one: (
        one.expected[">=v2.8.0"],
        [type_name(name) for name in one.given["nvmlNames"]],
    ),
    "handshake value written by the plugin": both_stamps,
}
"""What HAMi meant, and what is read here, by the vector's name."""
ELSEWHERE = {
    "next container, old decoder drops empty groups",
    "second Allocate of a two-container pod",
    "v2.4.x/v2.5.x text for a GPU-less container",
}
"""Names of vectors whose texts are those of others."""
ALL = vectors("legacy").values()
GUESSED = [one for one in ALL if one.name == TOLERANT or one.id[-3:] in REFUSED]


@pytest.mark.parametrize(
    "vector", [one for one in ALL if one not in GUESSED and one.name not in ELSEWHERE], ids=str
)
def test_what_old_versions_wrote_is_read(vector: Vector):
    theirs, ours = BOTH[vector.name](vector)

    assert theirs == ours


@pytest.mark.parametrize("vector", GUESSED, ids=str)
def test_a_text_that_they_guessed_at_is_refused(vector: Vector):
    """A count that is no number, a negative index and a record of one field passed there."""
    decode = decode_register_colon if vector.name == TOLERANT else decode_pod_devices
    assert "" == vector.expected["error"]
    with pytest.raises(MalformedText):
        decode(vector.given)

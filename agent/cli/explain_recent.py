"""Renders the pods that kubelets refused, the last first."""

import datetime as dt
from collections.abc import Iterator, Sequence
from typing import Final

from agent.cli.explain_view import folded
from agent.codec.nodelock import encode_stamp
from agent.core.cluster.snapshot import RefusedPod
from agent.core.errors import cap
from agent.sandbox.explain.gates import agent_sentence, refusal_id
from agent.sandbox.explain.story import ago, counted

SHOWN: Final = 20
_SENTENCE: Final = 512
_UNKNOWN: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def recent_text(refused: Sequence[RefusedPod], source: str, now: dt.datetime, columns: int) -> str:
    """The refusals for people, folded at `columns`."""
    return folded(_lines(refused, source, now), columns)


def recent_data(refused: Sequence[RefusedPod]) -> list[dict[str, object]]:
    """All refusals, for programs."""
    return [
        {
            "namespace": pod.namespace,
            "pod": pod.name,
            "node": pod.node,
            "at": encode_stamp(pod.at) if pod.at else None,
            "id": refusal_id(pod.message),
            "message": pod.message,
        }
        for pod in _ordered(refused)
    ]


def _lines(
    refused: Sequence[RefusedPod], source: str, now: dt.datetime
) -> Iterator[tuple[int, int, str]]:
    if not refused:
        yield 0, 2, "No kubelet has refused a pod that still exists."
    for pod in _ordered(refused)[:SHOWN]:
        name = f"{cap(pod.namespace, 64)}/{cap(pod.name, 256)}"
        when = ago(pod.at, now) if pod.at else "at an unknown time"
        identifier = refusal_id(pod.message)
        entry = f" [RUNBOOK {identifier}]" if identifier else ""
        yield 0, 2, f"{name} on {cap(pod.node, 128)}, {when}{entry}"
        yield 2, 4, cap(agent_sentence(pod.message), _SENTENCE)
    if len(refused) > SHOWN:
        yield 0, 2, f"{counted(len(refused) - SHOWN, 'older refusal')} not shown: -o json has all"
    yield 0, 2, f"data: {cap(source, 256)}, read now"


def _ordered(refused: Sequence[RefusedPod]) -> list[RefusedPod]:
    return sorted(refused, key=lambda pod: pod.at or _UNKNOWN, reverse=True)

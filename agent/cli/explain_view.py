"""Renders an explanation as text for people, and as data for programs."""

import datetime as dt
import textwrap
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from agent.core.errors import cap
from agent.sandbox.explain.story import (
    Explanation,
    Gate,
    GateVerdict,
    GpuVerdict,
    NodeVerdict,
    PlacingChange,
    span,
)

NODES_SHOWN: Final = 5


def rendered(explanation: Explanation, source: str, now: dt.datetime, columns: int) -> str:
    """The explanation for people, folded at `columns`."""
    return folded(_lines(explanation, source, now), columns)


def folded(lines_of: Iterable[tuple[int, int, str]], columns: int) -> str:
    """Lines of indent, indent of what is folded, and text, folded at `columns`."""
    lines: list[str] = []
    for indent, hanging, text in lines_of:
        lines += textwrap.wrap(
            text,
            columns,
            initial_indent=" " * indent,
            subsequent_indent=" " * min(hanging, columns // 3),
            break_on_hyphens=False,
        )
    return "".join(f"{line}\n" for line in lines)


def explanation_data(explanation: Explanation) -> dict[str, object]:
    """The explanation for programs."""
    return {
        "namespace": explanation.namespace,
        "pod": explanation.name,
        "phase": explanation.phase,
        "headline": explanation.headline,
        "blocked": explanation.is_blocked,
        "gates": [_gate(gate) for gate in explanation.gates],
        "nodes": [_plain(node) for node in explanation.nodes],
        "nodesByReason": dict(explanation.reasons),
        "changes": [_plain(change) for change in explanation.changes],
        "missing": list(explanation.missing),
    }


def _lines(
    explanation: Explanation, source: str, now: dt.datetime
) -> Iterator[tuple[int, int, str]]:
    """Indent, indent of what is folded, and text of each line."""
    yield 0, 2, explanation.headline
    for gate in explanation.gates:
        reason = f" [RUNBOOK {gate.reason}]" if gate.reason else ""
        yield 0, 5, f"{gate.verdict.value:<4} {gate.name:<10} {gate.said}{reason}"
        for fact in gate.facts:
            yield 7, 9, fact
        if gate.name == "placement" and gate.verdict is GateVerdict.BLOCKED:
            yield from _node_lines(explanation)
        if gate.advice:
            yield 7, 9, f"do: {gate.advice}"
    if explanation.changes:
        yield 0, 2, "Smallest changes that would place it (tried with the scheduler's model):"
        for number, change in enumerate(explanation.changes, 1):
            yield 2, 6, f"({number}) {change.said} -> {cap(change.node, 128)}"
    for text in explanation.missing:
        yield 0, 2, f"missing: {text}"
    age = span((now - explanation.taken).total_seconds())
    yield 0, 2, f"data: {cap(source, 256)}, read {age} ago"


def _node_lines(explanation: Explanation) -> Iterator[tuple[int, int, str]]:
    shown = [node for node in explanation.nodes if not node.is_fit][:NODES_SHOWN]
    for node in shown:
        yield 7, 9, f"{cap(node.name, 128)}: {cap(node.said)}"
        for line in _gpu_lines(node):
            yield 9, 11, line
        if node.biggest and node.gpus:
            yield 9, 11, f"most is held by {', '.join(node.biggest)}"
    reasons = explanation.reasons
    if max(reasons.values(), default=0) > len(shown) or len(explanation.nodes) > len(shown):
        told = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())
        if told:
            yield 7, 9, f"Nodes by reason: {told}"


def _gpu_lines(node: NodeVerdict) -> Iterator[str]:
    """One line for all GPUs of which the same is said."""
    alike: dict[str, list[int]] = {}
    for gpu in node.gpus:
        said = f"{gpu.reason}: {gpu.said}" if gpu.reason else ""
        alike.setdefault(said, []).append(gpu.index)
    for said, indexes in alike.items():
        fits = "fits" if len(indexes) == 1 else "fit"
        yield f"GPU {', '.join(map(str, indexes))} {said or fits}"


def _gate(gate: Gate) -> dict[str, object]:
    return {
        "name": gate.name,
        "verdict": gate.verdict.name.lower().replace("_", "-"),
        "said": gate.said,
        "reason": gate.reason,
        "advice": gate.advice,
        "facts": list(gate.facts),
    }


def _plain(value: NodeVerdict | GpuVerdict | PlacingChange) -> dict[str, object]:
    """A value of the story for JSON, with JSON's names."""
    return {_camel(name): _entry(one) for name, one in msgspec.structs.asdict(value).items()}


def _entry(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(one) if isinstance(one, GpuVerdict) else one for one in value]
    return value


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)

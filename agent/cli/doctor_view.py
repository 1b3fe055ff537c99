"""Renders the findings of `doctor`: lines for people, data for programs."""

import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from agent.core.errors import cap
from agent.core.node.check_groups import consequence, group_of
from agent.core.node.findings import Finding, PreflightVerdict, counted

_INDENT: Final = 20
_LONGEST: Final = 1024
"""Characters of a text; some come from the cluster."""


def write_lines(findings: Sequence[Finding], columns: int, *, before: bool) -> None:
    """Print a line for each finding and one with their numbers, folded at `columns`.

    `before`: of `doctor --pre`.
    """
    each = _line if before else _lines
    lines = (line for one in findings for line in each(one))
    indent = " " * min(_INDENT, columns // 4)
    for line in (*lines, _sum(findings)):
        begin = indent if line.startswith(("means: ", "to do: ")) else ""
        parts = textwrap.wrap(
            line,
            columns,
            initial_indent=begin,
            subsequent_indent=f"{indent}  ",
            break_on_hyphens=False,
        )
        sys.stdout.writelines(f"{part}\n" for part in parts)


def document_of(findings: Sequence[Finding], *, before: bool) -> tuple[str, dict[str, object]]:
    """The kind and the data of the findings for programs."""
    counts = Counter(one.verdict for one in findings)
    data: dict[str, object] = {"ok": not counts[PreflightVerdict.WRONG]}
    if not before:
        data["complete"] = not counts[PreflightVerdict.UNKNOWN]
    data["findings"] = [_entry(one, before=before) for one in findings]
    return "Preflight" if before else "Checkup", data


def _line(finding: Finding) -> Iterator[str]:
    verdict, point = finding.verdict, finding.point.value
    line = f"{verdict.value:<6} {point:<11} {_safe(f'{finding.subject}: {finding.said}')}"
    if finding.advice:
        line += f"; {_safe(finding.advice)}"
    yield line if verdict is PreflightVerdict.OK else f"{line} [RUNBOOK {point}]"


def _lines(finding: Finding) -> Iterator[str]:
    group, verdict, point = group_of(finding.point).value, finding.verdict, finding.point.value
    said = _safe(f"{finding.subject}: {finding.said}")
    yield f"{group:<10} {verdict.value:<8} {point:<12} {said}"
    if verdict in {PreflightVerdict.WRONG, PreflightVerdict.NOTE}:
        yield f"means: {consequence(finding)}"
    if verdict is not PreflightVerdict.OK:
        advice = _safe(finding.advice)
        yield f"to do: {advice}{' ' if advice else ''}[RUNBOOK {point}]"


def _safe(text: str) -> str:
    """The text in one line, without what a terminal would obey."""
    return cap(text, _LONGEST)


def _sum(findings: Sequence[Finding]) -> str:
    counts = Counter(one.verdict for one in findings)
    notes = counted(counts[PreflightVerdict.NOTE], "note")
    unknown = counts[PreflightVerdict.UNKNOWN]
    unseen = f", {unknown} not checked" if unknown else ""
    wrong = counts[PreflightVerdict.WRONG]
    return f"{wrong} wrong, {notes}, {counts[PreflightVerdict.OK]} ok{unseen}"


def _entry(finding: Finding, *, before: bool) -> dict[str, str]:
    entry = {
        "id": finding.point.value,
        "verdict": finding.verdict.value.lower(),
        "subject": finding.subject,
        "said": finding.said,
        "advice": finding.advice,
    }
    if before:
        return entry
    means = "" if finding.verdict is PreflightVerdict.OK else consequence(finding)
    return entry | {"group": group_of(finding.point).value, "means": means}
